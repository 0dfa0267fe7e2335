// Integer weights times 8-bit rows: C[m][16 n + lane] for up to four tiles of one matrix.
// Few rows: dot products straight from the packed bytes, as they stream from memory. More rows: a
// block of columns becomes a panel of signed bytes in the first-level cache, over which the vector
// kernel below or the tile kernel (int_tiles.h) runs; a split format's panel has two parts. All add
//   C = integer sum of a block [* block scale] * scale of the row's block + C
// block by block, and multiply by the row scale at the end: equal bits on every path and ISA.
#pragma once

namespace ktg {
namespace KTG_ISA {
namespace {

constexpr size_t kIntPanelBytes = kUnitTiles * kActBlock * 16 * 2;  // split: two parts

template <class Fmt, int M, int N>
static void int_direct_block(const Tiles& t, long n0, const IntRows& rows, long r0, float* c,
                             long c_row) {
  constexpr int kind = Fmt::kScaling;
  IntRow x[M];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) x[m] = row_of(rows, r0 + m);
  const long span = Fmt::columns(*t.w), kpad = t.w->kpad;
  for (long k0 = 0; k0 < kpad; k0 += span) {
    const long k1 = lmin(k0 + span, kpad);
    I total[M][N];
    Fmt::template dot<M, N>(t, n0, x, k0, k1, total);
    int pairs[M][kMinimumPairs];
    if constexpr (kind == SPLIT_MINIMA)
      for (int m = 0; m < M; ++m) sum_pairs(x[m], k0, pairs[m]);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const F scale = Fmt::block_scale(t, n0 + n, k0), offset = Fmt::block_offset(t, n0 + n, k0);
      I minima[kMinimumPairs];
      if constexpr (kind == SPLIT_MINIMA) Fmt::minima(t, n0 + n, k0, minima);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        float* out = c + m * c_row + (n0 + n) * 16;
        const F less = offset_of<kind>(offset, minima, pairs[m]);
        const float x_scale = x[m].scale[k0 / kActBlock];
        const float x_sum = kind == BLOCK_OFFSET ? x_scale * float(group_sum(x[m], k0, k1)) : 0.0f;
        k0 == 0 ? add_block<kind, true>(out, total[m][n], scale, less, x_scale, x_sum)
                : add_block<kind, false>(out, total[m][n], scale, less, x_scale, x_sum);
      }
    }
  }
}

template <class Fmt, int M>
static void int_direct_tiles(const Tiles& t, const IntRows& x, long r0, float* c, long c_row) {
  constexpr int step = M > 4 ? int(lmin(2, kIntTiles)) : kIntTiles;  // sums must fit the registers
  long n = 0;
  for (; n + step <= t.count; n += step) int_direct_block<Fmt, M, step>(t, n, x, r0, c, c_row);
  if constexpr (step == 4) {
    if (t.count - n == 3) return int_direct_block<Fmt, M, 3>(t, n, x, r0, c, c_row);
    if (t.count - n == 2) return int_direct_block<Fmt, M, 2>(t, n, x, r0, c, c_row);
  }
  if (t.count - n == 1) int_direct_block<Fmt, M, 1>(t, n, x, r0, c, c_row);
}

template <class Fmt>
static void int_direct(const Tiles& t, const IntRows& x, long r0, long rows, float* c, long c_row) {
  if constexpr (kIntRows == 6) {
    if (rows == 5) return int_direct_tiles<Fmt, 5>(t, x, r0, c, c_row);
    if (rows == 6) return int_direct_tiles<Fmt, 6>(t, x, r0, c, c_row);
  }
  switch (rows) {
    case 1:
      return int_direct_tiles<Fmt, 1>(t, x, r0, c, c_row);
    case 2:
      return int_direct_tiles<Fmt, 2>(t, x, r0, c, c_row);
    case 3:
      return int_direct_tiles<Fmt, 3>(t, x, r0, c, c_row);
    case 4:
      return int_direct_tiles<Fmt, 4>(t, x, r0, c, c_row);
    default:  // the second half finds the weights in the cache
      int_direct<Fmt>(t, x, r0, rows / 2, c, c_row);
      return int_direct<Fmt>(t, x, r0 + rows / 2, rows - rows / 2, c + rows / 2 * c_row, c_row);
  }
}

template <int M, int N>
KTG_IN void int_panel_dots(const char* data, long tile, const int8_t* const (&x)[M], long k0,
                           long k1, I (&acc)[M][N]) {
  for (long k = k0; k < k1; k += 4, data += 64) {
    Signed w[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) w[n] = as_signed(load_block(data + n * tile));
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const I xv = four_bytes(x[m] + k);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) acc[m][n] = dot_signed(acc[m][n], w[n], xv);
    }
  }
}

// Every loop over sums is unrolled: one that is not would keep them all in memory.
template <int SCALING, int M, int N>
static void int_panel_block(const IntPanel& p, const IntRows& rows, long r0, long n0, float* c,
                            long c_row) {
  const int8_t* x[M];
  I acc[M][N], start[M];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    const IntRow row = row_of(rows, r0 + m);
    x[m] = row.q;
    start[m] = dot_start(span_sum(row, p.k0, lmin(p.k1, (p.k0 / kActBlock + 1) * kActBlock)));
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) acc[m][n] = start[m];
  }
  const char* data = p.data + n0 * p.tile;
  int_panel_dots<M, N>(data, p.tile, x, p.k0, p.k1, acc);
  if constexpr (is_split(SCALING)) {  // that was the high part
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) acc[m][n] = iadd(shift_left(acc[m][n], p.shift), start[m]);
    int_panel_dots<M, N>(data + p.low, p.tile, x, p.k0, p.k1, acc);
  }
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) {
    const bool scaled = SCALING != ROW_SCALED;
    const F scale = scaled ? load(p.scale + (n0 + n) * 16) : zero();
    const F offset = has_offset(SCALING) ? load(p.offset + (n0 + n) * 16) : zero();
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      float* out = c + m * c_row + (n0 + n) * 16;
      const long row = r0 + m - p.r0;
      const F less = offset_of<SCALING>(offset, p.minima + (n0 + n) * kMinimumPairs,
                                        p.x_pairs + row * kMinimumPairs);
      const float x_scale = p.x_scale[row], x_sum = p.x_sum[row];
      p.k0 == 0 ? add_block<SCALING, true>(out, acc[m][n], scale, less, x_scale, x_sum)
                : add_block<SCALING, false>(out, acc[m][n], scale, less, x_scale, x_sum);
    }
  }
}

template <int SCALING, int M>
static void int_panel_tiles(const IntPanel& p, const IntRows& x, long r0, long tiles, float* c,
                            long c_row) {
  long n = 0;
  for (; n + kIntTiles <= tiles; n += kIntTiles)
    int_panel_block<SCALING, M, kIntTiles>(p, x, r0, n, c, c_row);
  if constexpr (kIntTiles == 4) {
    if (tiles - n == 3) return int_panel_block<SCALING, M, 3>(p, x, r0, n, c, c_row);
    if (tiles - n == 2) return int_panel_block<SCALING, M, 2>(p, x, r0, n, c, c_row);
  }
  if (tiles - n == 1) int_panel_block<SCALING, M, 1>(p, x, r0, n, c, c_row);
}

// All rows over one panel, in blocks of nearly equal height.
template <int SCALING>
static void int_panel_vector(const IntPanel& p, const IntRows& x, long r0, long rows, long tiles,
                             float* c, long c_row) {
  const long blocks = ceil_div(rows, kIntRows);
  for (long b = 0; b < blocks; ++b) {
    const long m0 = rows * b / blocks, m = rows * (b + 1) / blocks - m0;
    float* out = c + m0 * c_row;
    if constexpr (kIntRows == 6) {
      if (m == 6) int_panel_tiles<SCALING, 6>(p, x, r0 + m0, tiles, out, c_row);
      if (m == 5) int_panel_tiles<SCALING, 5>(p, x, r0 + m0, tiles, out, c_row);
    }
    if (m == 4) int_panel_tiles<SCALING, 4>(p, x, r0 + m0, tiles, out, c_row);
    if (m == 3) int_panel_tiles<SCALING, 3>(p, x, r0 + m0, tiles, out, c_row);
    if (m == 2) int_panel_tiles<SCALING, 2>(p, x, r0 + m0, tiles, out, c_row);
    if (m == 1) int_panel_tiles<SCALING, 1>(p, x, r0 + m0, tiles, out, c_row);
  }
}

// Columns of a packed panel that follow, to the second-level cache, while others are worked on.
static void prefetch_block(const Tiles& t, long k, long columns) {
  // Behind the last block the stream goes on in the tiles that this place takes next.
  const long at = k * 16 + (k < t.w->kpad ? 0 : (t.count - 1) * t.w->tile_bytes);
  for (long n = 0; n < t.count; ++n)
    for (long i = 0; i < columns * 16; i += 64) _mm_prefetch(tile_data(t, n) + at + i, _MM_HINT_T1);
}

struct IntScratch {
  char panel[kIntPanelBytes];
  float scale[kUnitTiles * 16], offset[kUnitTiles * 16];
  float x_scale[kRowBlock], x_sum[kRowBlock];  // where rows are not in order, or offsets need sums
  I minima[kUnitTiles * kMinimumPairs];
  int x_pairs[kRowBlock * kMinimumPairs];
  char spill[kTileSpill];
};

template <class Fmt>
static IntPanel int_panel_of(const Tiles& t, long k0, long k1, IntScratch& s) {
  if (Fmt::kPacked) prefetch_block(t, k0 + kActBlock, k1 - k0);
  constexpr int kind = Fmt::kScaling;
  const long part = (k1 - k0) * 16, tile = is_split(kind) ? 2 * part : part;
  IntPanel p{s.panel,   tile,    k0,   k1, 0,        s.scale,  s.offset,
             s.x_scale, s.x_sum, part, 0,  s.minima, s.x_pairs};
  if constexpr (Fmt::kPacked) p.data = tile_data(t, 0) + k0 * 16, p.tile = t.w->tile_bytes;
  if constexpr (is_split(kind)) p.shift = Fmt::kShift;
  for (long n = 0; n < t.count; ++n) {
    if (!Fmt::kPacked) Fmt::unpack(t, n, k0, k1, s.panel + n * tile);
    if (kind != ROW_SCALED) store(s.scale + n * 16, Fmt::block_scale(t, n, k0));
    if (has_offset(kind)) store(s.offset + n * 16, Fmt::block_offset(t, n, k0));
    if constexpr (kind == SPLIT_MINIMA) Fmt::minima(t, n, k0, s.minima + n * kMinimumPairs);
  }
  return p;
}

static void gather_scales(const IntRows& x, long r0, long rows, long k0, long k1, float* scale,
                          float* sum) {
  for (long m = 0; m < rows; ++m) {
    const IntRow row = row_of(x, r0 + m);
    scale[m] = row.scale[k0 / kActBlock];
    sum[m] = scale[m] * float(group_sum(row, k0, k1));
  }
}

template <class Fmt>
static void int_paneled(const Tiles& t, const IntRows& x, long r0, long rows, float* c, long c_row,
                        char* scratch) {
  IntScratch& s = *reinterpret_cast<IntScratch*>(scratch);
  const TileUse use(Fmt::columns(*t.w));
  const long span = Fmt::columns(*t.w), kpad = t.w->kpad;
  for (long k0 = 0; k0 < kpad; k0 += span) {
    const long k1 = lmin(k0 + span, kpad);
    IntPanel p = int_panel_of<Fmt>(t, k0, k1, s);
    p.r0 = r0;
    if (!x.of && Fmt::kScaling != BLOCK_OFFSET)
      p.x_scale = x.scales + k0 / kActBlock * x.count + r0;
    else
      gather_scales(x, r0, rows, k0, k1, s.x_scale, s.x_sum);
    for (long m = 0; Fmt::kScaling == SPLIT_MINIMA && m < rows; ++m)
      sum_pairs(row_of(x, r0 + m), k0, s.x_pairs + m * kMinimumPairs);
    if (kHasTiles && !x.of)
      int_panel_amx<Fmt::kScaling>(p, x, r0, rows, t.count, c, c_row, s.spill);
    else
      int_panel_vector<Fmt::kScaling>(p, x, r0, rows, t.count, c, c_row);
  }
}

template <class Fmt>
static void int_times(const Tiles& t, const IntRows& x, long r0, long rows, float* c, long c_row,
                      char* scratch) {
  if (x.of || rows < t.w->many_rows)
    int_direct<Fmt>(t, x, r0, rows, c, c_row);
  else
    int_paneled<Fmt>(t, x, r0, rows, c, c_row, scratch);
  if (!Fmt::kRowScale) return;
  for (long n = 0; n < t.count; ++n) {
    const F s = Fmt::row_scale(t, n);
    for (long m = 0; m < rows; ++m)
      store(c + m * c_row + n * 16, mul(s, load(c + m * c_row + n * 16)));
  }
}

// C = tiles * rows for rows [r0, r0 + rows). Rows after the last of 32 may be read: keep them
// readable.
static void int_tiles_times_rows(const Tiles& t, const IntRows& x, long r0, long rows, float* c,
                                 long c_row, char* scratch) {
  switch (t.w->format) {
    case FMT_INT8:
      return int_times<Int8>(t, x, r0, rows, c, c_row, scratch);
    case FMT_INT4:
      return int_times<Int4>(t, x, r0, rows, c, c_row, scratch);
    case FMT_INT8G:
      return int_times<Int8Group>(t, x, r0, rows, c, c_row, scratch);
    case FMT_INT4Z:
      return int_times<Int4z>(t, x, r0, rows, c, c_row, scratch);
    case FMT_MXFP4:
      return int_times<Mxfp4>(t, x, r0, rows, c, c_row, scratch);
    case FMT_INT4P:
      return int_times<Int4p>(t, x, r0, rows, c, c_row, scratch);
    case FMT_Q4_0:
      return int_times<Q4_0>(t, x, r0, rows, c, c_row, scratch);
    case FMT_Q8_0:
      return int_times<Q8_0>(t, x, r0, rows, c, c_row, scratch);
    case FMT_Q4_K:
      return int_times<KQuant<Q4_K>>(t, x, r0, rows, c, c_row, scratch);
    case FMT_Q5_K:
      return int_times<KQuant<Q5_K>>(t, x, r0, rows, c, c_row, scratch);
    case FMT_Q6_K:
      return int_times<KQuant<Q6_K>>(t, x, r0, rows, c, c_row, scratch);
    default:
      return int_times<KQuant<Iq4_Xs>>(t, x, r0, rows, c, c_row, scratch);
  }
}

}  // namespace
}  // namespace KTG_ISA
}  // namespace ktg
