// q4_k: per 32 columns a 6-bit sub-scale and a 6-bit minimum under two f16 of 256:
// d * scale * q - dmin * minimum. Lines: d and dmin, 3 of sub-scales, 32 of nibbles.
#pragma once

namespace ktg {
namespace KTG_ISA {
namespace {

// Sub-scales and minima are packed as in the file, byte j % 4 of lines 1-3 (get_scale_min_k4).
KTG_IN I k_scale(const char* record, long j) {
  const I scales = word_of(record, 1), by = iset1(int(8 * (j % 4)));
  if (j < 4) return bits_and(shift_right_by(scales, by), 63);
  return bits_or(bits_and(shift_right_by(word_of(record, 3), by), 15),
                 bits_and(shift_right<2>(shift_right_by(scales, by)), 0x30));
}
KTG_IN I k_minimum(const char* record, long j) {
  const I minima = word_of(record, 2), by = iset1(int(8 * (j % 4)));
  if (j < 4) return bits_and(shift_right_by(minima, by), 63);
  return bits_or(bits_and(shift_right<4>(shift_right_by(word_of(record, 3), by)), 15),
                 bits_and(shift_right<2>(shift_right_by(minima, by)), 0x30));
}
// The nibbles of 32 columns: 8 lines hold 64 columns, the second half in the high nibbles.
KTG_IN I half_nibbles(const char* lines, long j, long w) {
  return low_nibbles(shift_right_by(word_of(lines, 8 * (j / 2) + w), iset1(int(4 * (j % 2)))));
}

struct Q4_K : UnsignedQuants {
  static constexpr long kLines = 36, kScaleWord = 0, kSub = 32;
  static constexpr bool kMinima = true;
  static constexpr int kShift = 3;
  KTG_IN I factor(const char* record, long i) { return k_scale(record, i); }
  KTG_IN I minimum(const char* record, long j) { return k_minimum(record, j); }
  KTG_IN I quants(const char* record, long j, long w) {
    return half_nibbles(record + 4 * kBlockBytes, j, w);
  }
  // 15 * 7 is a signed byte, and two bytes side by side do not meet: a product for both.
  KTG_IN void split(I q, I factor, I* high, I* low) {
    *high = mul16(q, bits_and(shift_right<3>(factor), 0x00070007));
    *low = mul16(q, bits_and(factor, 0x00070007));
  }
};

}  // namespace
}  // namespace KTG_ISA
}  // namespace ktg
