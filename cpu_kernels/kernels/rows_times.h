// Rows as a weight takes them (Activations in formats.h), in records of one buffer, and a weight's
// tiles times such rows. One entry point for linears and experts.
#pragma once

namespace ktg {
namespace KTG_ISA {
namespace {

constexpr long kRowSlack = 32;  // rows that tile kernels may read and write beyond
constexpr long kFewTokens = 8;  // up to here bf16 and fp8 weights meet f32 rows; experts copy none
constexpr long kCRow = kUnitTiles * 16;
constexpr size_t kTimesBytes = kPanelBytes > sizeof(IntScratch) ? kPanelBytes : sizeof(IntScratch);
constexpr size_t kCBytes = (kRowBlock + kRowSlack) * kCRow * 4;

KTG_IN int rows_kind(const WeightArg& w, long tokens) {
  if (w.activations == ACTS_INT8) return ACTS_INT8;
  const bool many = tokens > kFewTokens && tokens >= w.many_tokens;
  return kHasBf16Products && w.activations == ACTS_BF16 && many ? ACTS_BF16 : ACTS_F32;
}

// `count` records, and for int8 their scales once more by block: what tile kernels read in a row.
struct Rows {
  int kind;
  char* base;
  long kpad, stride, count;
  const int* of;  // record of row i, or null: i
  float* scales;  // int8: [block][count]
};
KTG_IN long record_bytes(int kind, long kpad) {
  return kind == ACTS_INT8 ? int_row_bytes(kpad) : odd_lines(kpad * (kind == ACTS_BF16 ? 2 : 4));
}
// Memory for `count` records, slack included.
KTG_IN size_t rows_bytes(const WeightArg& w, int kind, long count) {
  const size_t records = size_t(count + kRowSlack) * record_bytes(kind, w.kpad);
  return records + (kind == ACTS_INT8 ? align64(size_t(int_blocks(w.kpad) * count) * 4) : 0);
}
KTG_IN Rows rows_for(const WeightArg& w, int kind, char* base, long count, const int* of) {
  const long stride = record_bytes(kind, w.kpad);
  return {kind,
          base,
          w.kpad,
          stride,
          count,
          of,
          reinterpret_cast<float*>(base + (count + kRowSlack) * stride)};
}

// Columns of one block (kActBlock) of a record from f32; `n` of them are there.
static void put_block(const Rows& r, long record, long block, const float* x, long n) {
  char* at = r.base + record * r.stride;
  if (r.kind == ACTS_INT8) {
    const IntRow row = int_row(at, r.kpad);
    quantize_block(x, n, block, r.kpad, row);
    r.scales[block * r.count + record] = row.scale[block];
    return;
  }
  const long first = block * kActBlock, width = lmin(kActBlock, r.kpad - first);
  if (r.kind == ACTS_BF16) {
    u16* to = reinterpret_cast<u16*>(at) + first;
    narrow(x, n, to, DT_BF16);
    for (long k = n; k < width; ++k) to[k] = 0;
    return;
  }
  float* to = reinterpret_cast<float*>(at) + first;
  __builtin_memmove(to, x, size_t(n) * 4);
  for (long k = n; k < width; ++k) to[k] = 0.0f;
}
KTG_IN long row_blocks(const Rows& r) { return ceil_div(r.kpad, kActBlock); }

// Block `block` of row i, head h of a tensor into a record.
static void stage_block(const TensorArg& x, long i, long h, const Rows& r, long record,
                        long block) {
  float wide[kActBlock];
  const long first = block * kActBlock, n = lmax(0, lmin(kActBlock, x.dim[2] - first));
  widen(row_ptr(x, i, h) + first * item_bytes(x.dtype), x.dtype, n, wide);
  put_block(r, record, block, wide, n);
}

static void f32_rows_times(const Tiles& t, const Rows& x, long r0, long rows, float* c, long c_row,
                           char* scratch) {
  const float* at[kTokenBlock];
  for (long m = 0; m < rows; m += kTokenBlock) {
    const long here = lmin(kTokenBlock, rows - m);
    for (long i = 0; i < here; ++i) {
      const long row = r0 + m + i;
      at[i] = reinterpret_cast<const float*>(x.base + x.stride * (x.of ? x.of[row] : row));
    }
    tiles_times_rows(t, at, here, c + m * c_row, c_row, reinterpret_cast<float*>(scratch));
  }
}

// c[m][16 n + lane] for rows [r0, r0 + rows), at most kRowBlock; C has kRowSlack rows to spare.
static void rows_times(const Tiles& t, const Rows& x, long r0, long rows, float* c, long c_row,
                       char* scratch) {
  if (x.kind == ACTS_INT8)
    return int_tiles_times_rows(t, {x.base, x.stride, x.kpad, x.of, x.scales, x.count}, r0, rows, c,
                                c_row, scratch);
  if (x.kind == ACTS_BF16 && t.w->format == FMT_FP8)
    return fp8_tiles_times_rows(t, x.base + r0 * x.stride, x.stride, rows, c, c_row, scratch);
  if (x.kind == ACTS_BF16)
    return bf16_tiles_times_rows(t, x.base + r0 * x.stride, x.stride, rows, c, c_row);
  f32_rows_times(t, x, r0, rows, c, c_row, scratch);
}

}  // namespace
}  // namespace KTG_ISA
}  // namespace ktg
