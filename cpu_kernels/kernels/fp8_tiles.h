// fp8 weights times bf16 rows on tile registers or with vdpbf16ps. e4m3 is exact in bf16: a group
// of columns becomes a bf16 panel, whose sums join C with the group's scale, in group order.
#pragma once

namespace ktg {
namespace KTG_ISA {
namespace {

#if defined(KTG_TILES) || defined(KTG_BF16_DOTS)
struct Fp8Scratch {
  char panel[kUnitTiles * kPanelK * 32];
  float sums[32 * 32];
};
static_assert(sizeof(Fp8Scratch) <= kPanelBytes);

// Columns K and K + 1 of a block, side by side in bf16.
template <int K>
KTG_IN I fp8_pair(I w) {
  return bits_or(shift_right<16>(bits_of(fp8_column<K>(w))), bits_of(fp8_column<K + 1>(w)));
}

static void fp8_unpack(const Tiles& t, long n, long k0, long k1, char* panel) {
  const char* data = tile_data(t, n);
  for (long k = k0; k < k1; k += 4, panel += 128) {
    const I w = load_block(data + k * 16);
    _mm_prefetch(ahead_of(t, t.count, data, k * 16), _MM_HINT_T0);
    store_block(panel, fp8_pair<0>(w));
    store_block(panel + 64, fp8_pair<2>(w));
  }
}

template <int MA, int NB>
static void fp8_group(const Tiles& t, const char* a, long stride, long rows, long n0, long k0,
                      long k, Fp8Scratch& s, float* c, long c_row) {
  bf16_tile_block<MA, NB>(a, stride, s.panel + n0 * k * 32, k * 32, k, s.sums, 32, true);
  for (long n = 0; n < NB; ++n) {
    const F scale = Fp8Format::scale(t, n0 + n, k0 / t.w->group);
    for (long m = 0; m < rows; ++m) {
      float* out = c + m * c_row + (n0 + n) * 16;
      store(out, fma(scale, load(s.sums + m * 32 + n * 16), k0 ? load(out) : zero()));
    }
  }
}

template <int MA>
static void fp8_rows(const Tiles& t, const char* a, long stride, long rows, long k0, long k,
                     Fp8Scratch& s, float* c, long c_row) {
  long n = 0;
  for (; n + 2 <= t.count; n += 2) fp8_group<MA, 2>(t, a, stride, rows, n, k0, k, s, c, c_row);
  if (n < t.count) fp8_group<MA, 1>(t, a, stride, rows, n, k0, k, s, c, c_row);
}

// C = tiles * rows; x rows are kpad bf16 values, `stride` bytes apart. Rows of x up to the next
// multiple of 16 are read.
static void fp8_tiles_times_rows(const Tiles& t, const char* x, long stride, long rows, float* c,
                                 long c_row, char* scratch) {
  const TileUse use(64);
  Fp8Scratch& s = *reinterpret_cast<Fp8Scratch*>(scratch);
  for (long k0 = 0; k0 < t.w->kpad; k0 += t.w->group) {
    const long k = lmin(t.w->group, t.w->kpad - k0);
    for (long n = 0; n < t.count; ++n) fp8_unpack(t, n, k0, k0 + k, s.panel + n * k * 32);
    for (long m = 0; m < rows; m += 32) {
      const char* a = x + m * stride + k0 * 2;
      const long here = lmin(32, rows - m);
      here > 16 ? fp8_rows<2>(t, a, stride, here, k0, k, s, c + m * c_row, c_row)
                : fp8_rows<1>(t, a, stride, here, k0, k, s, c + m * c_row, c_row);
    }
  }
}
#else
static void fp8_tiles_times_rows(const Tiles&, const char*, long, long, float*, long, char*) {}
#endif

}  // namespace
}  // namespace KTG_ISA
}  // namespace ktg
