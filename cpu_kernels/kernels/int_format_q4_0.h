// q4_0: one f16 scale per 32 columns, d * (q - 8). Lines of 64 columns: both scales, 4 of nibbles
// for each 32 columns (high nibbles: the last 16).
#pragma once

namespace ktg {
namespace KTG_ISA {
namespace {

struct Q4_0 {
  static constexpr int kScaling = BLOCK_SCALED;
  static constexpr bool kRowScale = false, kPacked = false;
  static constexpr long kLines = 9, kWords = 4;  // of a record of 64 columns, of 32 columns
  KTG_IN long columns(const WeightArg&) { return 32; }
  KTG_IN F row_scale(const Tiles&, long) { return zero(); }
  KTG_IN F block_offset(const Tiles&, long, long) { return zero(); }
  KTG_IN F block_scale(const Tiles& t, long n, long k0) {
    const I both = word_of(tile_data(t, n) + k0 / 64 * kLines * kBlockBytes, 0);
    return half_to_float(k0 % 64 ? shift_right<16>(both) : low_halves(both));
  }
  // From a tile's start to the first line of 32 columns.
  KTG_IN long lines_at(long k0) {
    return (k0 / 64 * kLines + 1 + k0 / 32 % 2 * kWords) * kBlockBytes;
  }

  template <int M, int N>
  KTG_IN void dot(const Tiles& t, long n0, const IntRow (&x)[M], long k0, long, I (&total)[M][N]) {
    const long at = lines_at(k0);
    for (int m = 0; m < M; ++m)
      for (int n = 0; n < N; ++n) total[m][n] = iset1(-8 * x[m].sum[k0 / kSumColumns]);
    for (long w = 0; w < kWords; ++w) {
      I low[N], high[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        const char* data = tile_data(t, n0 + n);
        const I both = load_block(data + at + w * kBlockBytes);
        _mm_prefetch(ahead_of(t, N, data, at + w * kBlockBytes), _MM_HINT_T0);
        low[n] = low_nibbles(both), high[n] = high_nibbles(both);
      }
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const int8_t* q = x[m].q + k0 + 4 * w;
        const I x_low = four_bytes(q), x_high = four_bytes(q + 16);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n)
          total[m][n] = dot_nibbles(dot_nibbles(total[m][n], low[n], x_low), high[n], x_high);
      }
    }
  }
  static void unpack(const Tiles& t, long n, long k0, long, char* panel) {
    const char *data = tile_data(t, n), *lines = data + lines_at(k0);
    for (long w = 0; w < kWords; ++w, panel += 64) {
      const I both = load_block(lines + w * kBlockBytes);
      _mm_prefetch(ahead_of(t, t.count, data, lines_at(k0) + w * kBlockBytes), _MM_HINT_T0);
      store_block(panel, sub_bytes(low_nibbles(both), 8));
      store_block(panel + kWords * 64, sub_bytes(high_nibbles(both), 8));
    }
  }
};

}  // namespace
}  // namespace KTG_ISA
}  // namespace ktg
