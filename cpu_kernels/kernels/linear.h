// cpu.linear and cpu.batched_linear: y[t, h] = W[h] x[t, h] (+ bias); linear has one head.
// A unit is 4 tiles of one head and up to kTokenBlock tokens; units are stolen, each is computed
// whole by one thread.
#pragma once

namespace ktg {
namespace KTG_ISA {
namespace {

struct LinearView {
  const TensorArg& x;
  const WeightArg& w;
  const TensorArg* bias;
  const TensorArg& y;
};

constexpr long kFewRows = 4;  // so few that every thread widens x for itself

KTG_IN size_t linear_c_bytes() { return kTokenBlock * kUnitTiles * 64; }

static size_t linear_shared(const Instr& in, const Sizes&) {
  const TensorArg& x = tensor(in, 0);
  return needs_staging(x, in.op[1].w) ? align64(size_t(x.dim[0]) * x.dim[1] * in.op[1].w.kpad * 4)
                                      : 0;
}
static size_t linear_local(const Instr& in, const Sizes&) {
  return kPanelBytes + linear_c_bytes() + align64(size_t(kFewRows) * in.op[1].w.kpad * 4);
}

static void linear_store(const LinearView& v, long h, long t0, long rows, long tile, long tiles,
                         float* c) {
  const long n0 = tile * 16, n = lmin(tiles * 16, v.w.rows - n0);
  for (long m = 0; m < rows; ++m) {
    float* row = c + m * kUnitTiles * 16;
    if (v.bias) {
      const float* b = f32_row(*v.bias, 0) + n0;
      for (long i = 0; i < n; ++i) row[i] += b[i];
    }
    char* out = row_ptr(v.y, t0 + m, h) + n0 * item_bytes(v.y.dtype);
    narrow(row, n, out, v.y.dtype);
  }
}

static void run_linear_units(const Ctx& ctx, const LinearView& v) {
  float* panel = reinterpret_cast<float*>(ctx.local);
  float* c = reinterpret_cast<float*>(ctx.local + kPanelBytes);
  float* own = reinterpret_cast<float*>(ctx.local + kPanelBytes + linear_c_bytes());
  float* staged = reinterpret_cast<float*>(ctx.shared);
  const long tokens = v.x.dim[0], heads = v.x.dim[1], kpad = v.w.kpad;
  const bool stage = needs_staging(v.x, v.w), few = tokens <= kFewRows;
  if (stage && !few) {  // once, together
    const Range r = my_range(ctx, tokens * heads);
    for (long i = r.begin; i < r.end; ++i)
      stage_row(v.x, i / heads, i % heads, kpad, staged + i * kpad);
    barrier(ctx);
  }
  const long groups = ceil_div(v.w.tiles, kUnitTiles), blocks = ceil_div(tokens, kTokenBlock);
  long own_head = -1;
  for (long u; (u = next_unit(ctx, 0)) < heads * groups * blocks;) {
    const long tile = u % groups * kUnitTiles, h = u / groups % heads, b = u / groups / heads;
    const long t0 = tokens * b / blocks, rows = tokens * (b + 1) / blocks - t0;
    const float* x[kTokenBlock];
    for (long m = 0; m < rows; ++m) {
      if (!stage)
        x[m] = reinterpret_cast<const float*>(row_ptr(v.x, t0 + m, h));
      else if (!few)
        x[m] = staged + ((t0 + m) * heads + h) * kpad;
      else {  // a copy of one's own costs less than a barrier
        x[m] = own + m * kpad;
        if (own_head != h) stage_row(v.x, m, h, kpad, own + m * kpad);
      }
    }
    own_head = h;
    const Tiles t = tiles_of(v.w, h, tile, lmin(kUnitTiles, v.w.tiles - tile));
    tiles_times_rows(t, x, rows, c, kUnitTiles * 16, panel);
    linear_store(v, h, t0, rows, tile, t.count, c);
  }
}

static void linear(const Ctx& ctx, const Instr& in) {
  run_linear_units(
      ctx, {tensor(in, 0), in.op[1].w, has(in, 2) ? &tensor(in, 2) : nullptr, tensor(in, 3)});
}
static void batched_linear(const Ctx& ctx, const Instr& in) {
  run_linear_units(ctx, {tensor(in, 0), in.op[1].w, nullptr, tensor(in, 2)});
}

}  // namespace
}  // namespace KTG_ISA
}  // namespace ktg
