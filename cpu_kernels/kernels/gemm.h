// The one f32 matrix kernel: C[m][16 n + lane] from X[m][k] and W[k][16 n + lane].
// Every output is one chain of fused multiply-adds in k order, however many rows and tiles are
// computed together; so decode and prefill, any thread count and both ISAs give equal bits.
#pragma once

namespace ktg {
namespace KTG_ISA {
namespace {

// How a chain starts and ends.
enum Chain : int {
  FRESH,   // from zero, store
  RESUME,  // from C, store
  SCALED,  // from zero; C = scale[n] * chain + C (one int4 group)
  MERGED,  // from zero; C = C * keep[m] + chain * take[m] (attention's running output)
};

struct GemmArgs {
  const float* const* x;  // one pointer per row
  long x_step;            // floats between k and k + 1
  const float* w;
  long w_tile, w_step;  // floats between tiles, and between k and k + 1
  long k;
  float* c;
  long c_row;                // floats between rows of C; tiles are 16 apart
  const float* scale;        // SCALED: [tile][16]
  const float *keep, *take;  // MERGED: [row]
};

template <int M, int N, int CHAIN>
static void gemm_block(const GemmArgs& g, long m0, long n0) {
  F acc[M][N];
  const float* xp[M];
  const float* w = g.w + n0 * g.w_tile;
  const long w_tile = g.w_tile, w_step = g.w_step, x_step = g.x_step, count = g.k;
  float* c = g.c + m0 * g.c_row + n0 * 16;
  const long c_row = g.c_row;
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    xp[m] = g.x[m0 + m];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) acc[m][n] = CHAIN == RESUME ? load(c + m * c_row + n * 16) : zero();
  }
  long kx = 0;
  for (long k = 0; k < count; ++k, kx += x_step, w += w_step) {
    F wv[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) wv[n] = load(w + n * w_tile);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const F xv = set1(xp[m][kx]);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) acc[m][n] = fma(wv[n], xv, acc[m][n]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      float* out = c + m * c_row + n * 16;
      F v = acc[m][n];
      if (CHAIN == SCALED) v = fma(load(g.scale + (n0 + n) * 16), v, load(out));
      if (CHAIN == MERGED)
        v = add(mul(load(out), set1(g.keep[m0 + m])), mul(v, set1(g.take[m0 + m])));
      store(out, v);
    }
  }
}

template <int N, int CHAIN>
static void gemm_rows(const GemmArgs& g, long m0, long rows, long n0) {
  switch (rows) {
    case 6:
      return gemm_block<6, N, CHAIN>(g, m0, n0);
    case 5:
      return gemm_block<5, N, CHAIN>(g, m0, n0);
    case 4:
      return gemm_block<4, N, CHAIN>(g, m0, n0);
    case 3:
      return gemm_block<3, N, CHAIN>(g, m0, n0);
    case 2:
      return gemm_block<2, N, CHAIN>(g, m0, n0);
    default:
      return gemm_block<1, N, CHAIN>(g, m0, n0);
  }
}

template <int CHAIN>
static void gemm_tiles(const GemmArgs& g, long m0, long rows, long n0, long tiles) {
  if constexpr (kNR == 4) {
    if (tiles == 4) return gemm_rows<4, CHAIN>(g, m0, rows, n0);
    if (tiles == 3) return gemm_rows<3, CHAIN>(g, m0, rows, n0);
    if (tiles == 2) return gemm_rows<2, CHAIN>(g, m0, rows, n0);
  }
  gemm_rows<1, CHAIN>(g, m0, rows, n0);
}

// All rows and tiles; a tile block's weights stay in the first-level cache while the rows pass.
template <int CHAIN>
static void gemm(const GemmArgs& g, long rows, long tiles) {
  const long blocks = ceil_div(rows, kMR);
  for (long n0 = 0; n0 < tiles; n0 += kNR)
    for (long b = 0; b < blocks; ++b) {  // blocks of nearly equal height: 13 rows are 5 + 4 + 4
      const long m0 = rows * b / blocks, m1 = rows * (b + 1) / blocks;
      gemm_tiles<CHAIN>(g, m0, m1 - m0, n0, lmin(kNR, tiles - n0));
    }
}

}  // namespace
}  // namespace KTG_ISA
}  // namespace ktg
