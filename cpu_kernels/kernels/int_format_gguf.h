// GGUF blocks in tiles (docs/layouts.md): a record is 64-byte lines, line i holding the 32-bit word
// i of 16 rows' blocks. A K-quant Q tells, of a record of 256 columns,
//   kLines, kScaleWord   its length, and the line whose low halves are the f16 scales
//   kSub, factor(i)      columns of a sub-block, and the integer sub-scales of the i-th
//   quants(j, w)         the bytes of columns 32 j + 4 w and up to 3 on; signed or not: its base
//   class start(x, k)          with what the integer sum of a sub-block starts kMinima, minimum(j)
//   whether 32 columns have a minimum, in the high halves of line 0 kShift, split        bytes
//   times sub-scales as high * 2^kShift + low, both signed bytes
#pragma once

namespace ktg {
namespace KTG_ISA {
namespace {

KTG_IN I word_of(const char* record, long i) { return load_block(record + i * kBlockBytes); }
KTG_IN I low_halves(I v) { return bits_and(v, 0xFFFF); }

struct UnsignedQuants {
  using Operand = I;
  KTG_IN Operand operand(I q) { return q; }
  KTG_IN I dot(I acc, Operand q, I x) { return dot_nibbles(acc, q, x); }
  KTG_IN I start(const IntRow&, long) { return iset1(0); }
  KTG_IN I even(I q) { return bits_and(q, 0x00FF00FF); }
  KTG_IN I odd(I q) { return bits_and(shift_right<8>(q), 0x00FF00FF); }
};
struct SignedQuants {
  using Operand = Signed;
  KTG_IN Operand operand(I q) { return as_signed(q); }
  KTG_IN I dot(I acc, Operand q, I x) { return dot_signed(acc, q, x); }
  KTG_IN I start(const IntRow& x, long k) { return dot_start(x.sum[k / kSumColumns]); }
  KTG_IN I even(I q) { return shift_right16<8>(shift_left16<8>(q)); }
  KTG_IN I odd(I q) { return shift_right16<8>(q); }
};

// Products of even and odd bytes with a factor in 16 bits, split at bit 6: within +-4096, so that
// the high part is within +-64 and the low one 0..63.
KTG_IN void split_at_6(I even, I odd, I factor, I* high, I* low) {
  const I pe = mul16(even, factor), po = mul16(odd, factor);
  *high = bits_or(bits_and(shift_right16<6>(pe), 0x00FF00FF),
                  bits_and(shift_left16<2>(po), int(0xFF00FF00u)));
  *low = bits_or(bits_and(pe, 0x003F003F), bits_and(shift_left16<8>(po), 0x3F003F00));
}

// Part i of `parts` of the record after this one; after a tile's last, of the tile that this place
// takes next.
template <class Q>
KTG_IN void prefetch_next(const Tiles& t, long n, long n_tiles, long k0, long i, long parts) {
  long at = (k0 / kActBlock + 1) * Q::kLines * kBlockBytes;
  if (at >= t.w->tile_bytes) at += (n_tiles - 1) * t.w->tile_bytes;
  const char* record = tile_data(t, n) + at;
  for (long l = Q::kLines * i / parts; l < Q::kLines * (i + 1) / parts; ++l)
    _mm_prefetch(record + l * kBlockBytes, _MM_HINT_T0);
}

template <class Q>
struct KQuant {
  static constexpr int kScaling = Q::kMinima ? SPLIT_MINIMA : SPLIT_SCALED, kShift = Q::kShift;
  static constexpr bool kRowScale = false, kPacked = false;
  static constexpr long kSubs = kActBlock / Q::kSub, kWords = Q::kSub / 4;
  KTG_IN long columns(const WeightArg&) { return kActBlock; }
  KTG_IN F row_scale(const Tiles&, long) { return zero(); }
  KTG_IN const char* record_of(const Tiles& t, long n, long k0) {
    return tile_data(t, n) + k0 / kActBlock * Q::kLines * kBlockBytes;
  }
  KTG_IN F block_scale(const Tiles& t, long n, long k0) {
    return half_to_float(low_halves(word_of(record_of(t, n, k0), Q::kScaleWord)));
  }
  KTG_IN F block_offset(const Tiles& t, long n, long k0) {
    if constexpr (!Q::kMinima) return zero();
    return half_to_float(shift_right<16>(word_of(record_of(t, n, k0), 0)));
  }
  KTG_IN void minima(const Tiles& t, long n, long k0, I* pairs) {
    const char* record = record_of(t, n, k0);
    for (int p = 0; p < kMinimumPairs; ++p)
      pairs[p] = bits_or(Q::minimum(record, 2 * p), shift_left(Q::minimum(record, 2 * p + 1), 16));
  }

  template <int M, int N>
  KTG_IN void dot(const Tiles& t, long n0, const IntRow (&x)[M], long k0, long, I (&total)[M][N]) {
    const char* record[N];
    for (int n = 0; n < N; ++n) record[n] = record_of(t, n0 + n, k0);
    for (int m = 0; m < M; ++m)
      for (int n = 0; n < N; ++n) total[m][n] = iset1(0);
    for (long i = 0; i < kSubs; ++i) {
      for (int n = 0; n < N; ++n) prefetch_next<Q>(t, n0 + n, N, k0, i, kSubs);
      I acc[M][N];
      dot_sub<M, N>(record, x, k0, i, acc);
      for (int n = 0; n < N; ++n) {
        const I factor = Q::factor(record[n], i);
        for (int m = 0; m < M; ++m) total[m][n] = iadd(total[m][n], imul(acc[m][n], factor));
      }
    }
  }
  template <int M, int N>
  KTG_IN void dot_sub(const char* const (&record)[N], const IntRow (&x)[M], long k0, long i,
                      I (&acc)[M][N]) {
    for (int m = 0; m < M; ++m) {
      const I start = Q::start(x[m], k0 + i * Q::kSub);
      for (int n = 0; n < N; ++n) acc[m][n] = start;
    }
    for (long w = i * kWords; w < (i + 1) * kWords; ++w) {
      typename Q::Operand q[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) q[n] = Q::operand(Q::quants(record[n], w / 8, w % 8));
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const I xv = four_bytes(x[m].q + k0 + 4 * w);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) acc[m][n] = Q::dot(acc[m][n], q[n], xv);
      }
    }
  }
  // The high part, then the low one.
  static void unpack(const Tiles& t, long n, long k0, long k1, char* panel) {
    const char* record = record_of(t, n, k0);
    const long low_part = (k1 - k0) * 16;
    for (long i = 0; i < kSubs; ++i) {
      prefetch_next<Q>(t, n, t.count, k0, i, kSubs);
      const I factor = repeat_half(low_halves(Q::factor(record, i)));
      for (long w = i * kWords; w < (i + 1) * kWords; ++w, panel += 64) {
        I high, low;
        Q::split(Q::quants(record, w / 8, w % 8), factor, &high, &low);
        store_block(panel, high), store_block(panel + low_part, low);
      }
    }
  }
};

}  // namespace
}  // namespace KTG_ISA
}  // namespace ktg
