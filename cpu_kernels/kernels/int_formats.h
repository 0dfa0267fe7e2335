// Integer formats, as the kernels of int_weights.h see them. A format says
//   columns(w)      how many columns it sums in integers before a float scale is due (a block)
//   dot<M, N>       the integer sums of one block, from packed bytes
//   unpack          the same block as signed bytes, 64 per four columns: a panel
//   block_scale     the float scale of a block, where each block has its own
//   row_scale       the float scale of a row, applied at the end
// The integers are exact, and floats are added block by block: every path gives the same bits.
#pragma once

namespace ktg {
namespace KTG_ISA {
namespace {

KTG_IN int group_sum(const IntRow& x, long k0, long k1) {
  int s = 0;
  for (long i = k0 / kSumColumns; i < k1 / kSumColumns; ++i) s += x.sum[i];
  return s;
}

// Prefetch distance in each tile's stream of bytes; near its end, where the stream goes on.
KTG_IN const char* ahead_of(const Tiles& t, long n_tiles, const char* data, long offset) {
  const long at = offset + kPrefetch;
  return data + (at < t.w->tile_bytes ? at : at + (n_tiles - 1) * t.w->tile_bytes);
}

struct Int8 {
  static constexpr bool kBlockScale = false, kRowScale = true, kPacked = true;
  static constexpr int kStep = 4;
  KTG_IN long columns(const WeightArg&) { return kActBlock; }
  KTG_IN F row_scale(const Tiles& t, long n) { return int8_scale(t, n); }
  KTG_IN F block_scale(const Tiles&, long, long) { return zero(); }

  template <int M, int N>
  KTG_IN void dot(const Tiles& t, long n0, const IntRow (&x)[M], long k0, long k1,
                  I (&total)[M][N]) {
    const char* data[N];
    for (int n = 0; n < N; ++n) data[n] = tile_data(t, n0 + n);
    for (int m = 0; m < M; ++m)
      for (int n = 0; n < N; ++n) total[m][n] = dot_start(x[m].block_sum[k0 / kActBlock]);
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
  static void unpack(const Tiles&, long, long, long, char*) {}  // packed bytes are a panel
};

// Sums of nibbles times bytes over [k0, k1), from zero.
template <int M, int N>
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
      low[n] = low_nibbles(w), high[n] = high_nibbles(w);
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

// One float scale per group: a block is a group.
struct Int4 {
  static constexpr bool kBlockScale = true, kRowScale = false, kPacked = false;
  KTG_IN long columns(const WeightArg& w) { return w.group; }
  KTG_IN F row_scale(const Tiles&, long) { return zero(); }
  KTG_IN F block_scale(const Tiles& t, long n, long k0) {
    return int4_scale(t, n, k0 / t.w->group);
  }

  template <int M, int N>
  KTG_IN void dot(const Tiles& t, long n0, const IntRow (&x)[M], long k0, long k1,
                  I (&total)[M][N]) {
    for (int m = 0; m < M; ++m)
      for (int n = 0; n < N; ++n) total[m][n] = iset1(-8 * group_sum(x[m], k0, k1));
    dot_group<M, N>(t, n0, x, k0, k1, total);
  }
  static void unpack(const Tiles& t, long n, long k0, long k1, char* panel) {
    const char* data = tile_data(t, n);
    for (long k = k0; k < k1; k += 8, panel += 128) {
      const I w = load_block(data + k * 8);
      _mm_prefetch(ahead_of(t, t.count, data, k * 8), _MM_HINT_T0);
      store_block(panel, sub_bytes(low_nibbles(w), 8));
      store_block(panel + 64, sub_bytes(high_nibbles(w), 8));
    }
  }
};

// One integer factor per group (bits 0-3; bit 7: the nibbles' offset is 7, not 8) within one float
// scale per row.
struct Int4p {
  static constexpr bool kBlockScale = false, kRowScale = true, kPacked = false;
  KTG_IN long columns(const WeightArg&) { return kActBlock; }
  KTG_IN F block_scale(const Tiles&, long, long) { return zero(); }
  KTG_IN F row_scale(const Tiles& t, long n) {
    return load(reinterpret_cast<const float*>(t.matrix + t.w->row_scale_offset) +
                (t.first + n) * 16);
  }
  // The group's factors, and factor * offset, per row: 8 factor, or 7 factor where bit 7 is set.
  KTG_IN void factors(const Tiles& t, long n, long k0, I* factor, I* offset) {
    const uint8_t* at = reinterpret_cast<const uint8_t*>(t.matrix + t.w->scale_offset) +
                        ((t.first + n) * t.w->groups + k0 / t.w->group) * 16;
    const I code = load_bytes(at);
    *factor = bits_and(code, 15);
    *offset = imul(*factor, isub(iset1(8), shift_right<7>(code)));
  }

  template <int M, int N>
  KTG_IN void dot(const Tiles& t, long n0, const IntRow (&x)[M], long k0, long k1,
                  I (&total)[M][N]) {
    for (int m = 0; m < M; ++m)
      for (int n = 0; n < N; ++n) total[m][n] = iset1(0);
    for (long k = k0; k < k1; k += t.w->group) {
      const long end = lmin(k + t.w->group, k1);
      I acc[M][N];
      for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) acc[m][n] = iset1(0);
      dot_group<M, N>(t, n0, x, k, end, acc);
      for (int n = 0; n < N; ++n) {
        I factor, offset;
        factors(t, n0 + n, k, &factor, &offset);
        for (int m = 0; m < M; ++m) {
          const I shift = imul(offset, iset1(group_sum(x[m], k, end)));
          total[m][n] = iadd(total[m][n], isub(imul(acc[m][n], factor), shift));
        }
      }
    }
  }
  static void unpack(const Tiles& t, long n, long k0, long k1, char* panel) {
    const char* data = tile_data(t, n);
    for (long g = k0; g < k1; g += t.w->group) {
      I factor, offset;
      factors(t, n, g, &factor, &offset);
      factor = repeat_half(factor), offset = repeat_byte(offset);
      for (long k = g; k < lmin(g + t.w->group, k1); k += 8, panel += 128) {
        const I w = load_block(data + k * 8);
        _mm_prefetch(ahead_of(t, t.count, data, k * 8), _MM_HINT_T0);
        store_block(panel, scale_nibbles(low_nibbles(w), factor, offset));
        store_block(panel + 64, scale_nibbles(high_nibbles(w), factor, offset));
      }
    }
  }
};

}  // namespace
}  // namespace KTG_ISA
}  // namespace ktg
