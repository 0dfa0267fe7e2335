// int4z: nibbles with a zero point (0..16) and one float scale per group, which is a block. The
// zero point stays within the integers: sum of (q - zero) * x.
#pragma once

namespace ktg {
namespace KTG_ISA {
namespace {

struct Int4z {
  static constexpr int kScaling = BLOCK_SCALED;
  static constexpr bool kRowScale = false, kPacked = false;
  KTG_IN long columns(const WeightArg& w) { return w.group; }
  KTG_IN F row_scale(const Tiles&, long) { return zero(); }
  KTG_IN F block_offset(const Tiles&, long, long) { return zero(); }
  KTG_IN F block_scale(const Tiles& t, long n, long k0) {
    return int4z_scale(t, n, k0 / t.w->group);
  }

  template <int M, int N>
  KTG_IN void dot(const Tiles& t, long n0, const IntRow (&x)[M], long k0, long k1,
                  I (&total)[M][N]) {
    for (int n = 0; n < N; ++n) {
      const I zeros = int4z_zeros(t, n0 + n, k0 / t.w->group);
      for (int m = 0; m < M; ++m) total[m][n] = imul(zeros, iset1(-group_sum(x[m], k0, k1)));
    }
    dot_group<M, N>(t, n0, x, k0, k1, total);
  }
  static void unpack(const Tiles& t, long n, long k0, long k1, char* panel) {
    const char* data = tile_data(t, n);
    const I zeros = repeat_byte(int4z_zeros(t, n, k0 / t.w->group));
    for (long k = k0; k < k1; k += 8, panel += 128) {
      const I w = load_block(data + k * 8);
      _mm_prefetch(ahead_of(t, t.count, data, k * 8), _MM_HINT_T0);
      store_block(panel, isub_bytes(low_nibbles(w), zeros));
      store_block(panel + 64, isub_bytes(high_nibbles(w), zeros));
    }
  }
};

}  // namespace
}  // namespace KTG_ISA
}  // namespace ktg
