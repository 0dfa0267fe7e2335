// Rows as 8-bit integers: one scale per kActBlock columns, and the sums of bytes that dot products
// with unsigned weights need. A record is [kpad bytes][scales][block sums][sums of 32 columns]; its
// length is an odd number of cache lines, so that equal columns of many rows use all cache sets.
#pragma once

namespace ktg {
namespace KTG_ISA {
namespace {

constexpr long kSumColumns = 32;  // divides every group

KTG_IN long int_blocks(long kpad) { return ceil_div(kpad, kActBlock); }
KTG_IN long odd_lines(long bytes) { return (ceil_div(bytes, 64) | 1) * 64; }
KTG_IN long int_row_bytes(long kpad) {
  return odd_lines(kpad + 8 * int_blocks(kpad) + 4 * (kpad / kSumColumns));
}

struct IntRow {
  int8_t* q;
  float* scale;    // [block]
  int* block_sum;  // [block]
  int* sum;        // [kSumColumns columns]
};
KTG_IN IntRow int_row(char* record, long kpad) {
  float* scale = reinterpret_cast<float*>(record + kpad);
  int* block_sum = reinterpret_cast<int*>(scale + int_blocks(kpad));
  return {reinterpret_cast<int8_t*>(record), scale, block_sum, block_sum + int_blocks(kpad)};
}

// One block of a row, from f32. `n` values are there, the rest up to the block's end is zero. A
// block with inf or NaN gets the scale NaN: its outputs are NaN, as they would be in floating
// point. Magnitudes under 1e-30 read as 0.
static void quantize_block(const float* x, long n, long block, long kpad, IntRow row) {
  F top = zero(), bad = zero();
  for (long k = 0; k < n; k += 16) {
    const F v = load_n(x + k, n - k);
    top = max(top, abs(v)), bad = add(bad, sub(v, v));
  }
  float lanes[16], most = 0.0f;
  store(lanes, top);
  for (float v : lanes) most = v > most ? v : most;
  const bool finite = sum(bad) == 0.0f, some = finite && most > 1e-30f;
  row.scale[block] = finite ? (some ? most / 127.0f : 0.0f) : __builtin_nanf("");
  const F inverse = set1(some ? 127.0f / most : 0.0f);
  const long first = block * kActBlock, width = lmin(kActBlock, kpad - first);
  int total = 0;
  for (long k = 0; k < width; k += kSumColumns) {
    F part = zero();
    for (long j = k; j < k + kSumColumns; j += 16) {
      const F v = some && j < n ? load_n(x + j, n - j) : zero();
      const F q = round(mul(v, inverse));
      part = add(part, q);
      store_bytes(row.q + first + j, to_int(q));
    }
    const int s = int(sum(part));  // integral and far below 2^24: exact
    row.sum[(first + k) / kSumColumns] = s, total += s;
  }
  row.block_sum[block] = total;
}

}  // namespace
}  // namespace KTG_ISA
}  // namespace ktg
