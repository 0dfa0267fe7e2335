// The attention core of cpu.sdpa, cpu.mla_attend and cpu.mla_attend_expanded.
// Keys go in fixed chunks of 64 positions. For up to 64 queries that share keys (heads of one kv
// head x tokens), a chunk gives a partial (max, sum, output); partials are merged in position
// order. Chunk borders and merge order depend on positions only, so bits do not depend on threads,
// batch or how queries are blocked. Scores lie as [key][query]: softmax is then vertical, and both
// products are gemm.h (docs there).
#pragma once

namespace ktg {
namespace KTG_ISA {
namespace {

constexpr long kChunk = 64;
constexpr long kQueries = 64;
constexpr float kLowest = -1e30f;  // stands for -inf: differences stay finite

// Keys and values of a chunk as f32 rows; `valid` rows, the others are zero.
struct ChunkRows {
  const float *k, *v;
  long k_pitch, v_pitch;
};

struct Queries {
  long count;  // <= kQueries
  long lanes;  // count rounded up to 16
  long dk, dv, dv_pad;
  float scale, softcap;
  const float* qt;  // [dk][lanes]
};

struct Running {
  float *max, *sum;  // [lanes]
  float* out;        // [count][dv_pad]
};

KTG_IN size_t running_floats(long dv_pad) { return 2 * kQueries + kQueries * dv_pad; }
KTG_IN Running running_at(float* p) { return {p, p + kQueries, p + 2 * kQueries}; }

KTG_IN void reset(const Queries& q, const Running& r) {
  for (long i = 0; i < q.lanes; ++i) r.max[i] = kLowest, r.sum[i] = 0.0f;
  for (long i = 0; i < q.count * q.dv_pad; ++i) r.out[i] = 0.0f;
}

// Softmax weights of one column of 16 queries in place; lo <= key < hi is what each may see.
static void softmax_lanes(const Queries& q, float* s, long keys, F lo, F hi, float* max_out,
                          float* sum_out) {
  F top = set1(kLowest);
  for (long j = 0; j < keys; ++j) {
    F v = mul(load(s + j * q.lanes), set1(q.scale));
    if (q.softcap > 0) v = mul(set1(q.softcap), tanh(div(v, set1(q.softcap))));
    const F at = set1(float(j));
    const Mask seen = both(less(at, hi), less(lo, add(at, set1(0.5f))));
    v = select(seen, v, set1(kLowest));
    top = max(top, v);
    store(s + j * q.lanes, v);
  }
  F total = zero();
  for (long j = 0; j < keys; ++j) {
    const F v = load(s + j * q.lanes);
    // A masked key is kLowest exactly; real scores are far above.
    const F p = select(equal(v, set1(kLowest)), zero(), exp(sub(v, top)));
    total = add(total, p);
    store(s + j * q.lanes, p);
  }
  store(max_out, top), store(sum_out, total);
}

// Softmax weights of one chunk in `scores` [kChunk][lanes], and its maxima and sums. `lo`, `hi` are
// relative to it.
static void chunk_weights(const Queries& q, const ChunkRows& rows, long keys, const float* lo,
                          const float* hi, float* scores, const Running& part) {
  const float *x[kQueries], *xk[kQueries];
  for (long j = 0; j < keys; ++j) x[j] = rows.k + j * rows.k_pitch;
  for (long k = 0; k < q.dk; k += 128) {  // a slice of the queries stays in the first-level cache
    for (long j = 0; j < keys; ++j) xk[j] = x[j] + k;
    const GemmArgs g{xk,      1,       q.qt + k * q.lanes,
                     16,      q.lanes, lmin(128, q.dk - k),
                     scores,  q.lanes, nullptr,
                     nullptr, nullptr};
    k == 0 ? gemm<FRESH>(g, keys, q.lanes / 16) : gemm<RESUME>(g, keys, q.lanes / 16);
  }
  for (long l = 0; l < q.lanes; l += 16)
    softmax_lanes(q, scores + l, keys, load(lo + l), load(hi + l), part.max + l, part.sum + l);
}

// Output of a chunk: alone (keep null), or merged into `out`.
static void chunk_values(const Queries& q, const ChunkRows& rows, long keys, const float* scores,
                         float* out, const float* keep, const float* take) {
  const float* x[kQueries];
  for (long m = 0; m < q.count; ++m) x[m] = scores + m;
  const GemmArgs g{x, q.lanes, rows.v, 16, rows.v_pitch, keys, out, q.dv_pad, nullptr, keep, take};
  keep ? gemm<MERGED>(g, q.count, q.dv_pad / 16) : gemm<FRESH>(g, q.count, q.dv_pad / 16);
}

// New maxima and sums, and what the running output and the partial are multiplied with. A chunk
// that a query may not see at all (sum 0) changes nothing.
static void merge_sums(const Queries& q, const Running& run, const Running& part, float* keep,
                       float* take) {
  for (long l = 0; l < q.lanes; l += 16) {
    const F m0 = load(run.max + l), m1 = load(part.max + l), top = max(m0, m1);
    const F fa = exp(sub(m0, top)), fb = exp(sub(m1, top));
    store(keep + l, fa), store(take + l, fb);
    store(run.sum + l, add(mul(load(run.sum + l), fa), mul(load(part.sum + l), fb)));
    store(run.max + l, top);
  }
}

// A chunk's partial folded into the running result; `merge` below does the same with a stored
// partial.
static void merge_chunk(const Queries& q, const ChunkRows& rows, long keys, const float* lo,
                        const float* hi, float* scores, const Running& run, const Running& part) {
  float keep[kQueries], take[kQueries];
  chunk_weights(q, rows, keys, lo, hi, scores, part);
  merge_sums(q, run, part, keep, take);
  chunk_values(q, rows, keys, scores, run.out, keep, take);
}

static void merge(const Queries& q, const Running& run, const Running& part) {
  float keep[kQueries], take[kQueries];
  merge_sums(q, run, part, keep, take);
  for (long m = 0; m < q.count; ++m) {
    const F fa = set1(keep[m]), fb = set1(take[m]);
    float *o = run.out + m * q.dv_pad, *p = part.out + m * q.dv_pad;
    for (long i = 0; i < q.dv_pad; i += 16)
      store(o + i, add(mul(load(o + i), fa), mul(load(p + i), fb)));
  }
}

// Divides by the sum, with the sink as one more logit that has no value. `sinks[m]` per query or
// null.
static void finish(const Queries& q, const Running& run, const float* sinks) {
  for (long m = 0; m < q.count; ++m) {
    float total = run.sum[m], factor = 1.0f;
    if (sinks) {
      const float top = sinks[m] > run.max[m] ? sinks[m] : run.max[m];
      float e[16];
      store(e, exp(sub(set1(run.max[m]), set1(top))));
      factor = e[0];
      store(e, exp(sub(set1(sinks[m]), set1(top))));
      total = total * factor + e[0];
    }
    const F r = set1(total > 0 ? factor / total : 0.0f);  // a token that sees nothing gets 0
    float* o = run.out + m * q.dv_pad;
    for (long i = 0; i < q.dv_pad; i += 16) store(o + i, mul(load(o + i), r));
  }
}

// Transposes query rows into lanes: qt[k0 + k][m].
KTG_IN void put_query(float* qt, long lanes, long m, long k0, const float* row, long n) {
  for (long k = 0; k < n; ++k) qt[(k0 + k) * lanes + m] = row[k];
}

// What positions a token at `pos` may see, relative to chunk start j0.
KTG_IN void visible(long pos, long window, long j0, float* lo, float* hi) {
  *hi = float(lmax(0, lmin(pos + 1 - j0, kChunk)));
  *lo = window > 0 ? float(lmax(0, lmin(pos - window + 1 - j0, kChunk))) : 0.0f;
}

}  // namespace
}  // namespace KTG_ISA
}  // namespace ktg
