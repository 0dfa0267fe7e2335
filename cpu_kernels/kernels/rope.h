// cpu.rope, cpu.rope_append, cpu.rope_append_latent: rotary position embedding, alone or with the
// cache append. angle = f32(pos) * inv_freq as torch computes it; the first 2 * len(inv_freq)
// entries of a head rotate, the rest is copied. Products and sums are rounded one by one, like `x *
// cos + rotate_half(x) * sin`.
#pragma once

namespace ktg {
namespace KTG_ISA {
namespace {

struct Rotation {
  long half;  // pairs
  int style;
  float *cos, *sin;  // of this token, times the scale
  float *in, *out;   // one head
};

KTG_IN Rotation rotation(const Ctx& ctx, const Instr& in, const TensorArg& inv_freq, long width) {
  const long pitch = round_up(width + 16, 16);
  float* p = row_buffer(ctx) + pitch;  // the first buffer belongs to the appends
  return {inv_freq.dim[2], int(in.attr[A_STYLE]), p, p + inv_freq.dim[2], p + pitch, p + 2 * pitch};
}
static size_t rope_local(const Instr& in, const Sizes& s) { return append_local(in, s) * 2; }

KTG_IN void set_angles(const Rotation& r, const float* inv_freq, long pos, float scale) {
  for (long i = 0; i < r.half; ++i) {
    float s, c;
    sincos_f32(float(pos) * inv_freq[i], &s, &c);
    r.cos[i] = c * scale, r.sin[i] = s * scale;
  }
}

template <int STYLE>
KTG_IN void rotate(const Rotation& r) {
  constexpr bool pairs_in = STYLE != ROPE_HALF, pairs_out = STYLE == ROPE_INTERLEAVED;
  const float *x = r.in, *cos = r.cos, *sin = r.sin;
  float* __restrict y = r.out;
  const long half = r.half;
  for (long i = 0; i < half; ++i) {
    const float a = x[pairs_in ? 2 * i : i], b = x[pairs_in ? 2 * i + 1 : half + i];
    y[pairs_out ? 2 * i : i] = a * cos[i] - b * sin[i];
    y[pairs_out ? 2 * i + 1 : half + i] = b * cos[i] + a * sin[i];
  }
}

static void rotate_row(const Rotation& r, const TensorArg& x, long t, long h, char* dst,
                       int dst_dtype) {
  widen(row_ptr(x, t, h), x.dtype, x.dim[2], r.in);
  switch (r.style) {
    case ROPE_HALF:
      rotate<ROPE_HALF>(r);
      break;
    case ROPE_INTERLEAVED:
      rotate<ROPE_INTERLEAVED>(r);
      break;
    default:
      rotate<ROPE_TO_HALF>(r);
  }
  for (long k = 2 * r.half; k < x.dim[2]; ++k) r.out[k] = r.in[k];
  narrow(r.out, x.dim[2], dst, dst_dtype);
}

static void rotate_heads(const Rotation& r, const TensorArg& x, const TensorArg& y, long t) {
  for (long h = 0; h < x.dim[1]; ++h) rotate_row(r, x, t, h, row_ptr(y, t, h), y.dtype);
}

static void rope(const Ctx& ctx, const Instr& in) {
  const TensorArg& inv = tensor(in, 2);
  const long width =
      lmax(has(in, 0) ? tensor(in, 0).dim[2] : 0, has(in, 1) ? tensor(in, 1).dim[2] : 0);
  const Rotation r = rotation(ctx, in, inv, width);
  const Range range = my_range(ctx, tensor(in, has(in, 0) ? 0 : 1).dim[0]);
  for (long t = range.begin; t < range.end; ++t) {
    set_angles(r, f32_row(inv, 0), ctx.batch->tok_pos[t], float(in.attr[A_SCALE]));
    if (has(in, 0)) rotate_heads(r, tensor(in, 0), tensor(in, 4), t);
    if (has(in, 1)) rotate_heads(r, tensor(in, 1), tensor(in, 5), t);
  }
}

// q_pe, k_pe, c, inv_freq, state, batch -> q_out
static void rope_append_latent(const Ctx& ctx, const Instr& in) {
  const TensorArg &q = tensor(in, 0), &k = tensor(in, 1), &c = tensor(in, 2), &inv = tensor(in, 3);
  const StateArg& s = in.op[4].s;
  const long layer = long(in.attr[A_LAYER]);
  const Rotation r = rotation(ctx, in, inv, lmax(q.dim[2], c.dim[2]));
  const Range range = my_range(ctx, q.dim[0]);
  for (long t = range.begin; t < range.end; ++t) {
    const long pos = ctx.batch->tok_pos[t];
    set_angles(r, f32_row(inv, 0), pos, float(in.attr[A_SCALE]));
    rotate_heads(r, q, tensor(in, 6), t);
    append_latent_token(ctx, c, s, layer, t);
    char* row = cache_row(s, 0, layer, *ctx.batch, ctx.batch->tok_seq[t], pos);
    rotate_row(r, k, t, 0, row + c.dim[2] * item_bytes(s.dtype), s.dtype);
  }
}

// q, k, v, inv_freq, state, batch -> q_out
static void rope_append(const Ctx& ctx, const Instr& in) {
  const TensorArg &q = tensor(in, 0), &k = tensor(in, 1), &v = tensor(in, 2), &inv = tensor(in, 3);
  const StateArg& s = in.op[4].s;
  const long layer = long(in.attr[A_LAYER]);
  const Rotation r = rotation(ctx, in, inv, lmax(q.dim[2], v.dim[2]));
  const Range range = my_range(ctx, q.dim[0]);
  for (long t = range.begin; t < range.end; ++t) {
    const long pos = ctx.batch->tok_pos[t];
    set_angles(r, f32_row(inv, 0), pos, float(in.attr[A_SCALE]));
    rotate_heads(r, q, tensor(in, 6), t);
    char* row = cache_row(s, 0, layer, *ctx.batch, ctx.batch->tok_seq[t], pos);
    for (long h = 0; h < k.dim[1]; ++h)
      rotate_row(r, k, t, h, row + h * k.dim[2] * item_bytes(s.dtype), s.dtype);
    append_heads(ctx, v, s, 1, layer, t);
  }
}

}  // namespace
}  // namespace KTG_ISA
}  // namespace ktg
