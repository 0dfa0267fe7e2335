// cpu.rms_norm: y = x * rsqrt(mean(x^2) + eps) * w over the last axis.  cpu.add_rms_norm: the same
// of x + r, rounded to the dtype of `sum` first, as the two ops one after the other would give it.
#pragma once

namespace ktg {
namespace KTG_ISA {
namespace {

KTG_IN float sum_of_squares(const float* x, long n) {
  F acc[4] = {zero(), zero(), zero(), zero()};
  long i = 0;
  for (; i + 64 <= n; i += 64)
    for (int j = 0; j < 4; ++j) {
      const F v = load(x + i + 16 * j);
      acc[j] = fma(v, v, acc[j]);
    }
  for (; i < n; i += 16) {
    const F v = load_n(x + i, n - i);
    acc[0] = fma(v, v, acc[0]);
  }
  return sum(add(add(acc[0], acc[1]), add(acc[2], acc[3])));
}

// x / rms rounded to bf16 before the weight, as most models do; gpt-oss rounds once, at the end.
static void norm_row_rounded(const float* x, const float* w, long n, float eps, float* y) {
  const float r = 1.0f / __builtin_sqrtf(sum_of_squares(x, n) / float(n) + eps);
  for (long i = 0; i < n; ++i) y[i] = bf16_to_f32(f32_to_bf16(x[i] * r)) * w[i];
}

KTG_IN void norm_row(const float* x, const float* w, long n, float eps, float* y, bool round) {
  if (round) return norm_row_rounded(x, w, n, eps, y);
  const F r = set1(1.0f / __builtin_sqrtf(sum_of_squares(x, n) / float(n) + eps));
  long i = 0;
  for (; i + 16 <= n; i += 16) store(y + i, mul(mul(load(x + i), r), load(w + i)));
  if (i < n) store_n(y + i, mul(mul(load_n(x + i, n - i), r), load_n(w + i, n - i)), n - i);
}

KTG_IN bool rounds_before_weight(const Instr& in, const TensorArg& y) {
  return y.dtype == DT_BF16 && in.attr[A_LATE_CAST] == 0;
}

static size_t row_local(const Instr& in, const Sizes&) {
  return 3 * align64(size_t(tensor(in, 0).dim[2] + 16) * 4);
}

static void rms_norm(const Ctx& ctx, const Instr& in) {
  const TensorArg &x = tensor(in, 0), &y = tensor(in, 2);
  const long n = x.dim[2], heads = x.dim[1];
  const float* w = f32_row(tensor(in, 1), 0);
  float* a = reinterpret_cast<float*>(ctx.local);
  float* b = a + round_up(n + 16, 16);
  const Range r = my_range(ctx, x.dim[0] * heads);
  for (long i = r.begin; i < r.end; ++i) {
    norm_row(row_in(x, i / heads, i % heads, a), w, n, float(in.attr[A_EPS]), b,
             rounds_before_weight(in, y));
    row_out(y, i / heads, i % heads, b);
  }
}

static void add_rms_norm(const Ctx& ctx, const Instr& in) {
  const TensorArg &x = tensor(in, 0), &r = tensor(in, 1), &sum_out = tensor(in, 3),
                  &y = tensor(in, 4);
  const long n = x.dim[2];
  const float* w = f32_row(tensor(in, 2), 0);
  float* a = reinterpret_cast<float*>(ctx.local);
  float* b = a + round_up(n + 16, 16);
  float* c = b + round_up(n + 16, 16);
  const Range range = my_range(ctx, x.dim[0]);
  for (long i = range.begin; i < range.end; ++i) {
    const float *xr = row_in(x, i, 0, a), *rr = row_in(r, i, 0, b);
    for (long k = 0; k < n; ++k) c[k] = xr[k] + rr[k];
    row_out(sum_out, i, 0, c);
    norm_row(row_in(sum_out, i, 0, a), w, n, float(in.attr[A_EPS]), b, rounds_before_weight(in, y));
    row_out(y, i, 0, b);
  }
}

}  // namespace
}  // namespace KTG_ISA
}  // namespace ktg
