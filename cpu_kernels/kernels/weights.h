// Packed weights times rows: C[m][16 n + lane] for up to four tiles of one matrix.
// Few rows: weights are decoded in registers as they stream from memory. More rows: a K block is
// decoded once into an f32 panel in the cache, and gemm.h runs over it. Both follow the chains
// below, so their bits are equal:
//   f32, bf16: one chain over all k.   int8: that, times the row's scale.
//   formats with groups: a chain per group from zero; total = scale * chain + total, in group
//   order.
#pragma once

namespace ktg {
namespace KTG_ISA {
namespace {

constexpr long kUnitTiles = 4;  // tiles a work unit computes together
constexpr long kPanelK =
    128;  // most columns of a panel: 4 tiles x 128 x 64 bytes = 32 KiB; a multiple of every group
constexpr long kDirectRows =
    12;  // up to here weights are decoded in registers, for up to 6 rows at a time
constexpr long kTokenBlock = 96;  // rows per work unit
constexpr long kPrefetch = 1536;  // bytes ahead in each tile's stream
constexpr size_t kPanelBytes = kUnitTiles * kPanelK * 64 + kUnitTiles * 64;

template <class Fmt, int M, int N, int K, class Z>
KTG_IN void fma_column(const I (&word)[N], const Z (&zeros)[N], const float* const (&xp)[M], long k,
                       F (&acc)[M][N]) {
  if constexpr (K < Fmt::kStep) {
    F wv[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) wv[n] = Fmt::template column<K>(word[n], zeros[n]);
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m) {
      const F xv = set1(xp[m][k + K]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) acc[m][n] = fma(wv[n], xv, acc[m][n]);
    }
    fma_column<Fmt, M, N, K + 1>(word, zeros, xp, k, acc);
  }
}

template <class Fmt, int M, int N, class Z>
KTG_IN void fma_blocks(const char* const (&data)[N], const Z (&zeros)[N],
                       const float* const (&xp)[M], long b0, long b1, long ahead, F (&acc)[M][N]) {
  for (long b = b0; b < b1; ++b) {
    I word[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      word[n] = load_block(data[n] + b * kBlockBytes);
      _mm_prefetch(data[n] + b * kBlockBytes + ahead, _MM_HINT_T0);
    }
    fma_column<Fmt, M, N, 0>(word, zeros, xp, b * Fmt::kStep, acc);
  }
}

template <class Fmt, int M, int N>
static void direct_block(const Tiles& t, long n0, const float* const* x, float* c, long c_row) {
  const char* data[N];
  const float* xp[M];
  F acc[M][N];
  for (int n = 0; n < N; ++n) data[n] = tile_data(t, n0 + n);
  for (int m = 0; m < M; ++m) {
    xp[m] = x[m];
    for (int n = 0; n < N; ++n) acc[m][n] = zero();
  }
  const long blocks = t.w->kpad / Fmt::kStep, tile_bytes = t.w->tile_bytes;
  // a group; else only for the prefetch
  const long run = Fmt::kGrouped ? t.w->group / Fmt::kStep : 16;
  for (long b = 0, group = 0; b < blocks; b += run, ++group) {
    // Near the end of a tile its stream goes on in the tile that this place reads next.
    const bool inside = b * kBlockBytes + kPrefetch < tile_bytes;
    const long ahead = inside ? kPrefetch : kPrefetch + (N - 1) * tile_bytes;
    decltype(Fmt::zeros(t, 0, 0)) zeros[N];
    for (int n = 0; n < N; ++n) zeros[n] = Fmt::zeros(t, n0 + n, group);
    fma_blocks<Fmt, M, N>(data, zeros, xp, b, lmin(b + run, blocks), ahead, acc);
    if constexpr (Fmt::kGrouped) {
      for (int n = 0; n < N; ++n) {
        const F scale = Fmt::scale(t, n0 + n, group);
        for (int m = 0; m < M; ++m) {
          float* out = c + m * c_row + (n0 + n) * 16;
          store(out, fma(scale, acc[m][n], b == 0 ? zero() : load(out)));
          acc[m][n] = zero();
        }
      }
    }
  }
  if constexpr (Fmt::kGrouped) return;
  for (int n = 0; n < N; ++n)
    for (int m = 0; m < M; ++m)
      store(c + m * c_row + (n0 + n) * 16,
            Fmt::kRowScale ? mul(int8_scale(t, n0 + n), acc[m][n]) : acc[m][n]);
}

template <class Fmt, int M>
static void direct_tiles_of(const Tiles& t, const float* const* x, float* c, long c_row) {
  constexpr int step = direct_tiles(M);
  long n = 0;
  for (; n + step <= t.count; n += step) direct_block<Fmt, M, step>(t, n, x, c, c_row);
  if constexpr (step == 4) {
    if (t.count - n == 3) return direct_block<Fmt, M, 3>(t, n, x, c, c_row);
    if (t.count - n == 2) return direct_block<Fmt, M, 2>(t, n, x, c, c_row);
  }
  if (t.count - n == 1) direct_block<Fmt, M, 1>(t, n, x, c, c_row);
}

template <class Fmt>
static void direct(const Tiles& t, const float* const* x, long rows, float* c, long c_row) {
  switch (rows) {
    case 1:
      return direct_tiles_of<Fmt, 1>(t, x, c, c_row);
    case 2:
      return direct_tiles_of<Fmt, 2>(t, x, c, c_row);
    case 3:
      return direct_tiles_of<Fmt, 3>(t, x, c, c_row);
    case 4:
      return direct_tiles_of<Fmt, 4>(t, x, c, c_row);
    case 5:
      return direct_tiles_of<Fmt, 5>(t, x, c, c_row);
    case 6:
      return direct_tiles_of<Fmt, 6>(t, x, c, c_row);
    default:  // the second half finds the weights in the cache
      direct<Fmt>(t, x, rows / 2, c, c_row);
      return direct<Fmt>(t, x + rows / 2, rows - rows / 2, c + rows / 2 * c_row, c_row);
  }
}

template <class Fmt, int K, class Z>
KTG_IN void decode_columns(I word, Z zeros, float* dst) {
  if constexpr (K < Fmt::kStep) {
    store(dst + K * 16, Fmt::template column<K>(word, zeros));
    decode_columns<Fmt, K + 1>(word, zeros, dst);
  }
}

// Columns [k0, k1) of the tiles (of one group, if there are groups) as f32, unscaled: panel[n][k -
// k0][16].
template <class Fmt>
static void decode_panel(const Tiles& t, long k0, long k1, float* panel) {
  for (long n = 0; n < t.count; ++n) {
    const char* data = tile_data(t, n) + k0 / Fmt::kStep * kBlockBytes;
    float* dst = panel + n * kPanelK * 16;
    const auto zeros = Fmt::zeros(t, n, Fmt::kGrouped ? k0 / t.w->group : 0);
    for (long b = 0; b < (k1 - k0) / Fmt::kStep; ++b) {
      _mm_prefetch(data + b * kBlockBytes + kPrefetch, _MM_HINT_T0);
      decode_columns<Fmt, 0>(load_block(data + b * kBlockBytes), zeros, dst + b * Fmt::kStep * 16);
    }
  }
}

static void scale_rows(const Tiles& t, long rows, float* c, long c_row) {
  for (long n = 0; n < t.count; ++n) {
    const F s = int8_scale(t, n);
    for (long m = 0; m < rows; ++m)
      store(c + m * c_row + n * 16, mul(s, load(c + m * c_row + n * 16)));
  }
}

// Pointers to the same rows, moved by k columns.
KTG_IN void advance(const float* const* x, long rows, long k, const float** out) {
  for (long m = 0; m < rows; ++m) out[m] = x[m] + k;
}

template <class Fmt>
static void paneled(const Tiles& t, const float* const* x, long rows, float* c, long c_row,
                    float* panel) {
  // A group, or 16 KiB of panel at a time, beside x and C in the first-level cache.
  const long span = Fmt::kGrouped ? t.w->group : 64;
  const float* xk[kTokenBlock];
  float* scale = panel + kUnitTiles * kPanelK * 16;
  GemmArgs g{xk, 1, panel, kPanelK * 16, 16, 0, c, c_row, scale, nullptr, nullptr};
  if (Fmt::kGrouped)
    for (long m = 0; m < rows; ++m)
      for (long n = 0; n < t.count; ++n) store(c + m * c_row + n * 16, zero());
  for (long k0 = 0; k0 < t.w->kpad; k0 += span) {
    const long k1 = lmin(k0 + span, t.w->kpad);
    decode_panel<Fmt>(t, k0, k1, panel);
    advance(x, rows, k0, xk);
    g.k = k1 - k0;
    if constexpr (Fmt::kGrouped) {
      for (long n = 0; n < t.count; ++n) store(scale + n * 16, Fmt::scale(t, n, k0 / span));
      gemm<SCALED>(g, rows, t.count);
    } else {
      k0 == 0 ? gemm<FRESH>(g, rows, t.count) : gemm<RESUME>(g, rows, t.count);
    }
  }
  if (Fmt::kRowScale) scale_rows(t, rows, c, c_row);
}

template <class Fmt>
static void times_rows(const Tiles& t, const float* const* x, long rows, float* c, long c_row,
                       float* panel) {
  if (rows <= kDirectRows) return direct<Fmt>(t, x, rows, c, c_row);
  paneled<Fmt>(t, x, rows, c, c_row, panel);
}

// C = tiles * rows. At most kUnitTiles tiles and kTokenBlock rows; x rows have kpad readable,
// finite columns.
static void tiles_times_rows(const Tiles& t, const float* const* x, long rows, float* c, long c_row,
                             float* panel) {
  switch (t.w->format) {
    case FMT_F32: {  // the packed tile is a panel already
      GemmArgs g{x,
                 1,
                 reinterpret_cast<const float*>(tile_data(t, 0)),
                 t.w->tile_bytes / 4,
                 16,
                 t.w->kpad,
                 c,
                 c_row,
                 nullptr,
                 nullptr,
                 nullptr};
      return gemm<FRESH>(g, rows, t.count);
    }
    case FMT_BF16:
      return times_rows<Bf16Format>(t, x, rows, c, c_row, panel);
    case FMT_INT8:
      return times_rows<Int8Format>(t, x, rows, c, c_row, panel);
    case FMT_INT8G:
      return times_rows<Int8GFormat>(t, x, rows, c, c_row, panel);
    case FMT_INT4Z:
      return times_rows<Int4zFormat>(t, x, rows, c, c_row, panel);
    case FMT_MXFP4:
      return times_rows<Mxfp4Format>(t, x, rows, c, c_row, panel);
    case FMT_F16:
      return times_rows<F16Format>(t, x, rows, c, c_row, panel);
    case FMT_FP8:
      return times_rows<Fp8Format>(t, x, rows, c, c_row, panel);
    default:
      return times_rows<Int4Format>(t, x, rows, c, c_row, panel);
  }
}

// Rows of x as the kernels above need them: f32, zeros from cols to kpad. In place when x is that
// already.
KTG_IN bool needs_staging(const TensorArg& x, const WeightArg& w) {
  return x.dtype != DT_F32 || w.kpad != w.cols;
}
KTG_IN void stage_row(const TensorArg& x, long i, long h, long kpad, float* dst) {
  widen(row_ptr(x, i, h), x.dtype, x.dim[2], dst);
  for (long k = x.dim[2]; k < kpad; ++k) dst[k] = 0.0f;
}

}  // namespace
}  // namespace KTG_ISA
}  // namespace ktg
