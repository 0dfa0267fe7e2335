// q5_k: q4_k with a fifth bit. Lines: d and dmin, 3 of sub-scales, 8 of fifth bits (32 columns j in
// bit j), 32 of nibbles.
#pragma once

namespace ktg {
namespace KTG_ISA {
namespace {

struct Q5_K : UnsignedQuants {
  static constexpr long kLines = 44, kScaleWord = 0, kSub = 32;
  static constexpr bool kMinima = true;
  static constexpr int kShift = 6;
  KTG_IN I factor(const char* record, long i) { return k_scale(record, i); }
  KTG_IN I minimum(const char* record, long j) { return k_minimum(record, j); }
  KTG_IN I quants(const char* record, long j, long w) {
    const I fifth = bits_and(shift_right_by(word_of(record, 4 + w), iset1(int(j))), 0x01010101);
    return bits_or(half_nibbles(record + 12 * kBlockBytes, j, w), shift_left(fifth, 4));
  }
  KTG_IN void split(I q, I factor, I* high, I* low) {
    split_at_6(even(q), odd(q), factor, high, low);
  }
};

}  // namespace
}  // namespace KTG_ISA
}  // namespace ktg
