// Row-wise odds and ends: add, add3, mul, sigmoid, copy, gather_rows, embedding.
// Rows are divided among the threads; a row is widened to f32, computed and narrowed.
#pragma once

namespace ktg {
namespace KTG_ISA {
namespace {

enum ElementOp : int { EL_COPY, EL_ADD, EL_ADD3, EL_MUL, EL_SIGMOID };

template <int OP>
KTG_IN F element(F a, F b, F c) {
  switch (OP) {
    case EL_ADD:
      return add(a, b);
    case EL_ADD3:
      return add(add(a, b), c);
    case EL_MUL:
      return mul(a, b);
    case EL_SIGMOID:
      return sigmoid(a);
    default:
      return a;
  }
}

template <int OP, int INPUTS>
static void elementwise(const Ctx& ctx, const Instr& in) {
  const TensorArg& y = tensor(in, INPUTS);
  const long n = y.dim[2], heads = y.dim[1], pitch = round_up(n + 16, 16);
  float* buffer = reinterpret_cast<float*>(ctx.local);
  const Range r = my_range(ctx, y.dim[0] * heads);
  for (long i = r.begin; i < r.end; ++i) {
    const long t = i / heads, h = i % heads;
    const float* src[3] = {};
    for (int j = 0; j < INPUTS; ++j) {
      src[j] = row_in(tensor(in, j), t, h, buffer + j * pitch);
      if (tensor(in, j).dim[2] == n) continue;  // mul: a factor per row
      float* wide = buffer + j * pitch;
      const float value = src[j][0];
      for (long k = 0; k < n; ++k) wide[k] = value;
      src[j] = wide;
    }
    float* out = buffer + 3 * pitch;
    for (long k = 0; k < n; k += 16) {
      F v[3] = {};
      for (int j = 0; j < INPUTS; ++j) v[j] = load_n(src[j] + k, n - k);
      store(out + k, element<OP>(v[0], v[1], v[2]));
    }
    row_out(y, t, h, out);
  }
}
template <int INPUTS>
static size_t elementwise_local(const Instr& in, const Sizes&) {
  return 4 * align64(size_t(tensor(in, INPUTS).dim[2] + 16) * 4);
}

static void copy_row(const TensorArg& src, long i, const TensorArg& dst, long j, float* buffer) {
  row_out(dst, j, 0, row_in(src, i, 0, buffer));
}

static void gather_rows(const Ctx& ctx, const Instr& in) {
  const TensorArg &x = tensor(in, 0), &y = tensor(in, 2);
  const Range r = my_range(ctx, y.dim[0]);
  for (long i = r.begin; i < r.end; ++i)
    copy_row(x, ctx.batch->out_rows[i], y, i, reinterpret_cast<float*>(ctx.local));
}

static void embedding(const Ctx& ctx, const Instr& in) {
  const TensorArg &ids = tensor(in, 0), &table = tensor(in, 1), &y = tensor(in, 2);
  const Range r = my_range(ctx, y.dim[0]);
  for (long i = r.begin; i < r.end; ++i) {
    const int id = *int_row(ids, i);
    if (id < 0 || id >= table.dim[0])
      fail(ctx, "cpu.embedding: token id outside the vocabulary", id);
    else
      copy_row(table, id, y, i, reinterpret_cast<float*>(ctx.local));
  }
}
static size_t copy_local(const Instr& in, const Sizes&) {
  return align64(size_t(tensor(in, in.count - 1).dim[2] + 16) * 4);
}

}  // namespace
}  // namespace KTG_ISA
}  // namespace ktg
