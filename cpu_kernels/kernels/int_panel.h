// What the vector and the tile kernel of integer weights share: rows, a panel, and how a block's
// sum joins C.
#pragma once

namespace ktg {
namespace KTG_ISA {
namespace {

constexpr long kRowBlock = 256;  // most rows of one call

// Rows in memory: row i starts at base + stride * (of ? of[i] : i).
struct IntRows {
  char* base;
  long stride, kpad;
  const int* of;
  const float* scales;  // [block][count]
  long count;
};
KTG_IN IntRow row_of(const IntRows& x, long i) {
  return int_row(x.base + x.stride * (x.of ? x.of[i] : i), x.kpad);
}

// One block of columns of up to kUnitTiles tiles as signed bytes.
struct IntPanel {
  const char* data;
  long tile;             // bytes between tiles
  long k0, k1;           // columns
  long r0;               // first row, of which x_scale[0] tells
  const float* scale;    // of this block: [tile][16]
  const float* offset;   // likewise
  const float* x_scale;  // of every row, this block
  const float* x_sum;    // x_scale times the sum of the row's bytes, for offsets
  // Of split formats: bytes from a tile's high part to its low one, and what a high integer weighs.
  long low;
  int shift;
  const I* minima;     // [tile][kMinimumPairs]
  const int* x_pairs;  // of every row: sum_pairs
};

// What a block adds to 16 outputs of one row.
template <int SCALING, bool FIRST>
KTG_IN void add_block(float* c, I total, F scale, F offset, float x_scale, float x_sum) {
  F v = to_float(total);
  if (SCALING != ROW_SCALED) v = mul(v, scale);
  if (SCALING == SPLIT_MINIMA) v = sub(v, offset);
  v = FIRST ? mul(v, set1(x_scale)) : fma(v, set1(x_scale), load(c));
  if (SCALING == BLOCK_OFFSET) v = fma(offset, set1(x_sum), v);
  store(c, v);
}

}  // namespace
}  // namespace KTG_ISA
}  // namespace ktg
