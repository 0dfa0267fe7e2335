// 16 f32 lanes in one zmm. Same operations in the same order as vec_avx2.h, so both give equal
// bits.
#pragma once
#include <immintrin.h>
#include <cstdint>

#define KTG_IN static inline __attribute__((always_inline))

namespace ktg {
namespace KTG_ISA {
namespace {

using u16 = uint16_t;
using F = __m512;
using I = __m512i;
using Mask = __mmask16;

// Register blocking: accumulators MR x NR of the f32 kernel; tiles at once when weights are
// unpacked in registers.
constexpr int kMR = 6, kNR = 4;
constexpr int direct_tiles(int /*rows*/) { return 4; }

KTG_IN F zero() { return _mm512_setzero_ps(); }
KTG_IN F set1(float x) { return _mm512_set1_ps(x); }
KTG_IN F load(const float* p) { return _mm512_loadu_ps(p); }
KTG_IN void store(float* p, F v) { _mm512_storeu_ps(p, v); }
KTG_IN __mmask16 first_n(long n) { return n >= 16 ? 0xFFFF : __mmask16((1u << n) - 1); }
KTG_IN F load_n(const float* p, long n) { return _mm512_maskz_loadu_ps(first_n(n), p); }
KTG_IN void store_n(float* p, F v, long n) { _mm512_mask_storeu_ps(p, first_n(n), v); }
KTG_IN F add(F a, F b) { return _mm512_add_ps(a, b); }
KTG_IN F sub(F a, F b) { return _mm512_sub_ps(a, b); }
KTG_IN F mul(F a, F b) { return _mm512_mul_ps(a, b); }
KTG_IN F div(F a, F b) { return _mm512_div_ps(a, b); }
KTG_IN F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
// max and min return the second operand when one is NaN: put the value there to let NaN through.
KTG_IN F max(F a, F b) { return _mm512_max_ps(a, b); }
KTG_IN F min(F a, F b) { return _mm512_min_ps(a, b); }
KTG_IN F abs(F a) {
  return _mm512_castsi512_ps(
      _mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x7FFFFFFF)));
}
KTG_IN F round(F a) {
  return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
KTG_IN Mask less(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
KTG_IN Mask equal(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
KTG_IN Mask both(Mask a, Mask b) { return Mask(a & b); }
KTG_IN F select(Mask m, F yes, F no) { return _mm512_mask_blend_ps(m, no, yes); }
// a * 2^n for integral n in the range of the exponent
KTG_IN F scale2(F a, F n) {
  return _mm512_castsi512_ps(
      _mm512_add_epi32(_mm512_castps_si512(a), _mm512_slli_epi32(_mm512_cvtps_epi32(n), 23)));
}

KTG_IN F load_bf16(const u16* p) {
  const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}
// Round to nearest even by integers: vcvtneps2bf16 would flush denormals.
KTG_IN I bf16_bits(F v) {
  const I u = _mm512_castps_si512(v);
  const I odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const I rounded =
      _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7FFF)), odd), 16);
  const Mask nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  const I quiet = _mm512_or_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(0x40));
  return _mm512_mask_blend_epi32(nan, rounded, quiet);
}
KTG_IN F bf16_round(F v) { return _mm512_castsi512_ps(_mm512_slli_epi32(bf16_bits(v), 16)); }
KTG_IN void store_bf16(u16* p, F v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(bf16_bits(v)));
}

// The 64-byte block of a packed format, and column K of it as f32.
KTG_IN I load_block(const char* p) { return _mm512_loadu_si512(p); }
template <int K>
KTG_IN F bf16_column(I w) {
  return _mm512_castsi512_ps(K == 0 ? _mm512_slli_epi32(w, 16)
                                    : _mm512_and_si512(w, _mm512_set1_epi32(0xFFFF0000)));
}
template <int K>
KTG_IN F int8_column(I w) {
  const I up = K == 3 ? w : _mm512_slli_epi32(w, K == 3 ? 0 : 24 - 8 * K);
  return _mm512_cvtepi32_ps(_mm512_srai_epi32(up, 24));
}
// vpermps looks only at the low four bits of each index, so a shift and a lookup decode a nibble.
template <int K>
KTG_IN F int4_column(I w) {
  constexpr int nibble = K < 4 ? 2 * K : 2 * (K - 4) + 1;
  const F table = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  return _mm512_permutexvar_ps(nibble ? _mm512_srli_epi32(w, 4 * nibble) : w, table);
}

template <int K>
KTG_IN F f16_column(I w) {
  return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(K ? _mm512_srli_epi32(w, 16) : w));
}
KTG_IN F load_f16(const u16* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
// Twice the value of an e2m1 code (1 bit sign, 2 exponent, 1 mantissa).
template <int K>
KTG_IN F mxfp4_column(I w) {
  constexpr int nibble = K < 4 ? 2 * K : 2 * (K - 4) + 1;
  const F table = _mm512_setr_ps(0, 1, 2, 3, 4, 6, 8, 12, -0.0f, -1, -2, -3, -4, -6, -8, -12);
  return _mm512_permutexvar_ps(nibble ? _mm512_srli_epi32(w, 4 * nibble) : w, table);
}
// e4m3: its exponent and mantissa read as those of f32, whose bias is 120 more. The few denormals
// cost the product an assist.
template <int K>
KTG_IN F fp8_column(I w) {
  const I top = K == 3 ? w : _mm512_slli_epi32(w, 24 - 8 * K);
  const I bits = _mm512_and_si512(_mm512_srai_epi32(top, 4), _mm512_set1_epi32(int(0x87F00000)));
  return _mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(0x1p120f));
}

#ifdef KTG_BF16_DOTS
// sums + the two products of each lane's bf16 values with the pair x; denormals count as 0.
KTG_IN F dot_bf16(F sums, I w, int x) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sums) : "v"(w), "v"(_mm512_set1_epi32(x)));
  return sums;
}
#endif

// For packing: integers from integral f32, and putting fields of a block together.
KTG_IN I to_int(F v) { return _mm512_cvtps_epi32(v); }
KTG_IN I bits_or(I a, I b) { return _mm512_or_si512(a, b); }
KTG_IN I bits_and(I a, int mask) { return _mm512_and_si512(a, _mm512_set1_epi32(mask)); }
KTG_IN I shift_left(I a, int n) { return _mm512_sll_epi32(a, _mm_cvtsi32_si128(n)); }
KTG_IN void store_block(char* p, I v) { _mm512_storeu_si512(p, v); }

KTG_IN I bits_of(F v) { return _mm512_castps_si512(v); }
KTG_IN F float_of(I v) { return _mm512_castsi512_ps(v); }
// Round to nearest even, in the low half of each lane; and 16 of them side by side.
KTG_IN __m256i to_f16(F v) { return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }
KTG_IN I f16_bits(F v) { return _mm512_cvtepu16_epi32(to_f16(v)); }
KTG_IN void store_f16(u16* p, F v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_f16(v));
}

// Integers: dot products of 4 neighbouring bytes, per 32-bit lane.
constexpr int kIntRows = 6, kIntTiles = 4;  // accumulators of the integer kernels
KTG_IN I iset1(int v) { return _mm512_set1_epi32(v); }
KTG_IN I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
KTG_IN I isub(I a, I b) { return _mm512_sub_epi32(a, b); }
KTG_IN I imul(I a, I b) { return _mm512_mullo_epi32(a, b); }
KTG_IN I imax(I a, I b) { return _mm512_max_epi32(a, b); }
KTG_IN F to_float(I v) { return _mm512_cvtepi32_ps(v); }
KTG_IN I load_ints(const int* p) { return _mm512_loadu_si512(p); }
KTG_IN I load_bytes(const uint8_t* p) {  // 16 unsigned bytes as integers
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
KTG_IN void store_bytes(int8_t* p, I v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(v));
}
KTG_IN I four_bytes(const int8_t* p) {  // the same 4 bytes in every lane
  int v;
  __builtin_memcpy(&v, p, 4);
  return _mm512_set1_epi32(v);
}
KTG_IN I low_nibbles(I w) { return _mm512_and_si512(w, _mm512_set1_epi8(15)); }
KTG_IN I high_nibbles(I w) {
  return _mm512_and_si512(_mm512_srli_epi16(w, 4), _mm512_set1_epi8(15));
}
// Entry `index` (bytes 0..15) of a table of 16 bytes.
KTG_IN I lookup_bytes(__m128i table, I index) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), index);
}
KTG_IN I isub_bytes(I a, I b) { return _mm512_sub_epi8(a, b); }
// Every byte of a lane times that lane's factor (0..15), less the lane's offset. Two nibbles side
// by side in 16 bits times at most 15 stay below 256 each, so one 16-bit product does both.
KTG_IN I scale_nibbles(I u, I factor, I offset) {
  return _mm512_sub_epi8(_mm512_mullo_epi16(u, factor), offset);
}
template <int N>
KTG_IN I shift_right(I v) {
  return _mm512_srli_epi32(v, N);
}
// One byte per lane, repeated in all 4 bytes (or both halves of 16 bits).
KTG_IN I repeat_byte(I v) { return _mm512_mullo_epi32(v, _mm512_set1_epi32(0x01010101)); }
KTG_IN I repeat_half(I v) { return _mm512_or_si512(v, _mm512_slli_epi32(v, 16)); }
KTG_IN I sub_bytes(I a, int v) { return _mm512_sub_epi8(a, _mm512_set1_epi8(char(v))); }

// GGUF blocks: f16 in the low half of each lane, shifts by a vector's counts, 16-bit fields.
KTG_IN F half_to_float(I v) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(v)); }
KTG_IN I shift_right_by(I v, I n) { return _mm512_srlv_epi32(v, n); }
KTG_IN I sign_extend_byte(I v) { return _mm512_srai_epi32(_mm512_slli_epi32(v, 24), 24); }
KTG_IN I mul16(I a, I b) { return _mm512_mullo_epi16(a, b); }
template <int N>
KTG_IN I shift_right16(I v) {  // with the sign
  return _mm512_srai_epi16(v, N);
}
template <int N>
KTG_IN I shift_left16(I v) {
  return _mm512_slli_epi16(v, N);
}
KTG_IN I lookup_bytes(const int8_t* table, I v) {  // every byte 0..15
  const __m128i t = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(t), v);
}
KTG_IN I dot_pairs(I acc, I a, I b) {  // two products of 16 bits in a lane
#ifdef __AVX512VNNI__
  asm("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
  return acc;
#else
  return iadd(acc, _mm512_madd_epi16(a, b));
#endif
}

#ifdef __AVX512VNNI__
// vpdpbusd multiplies unsigned by signed: signed weights go in as w + 128, and a dot starts at
// -128 times the sum of the row's bytes.
using Signed = I;
KTG_IN Signed as_signed(I w) { return _mm512_xor_si512(w, _mm512_set1_epi8(char(0x80))); }
KTG_IN I dot_start(int row_sum) { return iset1(-128 * row_sum); }
// Inline assembly: gcc 12 copies the sums of the intrinsic around, through memory in large blocks.
KTG_IN I dot_nibbles(I acc, I u, I x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(u), "v"(x));
  return acc;
}
KTG_IN I dot_signed(I acc, Signed w, I x) { return dot_nibbles(acc, w, x); }
#else
// |w| times x with w's sign: pairs stay below 2^15 (bytes of x are at most 127 in magnitude).
struct Signed {
  I magnitude;
  __mmask64 negative;
};
KTG_IN Signed as_signed(I w) { return {_mm512_abs_epi8(w), _mm512_movepi8_mask(w)}; }
KTG_IN I dot_start(int /*row_sum*/) { return _mm512_setzero_si512(); }
KTG_IN I dot_nibbles(I acc, I u, I x) {
  return iadd(acc, _mm512_madd_epi16(_mm512_maddubs_epi16(u, x), _mm512_set1_epi16(1)));
}
KTG_IN I dot_signed(I acc, Signed w, I x) {
  return dot_nibbles(acc, w.magnitude,
                     _mm512_mask_sub_epi8(x, w.negative, _mm512_setzero_si512(), x));
}
#endif

KTG_IN float sum(F v) {
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}

}  // namespace
}  // namespace KTG_ISA
}  // namespace ktg
