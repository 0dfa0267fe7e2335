// int8: one float scale per row.
#pragma once

namespace ktg {
namespace KTG_ISA {
namespace {

struct Int8 {
  static constexpr int kScaling = ROW_SCALED;
  static constexpr bool kRowScale = true, kPacked = true;
  static constexpr int kStep = 4;
  KTG_IN long columns(const WeightArg&) { return kActBlock; }
  KTG_IN F row_scale(const Tiles& t, long n) { return int8_scale(t, n); }
  KTG_IN F block_offset(const Tiles&, long, long) { return zero(); }
  KTG_IN F block_scale(const Tiles&, long, long) { return zero(); }

  template <int M, int N>
  KTG_IN void dot(const Tiles& t, long n0, const IntRow (&x)[M], long k0, long k1,
                  I (&total)[M][N]) {
    for (int m = 0; m < M; ++m)
      for (int n = 0; n < N; ++n) total[m][n] = dot_start(x[m].block_sum[k0 / kActBlock]);
    dot_bytes<M, N>(t, n0, x, k0, k1, total);
  }
  static void unpack(const Tiles&, long, long, long, char*) {}  // packed bytes are a panel
};

}  // namespace
}  // namespace KTG_ISA
}  // namespace ktg
