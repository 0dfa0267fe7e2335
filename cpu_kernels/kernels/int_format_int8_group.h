// int8 with groups: one float scale per group, which is a block.
#pragma once

namespace ktg {
namespace KTG_ISA {
namespace {

struct Int8Group {
  static constexpr int kScaling = BLOCK_SCALED;
  static constexpr bool kRowScale = false, kPacked = true;
  KTG_IN long columns(const WeightArg& w) { return w.group; }
  KTG_IN F row_scale(const Tiles&, long) { return zero(); }
  KTG_IN F block_offset(const Tiles&, long, long) { return zero(); }
  KTG_IN F block_scale(const Tiles& t, long n, long k0) {
    return group_scale(t, n, k0 / t.w->group);
  }

  template <int M, int N>
  KTG_IN void dot(const Tiles& t, long n0, const IntRow (&x)[M], long k0, long k1,
                  I (&total)[M][N]) {
    for (int m = 0; m < M; ++m)
      for (int n = 0; n < N; ++n) total[m][n] = dot_start(group_sum(x[m], k0, k1));
    dot_bytes<M, N>(t, n0, x, k0, k1, total);
  }
  static void unpack(const Tiles&, long, long, long, char*) {}  // packed bytes are a panel
};

}  // namespace
}  // namespace KTG_ISA
}  // namespace ktg
