// mxfp4: twice the value of an e2m1 code is an integer; half the power of two of a group is the
// scale of a block.
#pragma once

namespace ktg {
namespace KTG_ISA {
namespace {

// 12 more than twice a code's value: unsigned, as dot products want it.
struct Mxfp4Codes {
  KTG_IN I bytes(I codes) {
    return lookup_bytes(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0),
                        codes);
  }
};

struct Mxfp4 {
  static constexpr int kScaling = BLOCK_SCALED;
  static constexpr bool kRowScale = false, kPacked = false;
  KTG_IN long columns(const WeightArg& w) { return w.group; }
  KTG_IN F row_scale(const Tiles&, long) { return zero(); }
  KTG_IN F block_offset(const Tiles&, long, long) { return zero(); }
  KTG_IN F block_scale(const Tiles& t, long n, long k0) {
    return mxfp4_scale(t, n, k0 / t.w->group);
  }

  template <int M, int N>
  KTG_IN void dot(const Tiles& t, long n0, const IntRow (&x)[M], long k0, long k1,
                  I (&total)[M][N]) {
    for (int m = 0; m < M; ++m)
      for (int n = 0; n < N; ++n) total[m][n] = iset1(-12 * group_sum(x[m], k0, k1));
    dot_group<M, N, Mxfp4Codes>(t, n0, x, k0, k1, total);
  }
  static void unpack(const Tiles& t, long n, long k0, long k1, char* panel) {
    const char* data = tile_data(t, n);
    for (long k = k0; k < k1; k += 8, panel += 128) {
      const I w = load_block(data + k * 8);
      _mm_prefetch(ahead_of(t, t.count, data, k * 8), _MM_HINT_T0);
      store_block(panel, sub_bytes(Mxfp4Codes::bytes(low_nibbles(w)), 12));
      store_block(panel + 64, sub_bytes(Mxfp4Codes::bytes(high_nibbles(w)), 12));
    }
  }
};

}  // namespace
}  // namespace KTG_ISA
}  // namespace ktg
