// Limit of AVX512-BF16: vdpbf16ps, 2 bf16 products added into an f32.
#include "cpu_limits.h"

#include <immintrin.h>

namespace ktg {
namespace avx512_bf16_limits {

double bf16(long rounds) {
  constexpr int kChains = 16;
  __m512 acc[kChains] = {};
  __m512i ones = _mm512_set1_epi16(0x3f80);  // 1.0 in bf16
#pragma GCC unroll 16
  for (int j = 0; j < kChains; ++j) __asm__ volatile("" : "+v"(acc[j]));  // none known to be equal
  for (long i = 0; i < rounds; ++i) {
    __asm__ volatile("" : "+v"(ones));
#pragma GCC unroll 16
    for (int j = 0; j < kChains; ++j) __asm__("vdpbf16ps %1, %1, %0" : "+v"(acc[j]) : "v"(ones));
  }
#pragma GCC unroll 16
  for (int j = 0; j < kChains; ++j) __asm__ volatile("" ::"v"(acc[j]));
  return double(rounds) * kChains * 32 * 2;
}

}  // namespace avx512_bf16_limits
}  // namespace ktg
