// An integer panel on tile registers: 32 rows x 2 weight tiles at a time, so that each loaded tile
// is used twice. The sums of a block leave through memory and are added as add_block says.
#pragma once

namespace ktg {
namespace KTG_ISA {
namespace {

constexpr size_t kTileSpill = 2 * 32 * 32 * 4;

#ifdef KTG_TILES
// Sums that lie in memory and are not yet added to C.
struct Spilled {
  const int* sums;  // [rows][32], or null
  long rows, tiles;
  const float *scale, *offset;  // [tile][16]
  const float *x_scale, *x_sum;
  float* c;
  int shift;  // of split formats: [rows][16 high, 16 low]
  const I* minima;
  const int* x_pairs;
};

// Rows [m0, m1) of it. By value: what the tile instructions clobber need not be read again.
template <int SCALING, bool FIRST, int TILES>
KTG_IN void add_spilled_rows(const Spilled s, long m0, long m1, long c_row) {
  F scale[TILES], offset[TILES];
  for (int n = 0; n < TILES; ++n) {
    scale[n] = SCALING != ROW_SCALED ? load(s.scale + n * 16) : zero();
    offset[n] = has_offset(SCALING) ? load(s.offset + n * 16) : zero();
  }
  I minima[kMinimumPairs];
  for (int i = 0; SCALING == SPLIT_MINIMA && i < kMinimumPairs; ++i) minima[i] = s.minima[i];
  const int* sums = s.sums + m0 * 32;
  float* c = s.c + m0 * c_row;
#pragma GCC unroll 4
  for (long m = m0; m < m1; ++m, sums += 32, c += c_row)
    for (int n = 0; n < TILES; ++n) {
      I total = load_ints(sums + n * 16);
      if (is_split(SCALING)) total = iadd(shift_left(total, s.shift), load_ints(sums + 16));
      const F less = offset_of<SCALING>(offset[n], minima, s.x_pairs + m * kMinimumPairs);
      add_block<SCALING, FIRST>(c + n * 16, total, scale[n], less, s.x_scale[m], s.x_sum[m]);
    }
}
template <int SCALING, bool FIRST>
KTG_IN void add_spilled(const Spilled s, long m0, long m1, long c_row) {
  if (s.tiles == 2)
    add_spilled_rows<SCALING, FIRST, 2>(s, m0, m1, c_row);
  else if (s.tiles == 1)
    add_spilled_rows<SCALING, FIRST, 1>(s, m0, m1, c_row);
}

// The dot products of up to 32 rows and 2 weight tiles, into `spill`. Between the steps the sums of
// the call before are added to C: the tile unit and the vector units work side by side.
template <int MA, int NB, int SCALING, bool FIRST>
static void int_tile_dots(const char* a, long a_stride, const char* b, long b_tile, long k,
                          int* spill, const Spilled before, long c_row) {
  const long steps = ceil_div(k, 64), share = ceil_div(before.rows, steps);
  tile_zero<0>();
  if constexpr (NB == 2) tile_zero<1>();
  if constexpr (MA == 2) tile_zero<2>();
  if constexpr (MA == 2 && NB == 2) tile_zero<3>();
  for (long i = 0; i < steps; ++i) {
    tile_load<6>(b + i * 1024, 64);
    tile_load<4>(a + i * 64, a_stride);
    tile_dot_int8<0, 4, 6>();
    if constexpr (NB == 2) {
      tile_load<7>(b + b_tile + i * 1024, 64);
      tile_dot_int8<1, 4, 7>();
    }
    if constexpr (MA == 2) {
      tile_load<5>(a + 16 * a_stride + i * 64, a_stride);
      tile_dot_int8<2, 5, 6>();
      if constexpr (NB == 2) tile_dot_int8<3, 5, 7>();
    }
    add_spilled<SCALING, FIRST>(before, lmin(i * share, before.rows),
                                lmin((i + 1) * share, before.rows), c_row);
  }
  tile_store<0>(spill, 128);
  if constexpr (NB == 2) tile_store<1>(spill + 16, 128);
  if constexpr (MA == 2) tile_store<2>(spill + 16 * 32, 128);
  if constexpr (MA == 2 && NB == 2) tile_store<3>(spill + 16 * 32 + 16, 128);
}

template <int NB, int SCALING, bool FIRST>
static void int_tile_block(const IntPanel& p, const char* a, long a_stride, long rows, long n0,
                           int* spill, const Spilled& before, long c_row) {
  const char* b = p.data + n0 * p.tile;
  const long k = p.k1 - p.k0, b_tile = is_split(SCALING) ? p.low : p.tile;
  if (rows > 16)
    int_tile_dots<2, NB, SCALING, FIRST>(a, a_stride, b, b_tile, k, spill, before, c_row);
  else
    int_tile_dots<1, NB, SCALING, FIRST>(a, a_stride, b, b_tile, k, spill, before, c_row);
}

template <int SCALING, bool FIRST>
static void int_panel_tiles_of(const IntPanel& p, const IntRows& x, long r0, long rows, long tiles,
                               float* c, long c_row, char* scratch) {
  int* spill[2] = {reinterpret_cast<int*>(scratch), reinterpret_cast<int*>(scratch) + 32 * 32};
  Spilled before{};
  int turn = 0;
  constexpr long step = is_split(SCALING) ? 1 : 2;  // a tile's high and low part are a pair
  for (long m = 0; m < rows; m += 32) {
    const char* a = x.base + x.stride * (r0 + m) + p.k0;
    const long here = lmin(32, rows - m);
    for (long n = 0; n < tiles; n += step, turn ^= 1) {
      const bool pair = is_split(SCALING) || tiles - n > 1;
      pair ? int_tile_block<2, SCALING, FIRST>(p, a, x.stride, here, n, spill[turn], before, c_row)
           : int_tile_block<1, SCALING, FIRST>(p, a, x.stride, here, n, spill[turn], before, c_row);
      before = {spill[turn],
                here,
                pair ? step : 1,
                p.scale + n * 16,
                p.offset + n * 16,
                p.x_scale + m,
                p.x_sum + m,
                c + m * c_row + n * 16,
                p.shift,
                p.minima + n * kMinimumPairs,
                p.x_pairs + m * kMinimumPairs};
    }
  }
  add_spilled<SCALING, FIRST>(before, 0, before.rows, c_row);
}

template <int SCALING>
static void int_panel_amx(const IntPanel& p, const IntRows& x, long r0, long rows, long tiles,
                          float* c, long c_row, char* scratch) {
  p.k0 == 0 ? int_panel_tiles_of<SCALING, true>(p, x, r0, rows, tiles, c, c_row, scratch)
            : int_panel_tiles_of<SCALING, false>(p, x, r0, rows, tiles, c, c_row, scratch);
}
#else
template <int SCALING>
static void int_panel_amx(const IntPanel&, const IntRows&, long, long, long, float*, long, char*) {}
#endif

}  // namespace
}  // namespace KTG_ISA
}  // namespace ktg
