// Limits of AVX-512: memory reads and f32 multiply-adds.
#include "cpu_limits.h"

#include <immintrin.h>

namespace ktg {
namespace avx512_limits {

namespace {
constexpr int kStreams = 4;      // places read side by side: more of them in flight than one gives
constexpr size_t kAhead = 1024;  // bytes
}  // namespace

long read(const char* data, size_t bytes) {
  __m512i sum[4] = {};
  const size_t part = bytes / kStreams;
  for (size_t i = 0; i < part; i += 256)
    for (int stream = 0; stream < kStreams; ++stream) {
      const char* at = data + stream * part + i;
#pragma GCC unroll 4
      for (int line = 0; line < 4; ++line) {
        _mm_prefetch(at + kAhead + 64 * line, _MM_HINT_T0);
        sum[line] = _mm512_xor_si512(sum[line], _mm512_load_si512(at + 64 * line));
      }
    }
  const __m512i all =
      _mm512_xor_si512(_mm512_xor_si512(sum[0], sum[1]), _mm512_xor_si512(sum[2], sum[3]));
  return _mm512_reduce_add_epi64(all);
}

double f32(long rounds) {
  constexpr int kChains = 16;
  __m512 acc[kChains] = {};
  __m512 a = _mm512_set1_ps(0.5f), b = _mm512_set1_ps(1.0f);
#pragma GCC unroll 16
  for (int j = 0; j < kChains; ++j) __asm__ volatile("" : "+v"(acc[j]));  // none known to be equal
  for (long i = 0; i < rounds; ++i) {
    __asm__ volatile("" : "+v"(a), "+v"(b));
#pragma GCC unroll 16
    for (int j = 0; j < kChains; ++j) acc[j] = _mm512_fmadd_ps(acc[j], a, b);
  }
#pragma GCC unroll 16
  for (int j = 0; j < kChains; ++j) __asm__ volatile("" ::"v"(acc[j]));
  return double(rounds) * kChains * 16 * 2;
}

}  // namespace avx512_limits
}  // namespace ktg
