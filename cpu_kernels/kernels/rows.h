// Rows of strided tensors as f32, whatever the tensor's dtype. Kernels compute on these.
#pragma once

namespace ktg {
namespace KTG_ISA {
namespace {

static constexpr long lmin(long a, long b) { return a < b ? a : b; }
static constexpr long lmax(long a, long b) { return a > b ? a : b; }
KTG_IN long ceil_div(long a, long b) { return (a + b - 1) / b; }
KTG_IN long round_up(long a, long b) { return ceil_div(a, b) * b; }
KTG_IN size_t align64(size_t n) { return (n + 63) & ~size_t(63); }

KTG_IN bool has(const Instr& in, int i) { return in.op[i].kind != KIND_NONE; }
KTG_IN const TensorArg& tensor(const Instr& in, int i) { return in.op[i].t; }
KTG_IN long item_bytes(int dtype) { return dtype == DT_BF16 ? 2 : 4; }

KTG_IN char* row_ptr(const TensorArg& t, long i, long h) {
  return t.data + (i * t.stride[0] + h * t.stride[1]) * item_bytes(t.dtype);
}
KTG_IN const int* int_row(const TensorArg& t, long i) {
  return reinterpret_cast<const int*>(row_ptr(t, i, 0));
}
KTG_IN const float* f32_row(const TensorArg& t, long i) {
  return reinterpret_cast<const float*>(row_ptr(t, i, 0));
}

KTG_IN float bf16_to_f32(u16 v) {
  const uint32_t bits = uint32_t(v) << 16;
  float f;
  __builtin_memcpy(&f, &bits, 4);
  return f;
}
KTG_IN u16 f32_to_bf16(float f) {
  uint32_t u;
  __builtin_memcpy(&u, &f, 4);
  if (f != f) return u16(u >> 16 | 0x40);
  return u16((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}

KTG_IN void widen(const void* src, int dtype, long n, float* dst) {
  if (dtype == DT_F32) {
    __builtin_memcpy(dst, src, size_t(n) * 4);
    return;
  }
  const u16* s = static_cast<const u16*>(src);
  long i = 0;
  for (; i + 16 <= n; i += 16) store(dst + i, load_bf16(s + i));
  for (; i < n; ++i) dst[i] = bf16_to_f32(s[i]);
}
KTG_IN void narrow(const float* src, long n, void* dst, int dtype) {
  if (dtype == DT_F32) {
    if (dst != src) __builtin_memmove(dst, src, size_t(n) * 4);
    return;
  }
  u16* d = static_cast<u16*>(dst);
  long i = 0;
  for (; i + 16 <= n; i += 16) store_bf16(d + i, load(src + i));
  for (; i < n; ++i) d[i] = f32_to_bf16(src[i]);
}

// The row itself when it is f32, else a widened copy in `buffer`.
KTG_IN const float* row_in(const TensorArg& t, long i, long h, float* buffer) {
  char* p = row_ptr(t, i, h);
  if (t.dtype == DT_F32) return reinterpret_cast<const float*>(p);
  widen(p, t.dtype, t.dim[2], buffer);
  return buffer;
}
KTG_IN void row_out(const TensorArg& t, long i, long h, const float* src) {
  narrow(src, t.dim[2], row_ptr(t, i, h), t.dtype);
}

// This thread's part of [0, n): contiguous, the same for every run.
struct Range {
  long begin, end;
};
KTG_IN Range my_range(const Ctx& ctx, long n) {
  return {n * ctx.tid / ctx.threads, n * (ctx.tid + 1) / ctx.threads};
}

}  // namespace
}  // namespace KTG_ISA
}  // namespace ktg
