// Limit of AVX-512 VNNI: vpdpbusd, 4 int8 products added into an int32.
#include "cpu_limits.h"

#include <immintrin.h>

namespace ktg {
namespace avx512_vnni_limits {

double int8(long rounds) {
  constexpr int kChains = 16;
  __m512i acc[kChains] = {};
  __m512i a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(-2);
#pragma GCC unroll 16
  for (int j = 0; j < kChains; ++j) __asm__ volatile("" : "+v"(acc[j]));  // none known to be equal
  for (long i = 0; i < rounds; ++i) {
    __asm__ volatile("" : "+v"(a), "+v"(b));
#pragma GCC unroll 16
    for (int j = 0; j < kChains; ++j)
      __asm__("vpdpbusd %2, %1, %0" : "+v"(acc[j]) : "v"(a), "v"(b));
  }
#pragma GCC unroll 16
  for (int j = 0; j < kChains; ++j) __asm__ volatile("" ::"v"(acc[j]));
  return double(rounds) * kChains * 64 * 2;
}

}  // namespace avx512_vnni_limits
}  // namespace ktg
