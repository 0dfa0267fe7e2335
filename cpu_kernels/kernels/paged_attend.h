// cpu.sdpa and cpu.mla_attend: queries against the paged cache.
// A unit is up to 64 queries (tokens of one sequence x heads of one kv head) and a range of chunks.
// When there are few units (decode), the chunks of a unit are divided as well: each leaves its
// partial in shared scratch, and after a barrier the partials are merged in order; otherwise one
// thread merges as it goes. Both give the same bits.
#pragma once

namespace ktg {
namespace KTG_ISA {
namespace {

struct Attention {
  const StateArg* state;
  const BatchArg* batch;
  const TensorArg *q0, *q1, *out;  // a query is q0 and, for latent caches, q1 behind it
  const float* sinks;
  bool latent;  // one part: a row is the key and, in its first dv entries, the value
  long layer, window, heads, kv_heads, per_kv, dk, dv, dv_pad, k_pitch, v_pitch;
  long head_block, token_block, head_blocks;
  float scale, softcap;
};

struct AttendUnit {
  int seq, t0, t1, kv_head, h0, h1;
  int c0, c1;                    // chunks
  long part;                     // first partial of this unit, or -1 when it merges by itself
  int merge_first, merge_count;  // on the first unit of a query block: partials to fold
};

struct AttendLayout {
  size_t qt, rows_k, rows_v, scores, partial, running, bounds, total;
};

static Attention attention_of(const Ctx* ctx, const Instr& in, bool latent) {
  Attention a{};
  a.latent = latent;
  a.q0 = &tensor(in, 0);
  a.q1 = latent ? &tensor(in, 1) : nullptr;
  a.state = &in.op[latent ? 2 : 1].s;
  a.out = &tensor(in, 4);
  a.sinks = !latent && has(in, 3) ? f32_row(tensor(in, 3), 0) : nullptr;
  a.batch = ctx ? ctx->batch : nullptr;
  a.layer = long(in.attr[A_LAYER]);
  a.window = latent ? 0 : long(in.attr[A_WINDOW]);
  a.softcap = latent ? 0.0f : float(in.attr[A_SOFTCAP]);
  a.scale = float(in.attr[A_SCALE]);
  a.heads = a.q0->dim[1];
  a.kv_heads = latent ? 1 : long(in.attr[A_KV_HEADS]);
  a.per_kv = a.heads / a.kv_heads;
  a.dk = a.q0->dim[2] + (latent ? a.q1->dim[2] : 0);
  a.dv = a.out->dim[2];
  a.dv_pad = round_up(a.dv, 16);
  a.k_pitch = round_up(a.dk, 16) + 16;  // value lanes may read past dv
  a.v_pitch = latent ? a.k_pitch : a.dv_pad;
  a.head_block = lmin(a.per_kv, kQueries);
  a.head_blocks = ceil_div(a.per_kv, a.head_block);
  a.token_block = lmax(1, kQueries / a.head_block);
  return a;
}

static AttendLayout attend_layout(const Attention& a) {
  AttendLayout l{};
  size_t at = 0;
  const auto take = [&at](size_t floats) {
    const size_t here = at;
    at += align64(floats * 4);
    return here;
  };
  l.qt = take(kQueries * a.dk);
  l.rows_k = take(kChunk * a.k_pitch);
  l.rows_v = take(a.latent ? 0 : kChunk * a.v_pitch);
  l.scores = take(kChunk * kQueries);
  l.partial = take(running_floats(a.dv_pad));
  l.running = take(running_floats(a.dv_pad));
  l.bounds = take(3 * kQueries);
  l.total = at + align64(lmax(a.dk, a.dv) * 4 + 64);
  return l;
}

KTG_IN long max_query_blocks(const Attention& a, const Sizes& s) {
  return (s.tokens / a.token_block + s.sequences) * a.kv_heads * a.head_blocks;
}
KTG_IN bool splits_keys(const Attention& a, const Sizes& s) {
  return s.threads > 1 && max_query_blocks(a, s) < 4 * s.threads && s.max_kv > kChunk;
}
// A split query block has at most 4 units per thread.
KTG_IN long max_units(const Attention& a, const Sizes& s) {
  return max_query_blocks(a, s) * (splits_keys(a, s) ? 4 * s.threads : 1);
}

static size_t attend_shared(const Instr& in, const Sizes& s, bool latent) {
  const Attention a = attention_of(nullptr, in, latent);
  size_t bytes = 64 + align64(max_units(a, s) * sizeof(AttendUnit));
  if (splits_keys(a, s))
    bytes += max_query_blocks(a, s) * ceil_div(s.max_kv, kChunk) * running_floats(a.dv_pad) * 4;
  return bytes;
}

// Thread 0 writes the list of units; returns how many.
static long list_units(const Attention& a, const Sizes& s, AttendUnit* units) {
  const BatchArg& b = *a.batch;
  const bool split = splits_keys(a, s);
  const long pieces = split ? ceil_div(4 * s.threads, max_query_blocks(a, s)) : 1;
  long n = 0, part = 0;
  for (long seq = 0; seq < b.sequences; ++seq)
    for (long t0 = b.seq_start[seq]; t0 < b.seq_start[seq + 1]; t0 += a.token_block) {
      const long t1 = lmin(t0 + a.token_block, b.seq_start[seq + 1]);
      long first = b.tok_pos[t0], last = b.tok_pos[t0];
      for (long t = t0; t < t1; ++t)
        first = lmin(first, b.tok_pos[t]), last = lmax(last, b.tok_pos[t]);
      const long c0 = a.window > 0 ? lmax(0, first - a.window + 1) / kChunk : 0,
                 c1 = last / kChunk + 1;
      const long step = ceil_div(c1 - c0, pieces);
      for (long g = 0; g < a.kv_heads; ++g)
        for (long h = 0; h < a.per_kv; h += a.head_block) {
          const long h0 = g * a.per_kv + h, h1 = h0 + lmin(a.head_block, a.per_kv - h);
          const long base = part;
          for (long c = c0; c < c1; c += step) {
            const int count = split && c == c0 ? int(c1 - c0) : 0;
            units[n++] = {int(seq),          int(t0),   int(t1), int(g),
                          int(h0),           int(h1),   int(c),  int(lmin(c + step, c1)),
                          split ? part : -1, int(base), count};
            if (split) part += lmin(step, c1 - c);
          }
        }
    }
  return n;
}

// Rows of a page lie apart, so hardware prefetching does not see the next ones coming.
static void prefetch_chunk(const Attention& a, const AttendUnit& u, long j0) {
  const StateArg& s = *a.state;
  const long item = item_bytes(s.dtype), end = lmin(j0 + kChunk, a.batch->kv_len[u.seq]);
  for (long j = j0; j < end; ++j)
    for (int part = 0; part < s.parts; ++part) {
      const long width = part ? a.dv : a.dk;
      const char* row = cache_row(s, part, a.layer, *a.batch, u.seq, j) + u.kv_head * width * item;
      for (long b = 0; b < width * item; b += 64) _mm_prefetch(row + b, _MM_HINT_T1);
    }
}

static void load_chunk(const Attention& a, const AttendUnit& u, long j0, long keys, float* k,
                       float* v) {
  const StateArg& s = *a.state;
  const long item = item_bytes(s.dtype);
  for (long j = 0; j < keys; ++j) {
    const char* row = cache_row(s, 0, a.layer, *a.batch, u.seq, j0 + j);
    widen(row + (a.latent ? 0 : u.kv_head * a.dk * item), s.dtype, a.dk, k + j * a.k_pitch);
    if (a.latent) continue;
    widen(cache_row(s, 1, a.layer, *a.batch, u.seq, j0 + j) + u.kv_head * a.dv * item, s.dtype,
          a.dv, v + j * a.v_pitch);
  }
}

struct AttendScratch {
  float *qt, *k, *v, *scores, *lo, *hi, *sinks, *row;
  Running partial, running;
};
static AttendScratch attend_scratch(const Attention& a, char* local) {
  const AttendLayout l = attend_layout(a);
  const auto at = [local](size_t offset) { return reinterpret_cast<float*>(local + offset); };
  float* bounds = at(l.bounds);
  float* k = at(l.rows_k);
  return {at(l.qt),
          k,
          a.latent ? k : at(l.rows_v),
          at(l.scores),
          bounds,
          bounds + kQueries,
          bounds + 2 * kQueries,
          at(l.bounds) + 3 * kQueries,
          running_at(at(l.partial)),
          running_at(at(l.running))};
}

static Queries gather_queries(const Attention& a, const AttendUnit& u, const AttendScratch& s,
                              bool fill) {
  const long heads = u.h1 - u.h0, count = (u.t1 - u.t0) * heads, lanes = round_up(count, 16);
  if (fill) {
    for (long i = 0; i < a.dk * lanes; ++i) s.qt[i] = 0.0f;
    for (long m = 0; m < count; ++m) {
      const long t = u.t0 + m / heads, h = u.h0 + m % heads;
      put_query(s.qt, lanes, m, 0, row_in(*a.q0, t, h, s.row), a.q0->dim[2]);
      if (a.q1) put_query(s.qt, lanes, m, a.q0->dim[2], row_in(*a.q1, t, h, s.row), a.q1->dim[2]);
    }
  }
  return {count, lanes, a.dk, a.dv, a.dv_pad, a.scale, a.softcap, s.qt};
}

static void write_queries(const Attention& a, const AttendUnit& u, const AttendScratch& s,
                          const Queries& q) {
  const long heads = u.h1 - u.h0;
  if (a.sinks)
    for (long m = 0; m < q.count; ++m) s.sinks[m] = a.sinks[u.h0 + m % heads];
  finish(q, s.running, a.sinks ? s.sinks : nullptr);
  for (long m = 0; m < q.count; ++m)
    row_out(*a.out, u.t0 + m / heads, u.h0 + m % heads, s.running.out + m * q.dv_pad);
}

static void attend_unit(const Attention& a, const AttendUnit& u, const AttendScratch& s,
                        float* parts) {
  const Queries q = gather_queries(a, u, s, true);
  const long heads = u.h1 - u.h0;
  if (u.part < 0) reset(q, s.running);
  for (long c = u.c0; c < u.c1; ++c) {
    const long j0 = c * kChunk;
    float keys = 0;
    for (long m = 0; m < kQueries; ++m) s.lo[m] = s.hi[m] = 0.0f;
    for (long m = 0; m < q.count; ++m) {
      visible(a.batch->tok_pos[u.t0 + m / heads], a.window, j0, s.lo + m, s.hi + m);
      keys = s.hi[m] > keys ? s.hi[m] : keys;
    }
    load_chunk(a, u, j0, long(keys), s.k, s.v);
    if (c + 1 < u.c1) prefetch_chunk(a, u, j0 + kChunk);
    const ChunkRows rows{s.k, s.v, a.k_pitch, a.v_pitch};
    if (u.part < 0) {
      merge_chunk(q, rows, long(keys), s.lo, s.hi, s.scores, s.running, s.partial);
      continue;
    }
    const Running part = running_at(parts + (u.part + c - u.c0) * running_floats(a.dv_pad));
    chunk_weights(q, rows, long(keys), s.lo, s.hi, s.scores, part);
    chunk_values(q, rows, long(keys), s.scores, part.out, nullptr, nullptr);
  }
  if (u.part < 0) write_queries(a, u, s, q);
}

static void merge_parts(const Attention& a, const AttendUnit& u, const AttendScratch& s,
                        float* parts) {
  const Queries q = gather_queries(a, u, s, false);
  reset(q, s.running);
  for (long p = 0; p < u.merge_count; ++p)
    merge(q, s.running, running_at(parts + (u.merge_first + p) * running_floats(a.dv_pad)));
  write_queries(a, u, s, q);
}

static void paged_attend(const Ctx& ctx, const Instr& in, bool latent) {
  const Attention a = attention_of(&ctx, in, latent);
  long* count = reinterpret_cast<long*>(ctx.shared);
  AttendUnit* units = reinterpret_cast<AttendUnit*>(ctx.shared + 64);
  float* parts = reinterpret_cast<float*>(ctx.shared + 64 +
                                          align64(max_units(a, *ctx.sizes) * sizeof(AttendUnit)));
  if (ctx.tid == 0) *count = list_units(a, *ctx.sizes, units);
  const AttendScratch s = attend_scratch(a, ctx.local);
  // Value lanes past dv read what lies there: it must be finite.
  for (long j = 0; j < kChunk; ++j) {
    for (long i = a.dk; i < a.k_pitch; ++i) s.k[j * a.k_pitch + i] = 0.0f;
    if (latent) continue;
    for (long i = a.dv; i < a.v_pitch; ++i) s.v[j * a.v_pitch + i] = 0.0f;
  }
  barrier(ctx);
  for (long i; (i = next_unit(ctx, 0)) < *count;) attend_unit(a, units[i], s, parts);
  if (!splits_keys(a, *ctx.sizes)) return;
  barrier(ctx);
  for (long i; (i = next_unit(ctx, 1)) < *count;)
    if (units[i].merge_count > 0) merge_parts(a, units[i], s, parts);
}

static void sdpa(const Ctx& ctx, const Instr& in) { paged_attend(ctx, in, false); }
static size_t sdpa_shared(const Instr& in, const Sizes& s) { return attend_shared(in, s, false); }
static size_t sdpa_local(const Instr& in, const Sizes&) {
  return attend_layout(attention_of(nullptr, in, false)).total;
}

static void mla_attend(const Ctx& ctx, const Instr& in) { paged_attend(ctx, in, true); }
static size_t mla_shared(const Instr& in, const Sizes& s) { return attend_shared(in, s, true); }
static size_t mla_local(const Instr& in, const Sizes&) {
  return attend_layout(attention_of(nullptr, in, true)).total;
}

}  // namespace
}  // namespace KTG_ISA
}  // namespace ktg
