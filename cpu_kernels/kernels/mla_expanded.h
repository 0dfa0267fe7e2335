// cpu.mla_attend_expanded: prefill form of MLA. A unit is one head of one sequence: for each chunk
// of 64 latent rows it computes that head's keys and values once (kv_b times the rows) and lets all
// new tokens of the sequence attend to it.
#pragma once

namespace ktg {
namespace KTG_ISA {
namespace {

struct Expanded {
  const TensorArg *q_nope, *q_pe, *out;
  const StateArg* state;
  const WeightArg* w;
  const BatchArg* batch;
  long layer, heads, nope, pe, dv, dv_pad, dk, k_pitch, latent;
  long c_pitch;  // floats per expanded row: whole tiles around the head's rows, and room for the
                 // last value lanes
  float scale;
};

struct ExpandedScratch {
  float *panel, *latent, *expanded, *k, *scores, *lo, *hi, *row, *partial, *blocks;
  long block_floats;  // one query block: its queries and its running result
  size_t total;
};

static Expanded expanded_of(const Ctx* ctx, const Instr& in) {
  Expanded e{};
  e.q_nope = &tensor(in, 0), e.q_pe = &tensor(in, 1), e.out = &tensor(in, 5);
  e.state = &in.op[2].s, e.w = &in.op[4].w;
  e.batch = ctx ? ctx->batch : nullptr;
  e.layer = long(in.attr[A_LAYER]), e.scale = float(in.attr[A_SCALE]);
  e.heads = e.q_nope->dim[1], e.nope = e.q_nope->dim[2], e.pe = e.q_pe->dim[2];
  e.dv = e.out->dim[2], e.dv_pad = round_up(e.dv, 16), e.dk = e.nope + e.pe;
  e.k_pitch = round_up(e.dk, 16) + 16;
  e.latent = e.w->cols;
  e.c_pitch = round_up(e.nope + e.dv, 16) + 48;
  return e;
}

static ExpandedScratch expanded_scratch(const Expanded& e, const Sizes& s, char* local) {
  size_t at = 0;
  const auto take = [&at, local](size_t floats) {
    float* here = reinterpret_cast<float*>(local + at);
    at += align64(floats * 4);
    return here;
  };
  ExpandedScratch x{};
  x.panel = take(kPanelBytes / 4);
  x.latent = take(kChunk * e.w->kpad);
  x.expanded = take(kChunk * e.c_pitch);
  x.k = take(kChunk * e.k_pitch);
  x.scores = take(kChunk * kQueries);
  x.lo = take(kQueries), x.hi = take(kQueries);
  x.row = take(lmax(e.dk, e.dv) + 16);
  x.partial = take(running_floats(e.dv_pad));
  x.block_floats = e.dk * kQueries + running_floats(e.dv_pad);
  x.blocks = take(ceil_div(s.max_new, kQueries) * x.block_floats);
  x.total = at;
  return x;
}
static size_t expanded_local(const Instr& in, const Sizes& s) {
  return expanded_scratch(expanded_of(nullptr, in), s, nullptr).total;
}

// Keys [keys][dk] in s.k and values in s.expanded; returns where the values start.
static const float* expand_chunk(const Expanded& e, const ExpandedScratch& s, long seq, long head,
                                 long j0, long keys) {
  const float* x[kChunk];
  const long rope_at = e.latent * item_bytes(e.state->dtype);
  for (long j = 0; j < keys; ++j) {
    const char* row = cache_row(*e.state, 0, e.layer, *e.batch, seq, j0 + j);
    float* dst = s.latent + j * e.w->kpad;
    widen(row, e.state->dtype, e.latent, dst);
    for (long k = e.latent; k < e.w->kpad; ++k) dst[k] = 0.0f;
    widen(row + rope_at, e.state->dtype, e.pe, s.k + j * e.k_pitch + e.nope);
    x[j] = dst;
  }
  const long first_row = head * (e.nope + e.dv), tile0 = first_row / 16,
             tile1 = ceil_div(first_row + e.nope + e.dv, 16);
  for (long t = tile0; t < tile1; t += kUnitTiles) {
    const Tiles tiles = tiles_of(*e.w, 0, t, lmin(kUnitTiles, tile1 - t));
    tiles_times_rows(tiles, x, keys, s.expanded + (t - tile0) * 16, e.c_pitch, s.panel);
  }
  const float* head_rows = s.expanded + first_row % 16;
  for (long j = 0; j < keys; ++j)
    __builtin_memcpy(s.k + j * e.k_pitch, head_rows + j * e.c_pitch, size_t(e.nope) * 4);
  return head_rows + e.nope;
}

static Queries expanded_queries(const Expanded& e, const ExpandedScratch& s, long block,
                                long count) {
  return {count,    round_up(count, 16),
          e.dk,     e.dv,
          e.dv_pad, e.scale,
          0.0f,     s.blocks + block * s.block_floats};
}
KTG_IN Running expanded_running(const Expanded& e, const ExpandedScratch& s, long block) {
  return running_at(s.blocks + block * s.block_floats + e.dk * kQueries);
}

static void expanded_block_start(const Expanded& e, const ExpandedScratch& s, long block, long t0,
                                 long count, long head) {
  const Queries q = expanded_queries(e, s, block, count);
  float* qt = s.blocks + block * s.block_floats;
  for (long i = 0; i < e.dk * q.lanes; ++i) qt[i] = 0.0f;
  for (long m = 0; m < count; ++m) {
    put_query(qt, q.lanes, m, 0, row_in(*e.q_nope, t0 + m, head, s.row), e.nope);
    put_query(qt, q.lanes, m, e.nope, row_in(*e.q_pe, t0 + m, head, s.row), e.pe);
  }
  reset(q, expanded_running(e, s, block));
}

static void expanded_block_chunk(const Expanded& e, const ExpandedScratch& s, long block, long t0,
                                 long count, long j0, long loaded, const float* values) {
  const Queries q = expanded_queries(e, s, block, count);
  float keys = 0;
  for (long m = 0; m < kQueries; ++m) s.lo[m] = s.hi[m] = 0.0f;
  for (long m = 0; m < count; ++m) {
    visible(e.batch->tok_pos[t0 + m], 0, j0, s.lo + m, s.hi + m);
    keys = s.hi[m] > keys ? s.hi[m] : keys;
  }
  if (keys == 0) return;  // all of the chunk is in this block's future
  const ChunkRows rows{s.k, values, e.k_pitch, e.c_pitch};
  const Running part = running_at(s.partial);
  merge_chunk(q, rows, lmin(long(keys), loaded), s.lo, s.hi, s.scores,
              expanded_running(e, s, block), part);
}

static void expanded_unit(const Expanded& e, const ExpandedScratch& s, long seq, long head) {
  const long t0 = e.batch->seq_start[seq], tokens = e.batch->seq_start[seq + 1] - t0;
  if (tokens == 0) return;
  const long blocks = ceil_div(tokens, kQueries);
  long last = 0;
  for (long t = t0; t < t0 + tokens; ++t) last = lmax(last, e.batch->tok_pos[t]);
  const auto count = [tokens](long b) { return lmin(kQueries, tokens - b * kQueries); };
  for (long b = 0; b < blocks; ++b)
    expanded_block_start(e, s, b, t0 + b * kQueries, count(b), head);
  for (long j0 = 0; j0 <= last; j0 += kChunk) {
    const long keys = lmin(kChunk, last + 1 - j0);
    const float* values = expand_chunk(e, s, seq, head, j0, keys);
    for (long b = 0; b < blocks; ++b)
      expanded_block_chunk(e, s, b, t0 + b * kQueries, count(b), j0, keys, values);
  }
  for (long b = 0; b < blocks; ++b) {
    const Running r = expanded_running(e, s, b);
    finish(expanded_queries(e, s, b, count(b)), r, nullptr);
    for (long m = 0; m < count(b); ++m)
      row_out(*e.out, t0 + b * kQueries + m, head, r.out + m * e.dv_pad);
  }
}

static void mla_attend_expanded(const Ctx& ctx, const Instr& in) {
  const Expanded e = expanded_of(&ctx, in);
  const ExpandedScratch s = expanded_scratch(e, *ctx.sizes, ctx.local);
  // Value lanes past dv read what lies there: it must be finite.
  for (long i = 0; i < kChunk * e.c_pitch; ++i) s.expanded[i] = 0.0f;
  const long units = e.batch->sequences * e.heads;
  for (long u; (u = next_unit(ctx, 0)) < units;) expanded_unit(e, s, u / e.heads, u % e.heads);
}

}  // namespace
}  // namespace KTG_ISA
}  // namespace ktg
