// Packed weights times rows: C[m][16 n + lane] for up to four tiles of one matrix.
// Few rows: weights are decoded in registers as they stream from memory. More rows: a K block is
// decoded once into an f32 panel in the cache, and gemm.h runs over it. Both follow the chains
// below, so their bits are equal:
//   f32, bf16: one chain over all k.   int8: that, times the row's scale.
//   int4: a chain per group from zero; total = scale * chain + total, in group order.
#pragma once

namespace ktg {
namespace KTG_ISA {
namespace {

constexpr long kUnitTiles = 4;  // tiles a work unit computes together
constexpr long kPanelK =
    128;  // columns per panel: 4 tiles x 128 x 64 bytes = 32 KiB; a multiple of every group
constexpr long kDirectRows =
    12;  // up to here weights are decoded in registers, for up to 6 rows at a time
constexpr long kTokenBlock = 96;  // rows per work unit
constexpr long kPrefetch = 1536;  // bytes ahead in each tile's stream
constexpr size_t kPanelBytes = kUnitTiles * kPanelK * 64 + kUnitTiles * 64;

struct Bf16Format {
  static constexpr int kStep = 2;
  template <int K>
  KTG_IN F column(I w) {
    return bf16_column<K>(w);
  }
};
struct Int8Format {
  static constexpr int kStep = 4;
  template <int K>
  KTG_IN F column(I w) {
    return int8_column<K>(w);
  }
};
struct Int4Format {
  static constexpr int kStep = 8;
  template <int K>
  KTG_IN F column(I w) {
    return int4_column<K>(w);
  }
};

struct Tiles {
  const WeightArg* w;
  const char* matrix;  // start of one matrix of the stack
  long first, count;   // tiles
};

KTG_IN Tiles tiles_of(const WeightArg& w, long index, long first, long count) {
  return {&w, w.data + index * w.stride, first, count};
}
KTG_IN const char* tile_data(const Tiles& t, long n) {
  return t.matrix + (t.first + n) * t.w->tile_bytes;
}
KTG_IN F int8_scale(const Tiles& t, long n) {
  return load(reinterpret_cast<const float*>(t.matrix + t.w->scale_offset) + (t.first + n) * 16);
}
KTG_IN F int4_scale(const Tiles& t, long n, long group) {
  const u16* s = reinterpret_cast<const u16*>(t.matrix + t.w->scale_offset);
  return load_bf16(s + ((t.first + n) * t.w->groups + group) * 16);
}

template <class Fmt, int M, int N, int K>
KTG_IN void fma_column(const I (&word)[N], const float* const (&xp)[M], long k, F (&acc)[M][N]) {
  if constexpr (K < Fmt::kStep) {
    F wv[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) wv[n] = Fmt::template column<K>(word[n]);
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m) {
      const F xv = set1(xp[m][k + K]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) acc[m][n] = fma(wv[n], xv, acc[m][n]);
    }
    fma_column<Fmt, M, N, K + 1>(word, xp, k, acc);
  }
}

template <class Fmt, int M, int N>
KTG_IN void fma_blocks(const char* const (&data)[N], const float* const (&xp)[M], long b0, long b1,
                       long ahead, F (&acc)[M][N]) {
  for (long b = b0; b < b1; ++b) {
    I word[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      word[n] = load_block(data[n] + b * kBlockBytes);
      _mm_prefetch(data[n] + b * kBlockBytes + ahead, _MM_HINT_T0);
    }
    fma_column<Fmt, M, N, 0>(word, xp, b * Fmt::kStep, acc);
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
  const long run =
      Fmt::kStep == 8 ? t.w->group / 8 : 16;  // int4: a group; else only for the prefetch
  for (long b = 0, group = 0; b < blocks; b += run, ++group) {
    // Near the end of a tile its stream goes on in the tile that this place reads next.
    const bool inside = b * kBlockBytes + kPrefetch < tile_bytes;
    const long ahead = inside ? kPrefetch : kPrefetch + (N - 1) * tile_bytes;
    fma_blocks<Fmt, M, N>(data, xp, b, lmin(b + run, blocks), ahead, acc);
    if constexpr (Fmt::kStep == 8) {
      for (int n = 0; n < N; ++n) {
        const F scale = int4_scale(t, n0 + n, group);
        for (int m = 0; m < M; ++m) {
          float* out = c + m * c_row + (n0 + n) * 16;
          store(out, fma(scale, acc[m][n], b == 0 ? zero() : load(out)));
          acc[m][n] = zero();
        }
      }
    }
  }
  if constexpr (Fmt::kStep == 8) return;
  for (int n = 0; n < N; ++n)
    for (int m = 0; m < M; ++m)
      store(c + m * c_row + (n0 + n) * 16,
            Fmt::kStep == 4 ? mul(int8_scale(t, n0 + n), acc[m][n]) : acc[m][n]);
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

template <class Fmt, int K>
KTG_IN void decode_columns(I word, float* dst) {
  if constexpr (K < Fmt::kStep) {
    store(dst + K * 16, Fmt::template column<K>(word));
    decode_columns<Fmt, K + 1>(word, dst);
  }
}

// Columns [k0, k1) of the tiles as f32, unscaled: panel[n][k - k0][16].
template <class Fmt>
static void decode_panel(const Tiles& t, long k0, long k1, float* panel) {
  for (long n = 0; n < t.count; ++n) {
    const char* data = tile_data(t, n) + k0 / Fmt::kStep * kBlockBytes;
    float* dst = panel + n * kPanelK * 16;
    for (long b = 0; b < (k1 - k0) / Fmt::kStep; ++b) {
      _mm_prefetch(data + b * kBlockBytes + kPrefetch, _MM_HINT_T0);
      decode_columns<Fmt, 0>(load_block(data + b * kBlockBytes), dst + b * Fmt::kStep * 16);
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
  // 16 KiB of panel in use at a time, beside x and C in the first-level cache; int4 goes by groups.
  constexpr long span = Fmt::kStep == 8 ? kPanelK : 64;
  const float* xk[kTokenBlock];
  float* scale = panel + kUnitTiles * kPanelK * 16;
  GemmArgs g{xk, 1, panel, kPanelK * 16, 16, 0, c, c_row, scale, nullptr, nullptr};
  if (Fmt::kStep == 8)
    for (long m = 0; m < rows; ++m)
      for (long n = 0; n < t.count; ++n) store(c + m * c_row + n * 16, zero());
  for (long k0 = 0; k0 < t.w->kpad; k0 += span) {
    const long k1 = lmin(k0 + span, t.w->kpad);
    decode_panel<Fmt>(t, k0, k1, panel);
    if constexpr (Fmt::kStep != 8) {
      advance(x, rows, k0, xk);
      g.k = k1 - k0;
      k0 == 0 ? gemm<FRESH>(g, rows, t.count) : gemm<RESUME>(g, rows, t.count);
      continue;
    }
    for (long k = k0; k < k1; k += t.w->group) {
      for (long n = 0; n < t.count; ++n) store(scale + n * 16, int4_scale(t, n, k / t.w->group));
      advance(x, rows, k, xk);
      g.w = panel + (k - k0) * 16;
      g.k = lmin(t.w->group, k1 - k);
      gemm<SCALED>(g, rows, t.count);
    }
  }
  if (Fmt::kStep == 4) scale_rows(t, rows, c, c_row);
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
