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
};
KTG_IN IntRow row_of(const IntRows& x, long i) {
  return int_row(x.base + x.stride * (x.of ? x.of[i] : i), x.kpad);
}

// One block of columns of up to kUnitTiles tiles as signed bytes.
struct IntPanel {
  const char* data;
  long tile;             // bytes between tiles
  long k0, k1;           // columns
  const float* scale;    // block scales [tile][16], or null
  const float* x_scale;  // of every row, this block
};

template <bool SCALED, bool FIRST>
KTG_IN void add_block(float* c, I total, F scale, float x_scale) {
  F v = to_float(total);
  if (SCALED) v = mul(v, scale);
  store(c, FIRST ? mul(v, set1(x_scale)) : fma(v, set1(x_scale), load(c)));
}

}  // namespace
}  // namespace KTG_ISA
}  // namespace ktg
