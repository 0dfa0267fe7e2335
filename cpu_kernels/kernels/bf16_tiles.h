// bf16 weights times bf16 rows on tile registers, or with vdpbf16ps where a CPU has it and no
// tiles: C[m][16 n + lane] in f32. The packed blocks are operands as they are: 32 columns a tile, 2
// columns a vector. Sums run over kBf16Span columns in the registers, then go on from C.
#pragma once

namespace ktg {
namespace KTG_ISA {
namespace {

#if defined(KTG_TILES) || defined(KTG_BF16_DOTS)
constexpr bool kHasBf16Products = true;
constexpr long kBf16Span = 512;  // best of 128 to 2048 measured: fewer trips of C through memory
#else
constexpr bool kHasBf16Products = false;
#endif

// bf16_tile_block: C (+)= 16 MA rows of A times NB tiles of B over k columns.
#ifdef KTG_TILES
template <int T>
KTG_IN void tile_begin(const float* c, long c_row, bool fresh) {
  fresh ? tile_zero<T>() : tile_load<T>(c, c_row * 4);
}

template <int MA, int NB>
static void bf16_tile_block(const char* a, long a_stride, const char* b, long b_tile, long k,
                            float* c, long c_row, bool fresh) {
  float* below = c + 16 * c_row;
  tile_begin<0>(c, c_row, fresh);
  if constexpr (NB == 2) tile_begin<1>(c + 16, c_row, fresh);
  if constexpr (MA == 2) tile_begin<2>(below, c_row, fresh);
  if constexpr (MA == 2 && NB == 2) tile_begin<3>(below + 16, c_row, fresh);
  for (long at = 0; at < k; at += 32) {
    tile_load<6>(b + at * 32, 64);
    tile_load<4>(a + at * 2, a_stride);
    tile_dot_bf16<0, 4, 6>();
    if constexpr (NB == 2) {
      tile_load<7>(b + b_tile + at * 32, 64);
      tile_dot_bf16<1, 4, 7>();
    }
    if constexpr (MA == 2) {
      tile_load<5>(a + 16 * a_stride + at * 2, a_stride);
      tile_dot_bf16<2, 5, 6>();
      if constexpr (NB == 2) tile_dot_bf16<3, 5, 7>();
    }
  }
  tile_store<0>(c, c_row * 4);
  if constexpr (NB == 2) tile_store<1>(c + 16, c_row * 4);
  if constexpr (MA == 2) tile_store<2>(below, c_row * 4);
  if constexpr (MA == 2 && NB == 2) tile_store<3>(below + 16, c_row * 4);
}
#elif defined(KTG_BF16_DOTS)
constexpr int kDotRows = 8;  // 16 sums hide the latency of vdpbf16ps

template <int M, int NB>
static void bf16_dot_block(const char* a, long a_stride, const char* b, long b_tile, long k,
                           float* c, long c_row, bool fresh) {
  F acc[M][NB];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
    for (int n = 0; n < NB; ++n) acc[m][n] = fresh ? zero() : load(c + m * c_row + n * 16);
  for (long at = 0; at < k; at += 2, a += 4, b += 64) {
    I w[NB];
#pragma GCC unroll 2
    for (int n = 0; n < NB; ++n) w[n] = load_block(b + n * b_tile);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      int pair;
      __builtin_memcpy(&pair, a + m * a_stride, 4);
#pragma GCC unroll 2
      for (int n = 0; n < NB; ++n) acc[m][n] = dot_bf16(acc[m][n], w[n], pair);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
    for (int n = 0; n < NB; ++n) store(c + m * c_row + n * 16, acc[m][n]);
}

template <int MA, int NB>
static void bf16_tile_block(const char* a, long a_stride, const char* b, long b_tile, long k,
                            float* c, long c_row, bool fresh) {
  for (int m = 0; m < 16 * MA; m += kDotRows)
    bf16_dot_block<kDotRows, NB>(a + m * a_stride, a_stride, b, b_tile, k, c + m * c_row, c_row,
                                 fresh);
}

// At most 16 rows, in blocks of 8 and 4: an expert often has few.
template <int NB>
static void bf16_few_rows(const char* a, long a_stride, long rows, const char* b, long b_tile,
                          long k, float* c, long c_row, bool fresh) {
  for (; rows > 4; rows -= kDotRows, a += kDotRows * a_stride, c += kDotRows * c_row)
    bf16_dot_block<kDotRows, NB>(a, a_stride, b, b_tile, k, c, c_row, fresh);
  if (rows > 0) bf16_dot_block<4, NB>(a, a_stride, b, b_tile, k, c, c_row, fresh);
}
#endif

#if defined(KTG_TILES) || defined(KTG_BF16_DOTS)
template <int MA>
static void bf16_rows(const Tiles& t, const char* a, long stride, long k0, long k, float* c,
                      long c_row) {
  const long tile = t.w->tile_bytes;
  const char* b = tile_data(t, 0) + k0 * 32;
  long n = 0;
  for (; n + 2 <= t.count; n += 2)
    bf16_tile_block<MA, 2>(a, stride, b + n * tile, tile, k, c + n * 16, c_row, k0 == 0);
  if (n < t.count)
    bf16_tile_block<MA, 1>(a, stride, b + n * tile, tile, k, c + n * 16, c_row, k0 == 0);
}

#ifdef KTG_BF16_DOTS
static void bf16_tail(const Tiles& t, const char* a, long stride, long rows, long k0, long k,
                      float* c, long c_row) {
  const long tile = t.w->tile_bytes;
  const char* b = tile_data(t, 0) + k0 * 32;
  long n = 0;
  for (; n + 2 <= t.count; n += 2)
    bf16_few_rows<2>(a, stride, rows, b + n * tile, tile, k, c + n * 16, c_row, k0 == 0);
  if (n < t.count)
    bf16_few_rows<1>(a, stride, rows, b + n * tile, tile, k, c + n * 16, c_row, k0 == 0);
}
#endif

// C = tiles * rows; x rows are kpad bf16 values, `stride` bytes apart. Rows of x and C up to the
// next multiple of 16 are read and written.
static void bf16_tiles_times_rows(const Tiles& t, const char* x, long stride, long rows, float* c,
                                  long c_row) {
  const TileUse use(64);
  for (long k0 = 0; k0 < t.w->kpad; k0 += kBf16Span) {
    const long k = lmin(kBf16Span, t.w->kpad - k0), next = k0 + kBf16Span;
    const long ahead = next < t.w->kpad ? next * 32 : t.count * t.w->tile_bytes;
    for (long n = 0; n < t.count; ++n)
      for (long i = 0; i < kBf16Span * 32; i += 64)
        _mm_prefetch(tile_data(t, n) + ahead + i, _MM_HINT_T1);
    for (long m = 0; m < rows; m += 32) {
      const char* a = x + m * stride + k0 * 2;
#ifdef KTG_BF16_DOTS
      if (rows - m <= 16) {
        bf16_tail(t, a, stride, rows - m, k0, k, c + m * c_row, c_row);
        continue;
      }
#endif
      rows - m > 16 ? bf16_rows<2>(t, a, stride, k0, k, c + m * c_row, c_row)
                    : bf16_rows<1>(t, a, stride, k0, k, c + m * c_row, c_row);
    }
  }
}
#else
static void bf16_tiles_times_rows(const Tiles&, const char*, long, long, float*, long) {}
#endif

}  // namespace
}  // namespace KTG_ISA
}  // namespace ktg
