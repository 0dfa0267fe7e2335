// q6_k: per 16 columns a signed 8-bit sub-scale under one f16 of 256: d * scale * (q - 32).
// Lines: 32 of nibbles, 16 of two high bits, 4 of sub-scales, d. Half the columns have 16 and 8.
#pragma once

namespace ktg {
namespace KTG_ISA {
namespace {

KTG_IN int sum_of_16(const int8_t* x) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
  const __m128i sums =
      _mm_sad_epu8(_mm_xor_si128(bytes, _mm_set1_epi8(char(0x80))), _mm_setzero_si128());
  return _mm_cvtsi128_si32(sums) + _mm_extract_epi16(sums, 4) - 16 * 128;
}

struct Q6_K : UnsignedQuants {
  static constexpr long kLines = 53, kScaleWord = 52, kSub = 16;
  static constexpr bool kMinima = false;
  static constexpr int kShift = 6;
  KTG_IN I factor(const char* record, long i) {
    return sign_extend_byte(shift_right_by(word_of(record, 48 + i / 4), iset1(int(8 * (i % 4)))));
  }
  KTG_IN I start(const IntRow& x, long k) { return iset1(-32 * sum_of_16(x.q + k)); }
  // 0..63; of the columns of a half, the last 64 are in the high nibbles, each 32 in two high bits.
  KTG_IN I quants(const char* record, long j, long w) {
    const long half = j / 4, part = j % 4;
    const I four =
        shift_right_by(word_of(record, 16 * half + 8 * (part % 2) + w), iset1(int(4 * (part / 2))));
    const I two = shift_right_by(word_of(record, 32 + 8 * half + w), iset1(int(2 * part)));
    return bits_or(low_nibbles(four), shift_left(bits_and(two, 0x03030303), 4));
  }
  KTG_IN void split(I q, I factor, I* high, I* low) {
    const I value = sub_bytes(q, 32);
    split_at_6(SignedQuants::even(value), SignedQuants::odd(value), factor, high, low);
  }
};

}  // namespace
}  // namespace KTG_ISA
}  // namespace ktg
