// int4p: one integer factor per group (bits 0-3; bit 7: the nibbles' offset is 7, not 8) within one
// float scale per row.
#pragma once

namespace ktg {
namespace KTG_ISA {
namespace {

struct Int4p {
  static constexpr int kScaling = ROW_SCALED;
  static constexpr bool kRowScale = true, kPacked = false;
  KTG_IN long columns(const WeightArg&) { return kActBlock; }
  KTG_IN F block_offset(const Tiles&, long, long) { return zero(); }
  KTG_IN F block_scale(const Tiles&, long, long) { return zero(); }
  KTG_IN F row_scale(const Tiles& t, long n) {
    return load(reinterpret_cast<const float*>(t.matrix + t.w->outer_offset) + (t.first + n) * 16);
  }
  // Codes of the groups from column k0 on, 16 bytes a group.
  KTG_IN const uint8_t* codes(const Tiles& t, long n, long k0) {
    return reinterpret_cast<const uint8_t*>(t.matrix + t.w->scale_offset) +
           ((t.first + n) * t.w->groups + k0 / t.w->group) * 16;
  }
  // A group's factors, and factor * offset, per row: 8 factor, or 7 factor where bit 7 is set.
  KTG_IN void factors(const uint8_t* codes, I* factor, I* offset) {
    const I code = load_bytes(codes);
    *factor = bits_and(code, 15);
    *offset = imul(*factor, isub(iset1(8), shift_right<7>(code)));
  }

  template <int M, int N>
  KTG_IN void dot(const Tiles& t, long n0, const IntRow (&x)[M], long k0, long k1,
                  I (&total)[M][N]) {
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) total[m][n] = iset1(0);
    const uint8_t* at = codes(t, n0, k0);
    for (long k = k0; k < k1; k += t.w->group, at += 16) {
      const long end = lmin(k + t.w->group, k1);
      I acc[M][N];
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) acc[m][n] = iset1(0);
      dot_group<M, N>(t, n0, x, k, end, acc);
      int sums[M];
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) sums[m] = group_sum(x[m], k, end);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        I factor, offset;
        factors(at + n * t.w->groups * 16, &factor, &offset);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
          const I shift = imul(offset, iset1(sums[m]));
          total[m][n] = iadd(total[m][n], isub(imul(acc[m][n], factor), shift));
        }
      }
    }
  }
  static void unpack(const Tiles& t, long n, long k0, long k1, char* panel) {
    const char* data = tile_data(t, n);
    const uint8_t* at = codes(t, n, k0);
    for (long g = k0; g < k1; g += t.w->group, at += 16) {
      I factor, offset;
      factors(at, &factor, &offset);
      factor = repeat_half(factor), offset = repeat_byte(offset);
      for (long k = g; k < lmin(g + t.w->group, k1); k += 8, panel += 128) {
        const I w = load_block(data + k * 8);
        _mm_prefetch(ahead_of(t, t.count, data, k * 8), _MM_HINT_T0);
        store_block(panel, scale_nibbles(low_nibbles(w), factor, offset));
        store_block(panel + 64, scale_nibbles(high_nibbles(w), factor, offset));
      }
    }
  }
};

}  // namespace
}  // namespace KTG_ISA
}  // namespace ktg
