// 16 f32 lanes in two ymm. Same operations in the same order as vec_avx512.h, so both give equal
// bits.
#pragma once
#include <immintrin.h>
#include <cstdint>

#define KTG_IN static inline __attribute__((always_inline))

namespace ktg {
namespace KTG_ISA {
namespace {

using u16 = uint16_t;
struct F {
  __m256 a, b;
};
struct I {
  __m256i a, b;
};
using Mask = F;

constexpr int kMR = 6, kNR = 1;  // 12 accumulators of the 16 registers
constexpr int direct_tiles(int rows) { return rows <= 2 ? 2 : 1; }

KTG_IN F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
KTG_IN F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
KTG_IN F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
KTG_IN void store(float* p, F v) { _mm256_storeu_ps(p, v.a), _mm256_storeu_ps(p + 8, v.b); }
KTG_IN __m256i first_n8(long n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(int(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
KTG_IN F load_n(const float* p, long n) {
  return {_mm256_maskload_ps(p, first_n8(n)), _mm256_maskload_ps(p + 8, first_n8(n - 8))};
}
KTG_IN void store_n(float* p, F v, long n) {
  _mm256_maskstore_ps(p, first_n8(n), v.a), _mm256_maskstore_ps(p + 8, first_n8(n - 8), v.b);
}
KTG_IN F add(F a, F b) { return {_mm256_add_ps(a.a, b.a), _mm256_add_ps(a.b, b.b)}; }
KTG_IN F sub(F a, F b) { return {_mm256_sub_ps(a.a, b.a), _mm256_sub_ps(a.b, b.b)}; }
KTG_IN F mul(F a, F b) { return {_mm256_mul_ps(a.a, b.a), _mm256_mul_ps(a.b, b.b)}; }
KTG_IN F div(F a, F b) { return {_mm256_div_ps(a.a, b.a), _mm256_div_ps(a.b, b.b)}; }
KTG_IN F fma(F a, F b, F c) {
  return {_mm256_fmadd_ps(a.a, b.a, c.a), _mm256_fmadd_ps(a.b, b.b, c.b)};
}
// max and min return the second operand when one is NaN: put the value there to let NaN through.
KTG_IN F max(F a, F b) { return {_mm256_max_ps(a.a, b.a), _mm256_max_ps(a.b, b.b)}; }
KTG_IN F min(F a, F b) { return {_mm256_min_ps(a.a, b.a), _mm256_min_ps(a.b, b.b)}; }
KTG_IN F abs(F v) {
  const __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF));
  return {_mm256_and_ps(v.a, m), _mm256_and_ps(v.b, m)};
}
KTG_IN F round(F v) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(v.a, mode), _mm256_round_ps(v.b, mode)};
}
KTG_IN Mask less(F a, F b) {
  return {_mm256_cmp_ps(a.a, b.a, _CMP_LT_OQ), _mm256_cmp_ps(a.b, b.b, _CMP_LT_OQ)};
}
KTG_IN Mask equal(F a, F b) {
  return {_mm256_cmp_ps(a.a, b.a, _CMP_EQ_OQ), _mm256_cmp_ps(a.b, b.b, _CMP_EQ_OQ)};
}
KTG_IN Mask both(Mask a, Mask b) { return {_mm256_and_ps(a.a, b.a), _mm256_and_ps(a.b, b.b)}; }
KTG_IN F select(Mask m, F yes, F no) {
  return {_mm256_blendv_ps(no.a, yes.a, m.a), _mm256_blendv_ps(no.b, yes.b, m.b)};
}
KTG_IN __m256 scale2_8(__m256 a, __m256 n) {
  return _mm256_castsi256_ps(
      _mm256_add_epi32(_mm256_castps_si256(a), _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23)));
}
// a * 2^n for integral n in the range of the exponent
KTG_IN F scale2(F a, F n) { return {scale2_8(a.a, n.a), scale2_8(a.b, n.b)}; }

KTG_IN __m256 widen_bf16(__m128i h) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
KTG_IN F load_bf16(const u16* p) {
  return {widen_bf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          widen_bf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
// Round to nearest even; NaN stays NaN. Result in the low half of each lane.
KTG_IN __m256i bf16_bits8(__m256 v) {
  const __m256i u = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7FFF)), odd), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(0x40));
  return _mm256_blendv_epi8(rounded, quiet, nan);
}
KTG_IN __m256 bf16_round8(__m256 v) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(bf16_bits8(v), 16));
}
KTG_IN F bf16_round(F v) { return {bf16_round8(v.a), bf16_round8(v.b)}; }
KTG_IN void store_bf16(u16* p, F v) {
  const __m256i packed = _mm256_packus_epi32(bf16_bits8(v.a), bf16_bits8(v.b));  // a0 b0 a1 b1
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xD8));
}

// The 64-byte block of a packed format, and column K of it as f32.
KTG_IN I load_block(const char* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}
template <int K>
KTG_IN F bf16_column(I w) {
  if (K == 0)
    return {_mm256_castsi256_ps(_mm256_slli_epi32(w.a, 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(w.b, 16))};
  const __m256i m = _mm256_set1_epi32(0xFFFF0000);
  return {_mm256_castsi256_ps(_mm256_and_si256(w.a, m)),
          _mm256_castsi256_ps(_mm256_and_si256(w.b, m))};
}
// An unsigned field of the word as f32 without shift or conversion: under the exponent of 2^(23 -
// LOW), bit LOW of the mantissa weighs 1, so (w & mask) | exponent is exactly 2^(23 - LOW) + field.
template <int LOW, int BITS>
KTG_IN __m256 field(__m256i w, float offset) {
  const __m256i mask = _mm256_set1_epi32(((1 << BITS) - 1) << LOW);
  const __m256i magic = _mm256_set1_epi32((127 + 23 - LOW) << 23);
  const __m256 base = _mm256_set1_ps(float(1 << (23 - LOW)) + offset);
  return _mm256_sub_ps(_mm256_castsi256_ps(_mm256_or_si256(_mm256_and_si256(w, mask), magic)),
                       base);
}
template <int K>
KTG_IN F int8_column(I w) {
  const __m256i flip = _mm256_set1_epi32(0x80808080);
  __m256i a = _mm256_xor_si256(w.a, flip), b = _mm256_xor_si256(w.b, flip);
  if (K >= 2) a = _mm256_srli_epi32(a, 16), b = _mm256_srli_epi32(b, 16);
  return {field<8 * (K % 2), 8>(a, 128), field<8 * (K % 2), 8>(b, 128)};
}
template <int K>
KTG_IN F int4_column(I w) {
  constexpr int nibble = K < 4 ? 2 * K : 2 * (K - 4) + 1;
  if (nibble < 5) return {field<4 * (nibble % 5), 4>(w.a, 8), field<4 * (nibble % 5), 4>(w.b, 8)};
  const __m256i a = _mm256_srli_epi32(w.a, 20), b = _mm256_srli_epi32(w.b, 20);
  return {field<4 * (nibble % 5), 4>(a, 8), field<4 * (nibble % 5), 4>(b, 8)};
}

// Two halves per lane -> the low ones of all lanes, then the high ones.
KTG_IN __m256i halves_apart(__m256i w) {
  const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15, 0, 1,
                                         4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  return _mm256_permute4x64_epi64(_mm256_shuffle_epi8(w, order), 0xD8);
}
template <int K>
KTG_IN F f16_column(I w) {
  return {_mm256_cvtph_ps(_mm256_extracti128_si256(halves_apart(w.a), K)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(halves_apart(w.b), K))};
}
KTG_IN F load_f16(const u16* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
// Twice the value of an e2m1 code (1 bit sign, 2 exponent, 1 mantissa). vpermps looks only at the
// low three bits of each index; the sign is put on after it.
template <int NIBBLE>
KTG_IN __m256 mxfp4_nibble(__m256i w) {
  const __m256 table = _mm256_setr_ps(0, 1, 2, 3, 4, 6, 8, 12);
  const __m256 magnitude = _mm256_permutevar8x32_ps(table, _mm256_srli_epi32(w, 4 * NIBBLE));
  const __m256i top =
      _mm256_and_si256(_mm256_slli_epi32(w, 28 - 4 * NIBBLE), _mm256_set1_epi32(int(0x80000000)));
  return _mm256_xor_ps(magnitude, _mm256_castsi256_ps(top));
}
template <int K>
KTG_IN F mxfp4_column(I w) {
  constexpr int nibble = K < 4 ? 2 * K : 2 * (K - 4) + 1;
  return {mxfp4_nibble<nibble>(w.a), mxfp4_nibble<nibble>(w.b)};
}
// e4m3: its exponent and mantissa read as those of f32, whose bias is 120 more. The few denormals
// cost the product an assist.
template <int K>
KTG_IN __m256 fp8_lanes(__m256i w) {
  const __m256i top = K == 3 ? w : _mm256_slli_epi32(w, 24 - 8 * K);
  const __m256i bits =
      _mm256_and_si256(_mm256_srai_epi32(top, 4), _mm256_set1_epi32(int(0x87F00000)));
  return _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(0x1p120f));
}
template <int K>
KTG_IN F fp8_column(I w) {
  return {fp8_lanes<K>(w.a), fp8_lanes<K>(w.b)};
}

// For packing: integers from integral f32, and putting fields of a block together.
KTG_IN I to_int(F v) { return {_mm256_cvtps_epi32(v.a), _mm256_cvtps_epi32(v.b)}; }
KTG_IN I bits_or(I a, I b) { return {_mm256_or_si256(a.a, b.a), _mm256_or_si256(a.b, b.b)}; }
KTG_IN I bits_and(I a, int mask) {
  const __m256i m = _mm256_set1_epi32(mask);
  return {_mm256_and_si256(a.a, m), _mm256_and_si256(a.b, m)};
}
KTG_IN I shift_left(I a, int n) {
  const __m128i by = _mm_cvtsi32_si128(n);
  return {_mm256_sll_epi32(a.a, by), _mm256_sll_epi32(a.b, by)};
}
KTG_IN void store_block(char* p, I v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v.a);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32), v.b);
}
KTG_IN I bf16_bits(F v) { return {bf16_bits8(v.a), bf16_bits8(v.b)}; }

KTG_IN I bits_of(F v) { return {_mm256_castps_si256(v.a), _mm256_castps_si256(v.b)}; }
KTG_IN F float_of(I v) { return {_mm256_castsi256_ps(v.a), _mm256_castsi256_ps(v.b)}; }
// Round to nearest even, in the low half of each lane; and 16 of them side by side.
KTG_IN __m128i to_f16(__m256 v) { return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }
KTG_IN I f16_bits(F v) {
  return {_mm256_cvtepu16_epi32(to_f16(v.a)), _mm256_cvtepu16_epi32(to_f16(v.b))};
}
KTG_IN void store_f16(u16* p, F v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_f16(v.a));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), to_f16(v.b));
}

// Integers: dot products of 4 neighbouring bytes, per 32-bit lane (see vec_avx512.h).
constexpr int kIntRows = 4, kIntTiles = 1;
KTG_IN I iset1(int v) { return {_mm256_set1_epi32(v), _mm256_set1_epi32(v)}; }
KTG_IN I iadd(I a, I b) { return {_mm256_add_epi32(a.a, b.a), _mm256_add_epi32(a.b, b.b)}; }
KTG_IN I isub(I a, I b) { return {_mm256_sub_epi32(a.a, b.a), _mm256_sub_epi32(a.b, b.b)}; }
KTG_IN I imul(I a, I b) { return {_mm256_mullo_epi32(a.a, b.a), _mm256_mullo_epi32(a.b, b.b)}; }
KTG_IN I imax(I a, I b) { return {_mm256_max_epi32(a.a, b.a), _mm256_max_epi32(a.b, b.b)}; }
KTG_IN F to_float(I v) { return {_mm256_cvtepi32_ps(v.a), _mm256_cvtepi32_ps(v.b)}; }
KTG_IN I load_ints(const int* p) { return load_block(reinterpret_cast<const char*>(p)); }
KTG_IN __m256i widen_bytes(const uint8_t* p) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
KTG_IN I load_bytes(const uint8_t* p) { return {widen_bytes(p), widen_bytes(p + 8)}; }
KTG_IN void store_bytes(int8_t* p, I v) {
  const __m256i halves = _mm256_packs_epi32(v.a, v.b);  // a0 b0 a1 b1
  const __m256i order = _mm256_permute4x64_epi64(halves, 0xD8);
  _mm_storeu_si128(
      reinterpret_cast<__m128i*>(p),
      _mm_packs_epi16(_mm256_castsi256_si128(order), _mm256_extracti128_si256(order, 1)));
}
KTG_IN I four_bytes(const int8_t* p) {
  int v;
  __builtin_memcpy(&v, p, 4);
  return iset1(v);
}
KTG_IN I low_nibbles(I w) {
  const __m256i m = _mm256_set1_epi8(15);
  return {_mm256_and_si256(w.a, m), _mm256_and_si256(w.b, m)};
}
KTG_IN I high_nibbles(I w) {
  return low_nibbles({_mm256_srli_epi16(w.a, 4), _mm256_srli_epi16(w.b, 4)});
}
// Entry `index` (bytes 0..15) of a table of 16 bytes.
KTG_IN I lookup_bytes(__m128i table, I index) {
  const __m256i t = _mm256_broadcastsi128_si256(table);
  return {_mm256_shuffle_epi8(t, index.a), _mm256_shuffle_epi8(t, index.b)};
}
KTG_IN I isub_bytes(I a, I b) { return {_mm256_sub_epi8(a.a, b.a), _mm256_sub_epi8(a.b, b.b)}; }
KTG_IN I scale_nibbles(I u, I factor, I offset) {
  return {_mm256_sub_epi8(_mm256_mullo_epi16(u.a, factor.a), offset.a),
          _mm256_sub_epi8(_mm256_mullo_epi16(u.b, factor.b), offset.b)};
}
template <int N>
KTG_IN I shift_right(I v) {
  return {_mm256_srli_epi32(v.a, N), _mm256_srli_epi32(v.b, N)};
}
KTG_IN I repeat_byte(I v) { return imul(v, iset1(0x01010101)); }
KTG_IN I repeat_half(I v) { return imul(v, iset1(0x00010001)); }
KTG_IN I sub_bytes(I w, int v) {
  const __m256i n = _mm256_set1_epi8(char(v));
  return {_mm256_sub_epi8(w.a, n), _mm256_sub_epi8(w.b, n)};
}

// GGUF blocks: f16 in the low half of each lane, shifts by a vector's counts, 16-bit fields.
KTG_IN __m256 half_to_float8(__m256i v) {  // by exponents: a product with 2^112 is exact
  const __m256i wide = _mm256_slli_epi32(_mm256_and_si256(v, _mm256_set1_epi32(0x7FFF)), 13);
  const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(v, _mm256_set1_epi32(0x8000)), 16);
  const __m256 f = _mm256_mul_ps(_mm256_castsi256_ps(wide), _mm256_set1_ps(0x1p112f));
  return _mm256_or_ps(f, _mm256_castsi256_ps(sign));
}
KTG_IN F half_to_float(I v) { return {half_to_float8(v.a), half_to_float8(v.b)}; }
KTG_IN I shift_right_by(I v, I n) {
  return {_mm256_srlv_epi32(v.a, n.a), _mm256_srlv_epi32(v.b, n.b)};
}
KTG_IN I sign_extend_byte(I v) {
  return {_mm256_srai_epi32(_mm256_slli_epi32(v.a, 24), 24),
          _mm256_srai_epi32(_mm256_slli_epi32(v.b, 24), 24)};
}
KTG_IN I mul16(I a, I b) { return {_mm256_mullo_epi16(a.a, b.a), _mm256_mullo_epi16(a.b, b.b)}; }
template <int N>
KTG_IN I shift_right16(I v) {  // with the sign
  return {_mm256_srai_epi16(v.a, N), _mm256_srai_epi16(v.b, N)};
}
template <int N>
KTG_IN I shift_left16(I v) {
  return {_mm256_slli_epi16(v.a, N), _mm256_slli_epi16(v.b, N)};
}
KTG_IN I lookup_bytes(const int8_t* table, I v) {  // every byte 0..15
  const __m256i t =
      _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return {_mm256_shuffle_epi8(t, v.a), _mm256_shuffle_epi8(t, v.b)};
}
KTG_IN I dot_pairs(I acc, I a, I b) {
  return iadd(acc, {_mm256_madd_epi16(a.a, b.a), _mm256_madd_epi16(a.b, b.b)});
}

#ifdef __AVXVNNI__
using Signed = I;
KTG_IN Signed as_signed(I w) {
  const __m256i m = _mm256_set1_epi8(char(0x80));
  return {_mm256_xor_si256(w.a, m), _mm256_xor_si256(w.b, m)};
}
KTG_IN I dot_start(int row_sum) { return iset1(-128 * row_sum); }
// Inline assembly: gcc 12 copies the sums of the intrinsic around.
KTG_IN I dot_nibbles(I acc, I u, I x) {
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc.a) : "x"(u.a), "x"(x.a));
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc.b) : "x"(u.b), "x"(x.b));
  return acc;
}
KTG_IN I dot_signed(I acc, Signed w, I x) { return dot_nibbles(acc, w, x); }
#else
struct Signed {
  I magnitude, w;
};
KTG_IN Signed as_signed(I w) { return {{_mm256_abs_epi8(w.a), _mm256_abs_epi8(w.b)}, w}; }
KTG_IN I dot_start(int /*row_sum*/) { return iset1(0); }
KTG_IN __m256i dot8(__m256i acc, __m256i u, __m256i x) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(u, x), _mm256_set1_epi16(1)));
}
KTG_IN I dot_nibbles(I acc, I u, I x) { return {dot8(acc.a, u.a, x.a), dot8(acc.b, u.b, x.b)}; }
KTG_IN I dot_signed(I acc, Signed w, I x) {
  return {dot8(acc.a, w.magnitude.a, _mm256_sign_epi8(x.a, w.w.a)),
          dot8(acc.b, w.magnitude.b, _mm256_sign_epi8(x.b, w.w.b))};
}
#endif

KTG_IN float sum(F v) {
  const __m256 half = _mm256_add_ps(v.a, v.b);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}

}  // namespace
}  // namespace KTG_ISA
}  // namespace ktg
