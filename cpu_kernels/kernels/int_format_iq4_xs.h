// iq4_xs: per 32 columns a 6-bit sub-scale less 32 under one f16 of 256, nibbles naming one of 16
// values: d * (scale - 32) * value. Lines: d and high bits of sub-scales, their low nibbles, 32 of
// nibbles, 4 lines for 32 columns.
#pragma once

namespace ktg {
namespace KTG_ISA {
namespace {

alignas(16) constexpr int8_t kIq4Table[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                              1,    13,   25,  38,  53,  69,  89,  113};

struct Iq4_Xs : SignedQuants {
  static constexpr long kLines = 34, kScaleWord = 0, kSub = 32;
  static constexpr bool kMinima = false;
  static constexpr int kShift = 6;
  KTG_IN I factor(const char* record, long i) {
    const I low = bits_and(shift_right_by(word_of(record, 1), iset1(int(4 * i))), 15);
    const I high = bits_and(shift_right_by(word_of(record, 0), iset1(int(16 + 2 * i))), 3);
    return isub(bits_or(low, shift_left(high, 4)), iset1(32));
  }
  KTG_IN I quants(const char* record, long j, long w) {
    const I both = word_of(record, 2 + 4 * j + w % 4);
    return lookup_bytes(kIq4Table, low_nibbles(shift_right_by(both, iset1(int(w / 4 * 4)))));
  }
  KTG_IN void split(I q, I factor, I* high, I* low) {
    split_at_6(even(q), odd(q), factor, high, low);
  }
};

}  // namespace
}  // namespace KTG_ISA
}  // namespace ktg
