// cpu.linear and cpu.batched_linear: y[t, h] = W[h] x[t, h] (+ bias); linear has one head.
// Rows are brought into the weight's form once (a few tokens: by every thread for itself, which
// costs less than a barrier). A unit is 4 tiles of one head and up to kRowBlock tokens; units are
// stolen, each is computed whole by one thread.
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

constexpr long kOwnRows = 4;  // so few that every thread stages x for itself

KTG_IN bool rows_in_place(const TensorArg& x, const WeightArg& w) {
  return rows_kind(w, x.dim[0]) == ACTS_F32 && !needs_staging(x, w);
}

static size_t linear_shared(const Instr& in, const Sizes&) {
  const TensorArg& x = tensor(in, 0);
  const WeightArg& w = in.op[1].w;
  if (rows_in_place(x, w) || x.dim[0] <= kOwnRows) return 0;
  return x.dim[1] * rows_bytes(w, rows_kind(w, x.dim[0]), x.dim[0]);
}
static size_t linear_local(const Instr& in, const Sizes&) {
  const WeightArg& w = in.op[1].w;
  const size_t own = rows_bytes(w, ACTS_F32, kOwnRows) + rows_bytes(w, ACTS_INT8, kOwnRows);
  return align64(kTimesBytes) + kCBytes + own;  // one of them
}

static void linear_store(const LinearView& v, long h, long t0, long rows, long tile, long tiles,
                         float* c) {
  const long n0 = tile * 16, n = lmin(tiles * 16, v.w.rows - n0);
  for (long m = 0; m < rows; ++m) {
    float* row = c + m * kCRow;
    if (v.bias) {
      const float* b = f32_row(*v.bias, 0) + n0;
      for (long i = 0; i < n; ++i) row[i] += b[i];
    }
    char* out = row_ptr(v.y, t0 + m, h) + n0 * item_bytes(v.y.dtype);
    narrow(row, n, out, v.y.dtype);
  }
}

static void stage_rows(const LinearView& v, const Rows& r, long h, long from, long to) {
  const long blocks = row_blocks(r);
  for (long i = from; i < to; ++i) stage_block(v.x, i / blocks, h, r, i / blocks, i % blocks);
}

// Rows of one head where they lie: f32 already, in an even stride.
static Rows rows_of_tensor(const LinearView& v, long h) {
  return {ACTS_F32, row_ptr(v.x, 0, h), v.w.kpad, v.x.stride[0] * 4, v.x.dim[0], nullptr, nullptr};
}

static void run_linear_units(const Ctx& ctx, const LinearView& v) {
  char* scratch = ctx.local;
  float* c = reinterpret_cast<float*>(ctx.local + align64(kTimesBytes));
  const long tokens = v.x.dim[0], heads = v.x.dim[1];
  const bool direct = rows_in_place(v.x, v.w), own = tokens <= kOwnRows;
  char* base = own ? ctx.local + align64(kTimesBytes) + kCBytes : ctx.shared;
  const int kind = rows_kind(v.w, tokens);
  const size_t head_bytes = own ? 0 : rows_bytes(v.w, kind, tokens);
  Rows rows = rows_for(v.w, kind, base, tokens, nullptr);
  const long per_head = tokens * row_blocks(rows);
  if (!direct && !own) {  // once, together
    const Range r = my_range(ctx, per_head * heads);
    for (long i = r.begin; i < r.end; ++i) {
      rows = rows_for(v.w, kind, base + i / per_head * head_bytes, tokens, nullptr);
      stage_rows(v, rows, i / per_head, i % per_head, i % per_head + 1);
    }
    barrier(ctx);
  }
  const long groups = ceil_div(v.w.tiles, kUnitTiles), blocks = ceil_div(tokens, kRowBlock);
  long staged = -1;
  NearUnits units{ctx, 0, groups, heads * blocks};
  for (long group, i; units.next(&group, &i);) {
    const long tile = group * kUnitTiles, h = i % heads, b = i / heads;
    const long t0 = tokens * b / blocks, here = tokens * (b + 1) / blocks - t0;
    if (direct) rows = rows_of_tensor(v, h);
    if (!direct && !own) rows = rows_for(v.w, kind, base + h * head_bytes, tokens, nullptr);
    if (!direct && own && staged != h) stage_rows(v, rows, h, 0, per_head);
    staged = h;
    const Tiles t = tiles_of(v.w, h, tile, lmin(kUnitTiles, v.w.tiles - tile));
    rows_times(t, rows, t0, here, c, kCRow, scratch);
    linear_store(v, h, t0, here, tile, t.count, c);
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
