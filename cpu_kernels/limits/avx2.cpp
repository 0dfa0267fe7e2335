// Limits of AVX2 with FMA: memory reads and f32 multiply-adds.
#include "cpu_limits.h"

#include <immintrin.h>

namespace ktg {
namespace avx2_limits {

namespace {
constexpr int kStreams = 4;      // places read side by side: more of them in flight than one gives
constexpr size_t kAhead = 1024;  // bytes
}  // namespace

long read(const char* data, size_t bytes) {
  __m256i sum[4] = {};
  const size_t part = bytes / kStreams;
  for (size_t i = 0; i < part; i += 256)
    for (int stream = 0; stream < kStreams; ++stream) {
      const char* at = data + stream * part + i;
      for (int line = 0; line < 4; ++line) _mm_prefetch(at + kAhead + 64 * line, _MM_HINT_T0);
#pragma GCC unroll 8
      for (int half = 0; half < 8; ++half) {
        const auto* from = reinterpret_cast<const __m256i*>(at + 32 * half);
        sum[half % 4] = _mm256_xor_si256(sum[half % 4], _mm256_load_si256(from));
      }
    }
  const __m256i all =
      _mm256_xor_si256(_mm256_xor_si256(sum[0], sum[1]), _mm256_xor_si256(sum[2], sum[3]));
  return _mm256_extract_epi64(all, 0) ^ _mm256_extract_epi64(all, 3);
}

double f32(long rounds) {
  constexpr int kChains = 12;  // 2 units x 4 to 5 cycles, and the two operands still fit
  __m256 acc[kChains] = {};
  __m256 a = _mm256_set1_ps(0.5f), b = _mm256_set1_ps(1.0f);
#pragma GCC unroll 12
  for (int j = 0; j < kChains; ++j) __asm__ volatile("" : "+x"(acc[j]));  // none known to be equal
  for (long i = 0; i < rounds; ++i) {
    __asm__ volatile("" : "+x"(a), "+x"(b));
#pragma GCC unroll 12
    for (int j = 0; j < kChains; ++j) acc[j] = _mm256_fmadd_ps(acc[j], a, b);
  }
#pragma GCC unroll 12
  for (int j = 0; j < kChains; ++j) __asm__ volatile("" ::"x"(acc[j]));
  return double(rounds) * kChains * 8 * 2;
}

}  // namespace avx2_limits
}  // namespace ktg
