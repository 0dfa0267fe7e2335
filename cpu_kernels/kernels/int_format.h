// An integer format is a struct of static members that the kernels of int_weights.h are given; one
// file each, int_format_<name>.h. It says
//   columns(w)      how many columns it sums in integers before a float scale is due (a block)
//   dot<M, N>       the integer sums of one block, from packed bytes
//   unpack          the same block as signed bytes, 64 per four columns: a panel (kPacked: the
//   packed
//                   bytes are one)
//   kScaling, block_scale, block_offset   see Scaling; with minima also minima(t, n, k0, pairs)
//   kRowScale, row_scale                  the float scale of a row, applied at the end
// The integers are exact, and floats are added block by block: every path gives the same bits.
#pragma once

namespace ktg {
namespace KTG_ISA {
namespace {

// How the integer sum of a block joins C, s being the scale of the row of x there:
enum Scaling : int {
  ROW_SCALED,    // C += sum * s; the row's scale comes at the end
  BLOCK_SCALED,  // C += sum * scale * s
  BLOCK_OFFSET,  // C += sum * scale * s + offset * (s * sum of x): a value is q * scale + offset
  // K-quants. Integers times sub-scales exceed a byte: a panel is two, sum = high * 2^shift + low
  // (kShift). With minima m_j of 32 columns: C += (sum * scale - offset * sum of m_j x_j) * s.
  SPLIT_SCALED,
  SPLIT_MINIMA,
};
constexpr bool is_split(int scaling) { return scaling >= SPLIT_SCALED; }
constexpr bool has_offset(int scaling) {
  return scaling == BLOCK_OFFSET || scaling == SPLIT_MINIMA;
}
constexpr int kMinimumPairs = 4;  // 8 minima of a block, two of 16 bits in a lane

// The offset that add_block takes, given a row's sums in pairs (sum_pairs).
template <int SCALING>
KTG_IN F offset_of(F offset, const I* minima, const int* pairs) {
  if constexpr (SCALING != SPLIT_MINIMA) return offset;
  I sum = iset1(0);
  for (int p = 0; p < kMinimumPairs; ++p) sum = dot_pairs(sum, minima[p], iset1(pairs[p]));
  return mul(offset, to_float(sum));
}
// A row's sums of 32 columns, at most 127 * 32 in magnitude, two of 16 bits in an integer.
KTG_IN void sum_pairs(const IntRow& x, long k0, int* pairs) {
  const int* s = x.sum + k0 / kSumColumns;
  for (int p = 0; p < kMinimumPairs; ++p)
    pairs[p] = int(unsigned(s[2 * p] & 0xFFFF) | unsigned(s[2 * p + 1]) << 16);
}

KTG_IN int group_sum(const IntRow& x, long k0, long k1) {
  int s = 0;
  for (long i = k0 / kSumColumns; i < k1 / kSumColumns; ++i) {
    s += x.sum[i];
    asm("" : "+r"(s));  // at most 8 of them: a vector loop's head and tail would cost more
  }
  return s;
}
// The same; one number where [k0, k1) is a whole block.
KTG_IN int span_sum(const IntRow& x, long k0, long k1) {
  const bool whole = k0 % kActBlock == 0 && k1 - k0 == kActBlock;
  return whole ? x.block_sum[k0 / kActBlock] : group_sum(x, k0, k1);
}

// Prefetch distance in each tile's stream of bytes; near its end, where the stream goes on.
KTG_IN const char* ahead_of(const Tiles& t, long n_tiles, const char* data, long offset) {
  const long at = offset + kPrefetch;
  return data + (at < t.w->tile_bytes ? at : at + (n_tiles - 1) * t.w->tile_bytes);
}

// Nibbles as the unsigned bytes they stand for.
struct PlainNibbles {
  KTG_IN I bytes(I nibbles) { return nibbles; }
};

// Adds sums of nibbles times bytes over [k0, k1).
template <int M, int N, class Nibbles = PlainNibbles>
KTG_IN void dot_group(const Tiles& t, long n0, const IntRow (&x)[M], long k0, long k1,
                      I (&acc)[M][N]) {
  const char* data[N];
  for (int n = 0; n < N; ++n) data[n] = tile_data(t, n0 + n);
  for (long k = k0; k < k1; k += 8) {
    I low[N], high[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const I w = load_block(data[n] + k * 8);
      _mm_prefetch(ahead_of(t, N, data[n], k * 8), _MM_HINT_T0);
      low[n] = Nibbles::bytes(low_nibbles(w)), high[n] = Nibbles::bytes(high_nibbles(w));
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const I x_low = four_bytes(x[m].q + k), x_high = four_bytes(x[m].q + k + 4);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n)
        acc[m][n] = dot_nibbles(dot_nibbles(acc[m][n], low[n], x_low), high[n], x_high);
    }
  }
}

// Adds sums of signed bytes times bytes over [k0, k1) to what dot_start gave.
template <int M, int N>
KTG_IN void dot_bytes(const Tiles& t, long n0, const IntRow (&x)[M], long k0, long k1,
                      I (&total)[M][N]) {
  const char* data[N];
  for (int n = 0; n < N; ++n) data[n] = tile_data(t, n0 + n);
  for (long k = k0; k < k1; k += 4) {
    Signed w[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      w[n] = as_signed(load_block(data[n] + k * 16));
      _mm_prefetch(ahead_of(t, N, data[n], k * 16), _MM_HINT_T0);
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const I xv = four_bytes(x[m].q + k);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) total[m][n] = dot_signed(total[m][n], w[n], xv);
    }
  }
}

}  // namespace
}  // namespace KTG_ISA
}  // namespace ktg
