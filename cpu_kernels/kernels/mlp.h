// cpu.grouped_mlp and cpu.swiglu: y[t] = sum over k of wts[t, k] * down_e(act(gate_e x[t]) * up_e
// x[t]), e = ids[t, k]. swiglu is one expert with weight 1. One region, in slices of tokens:
//   stage    pairs (token, k) are sorted by expert; each token's row is brought into w13's form
//            once and copied to its pairs (few tokens: the pairs point at it)
//   gate_up  gate, up and activation of some columns of one expert; whoever completes a block of
//            kActBlock inner columns brings it into w2's form
//   down     few pairs: some output columns for all experts, merged at once; many: columns of one
//            expert, kept per pair, and merged behind a barrier
// Merging sums over k in order, whoever computed the parts: bits do not depend on threads or units.
#pragma once

namespace ktg {
namespace KTG_ISA {
namespace {

constexpr long kSlice = 2048;                 // most tokens per pass
constexpr long kSliceBytes = 192l << 20;      // most bytes of rows per pass
constexpr long kPartsBytes = 128l << 20;      // most bytes of kept output parts
constexpr long kColumnPairs = 512;            // up to here down goes by columns
constexpr long kBlockPairs = kActBlock / 16;  // gate and up tile pairs of an inner block
constexpr long kDownTiles = 32;               // output tiles of a unit that keeps its parts
constexpr long kAheadLines = 1024;            // of weights, asked for at a barrier: 64 KB

static Mlp mlp_of(const Instr& in, bool routed, int threads) {
  Mlp m{};
  m.x = &tensor(in, 0);
  m.ids = routed ? &tensor(in, 1) : nullptr;
  m.wts = routed ? &tensor(in, 2) : nullptr;
  m.w13 = &in.op[routed ? 3 : 1].w;
  m.w2 = &in.op[routed ? 4 : 2].w;
  m.b13 = routed && has(in, 5) ? &tensor(in, 5) : nullptr;
  m.b2 = routed && has(in, 6) ? &tensor(in, 6) : nullptr;
  m.y = &tensor(in, routed ? 7 : 3);
  m.act = {int(in.attr[A_ACT]), float(in.attr[A_ALPHA]), float(in.attr[A_LIMIT])};
  m.tokens = m.x->dim[0];
  m.k = routed ? m.ids->dim[2] : 1;
  m.experts = routed ? m.w13->count : 1;
  m.inner = m.w13->rows / 2;
  const long row_bytes = record_bytes(rows_kind(*m.w13, m.tokens), m.w13->kpad) +
                         record_bytes(rows_kind(*m.w2, m.tokens), m.w2->kpad);
  m.slice = lmax(64, lmin(kSlice, kSliceBytes / (m.k * row_bytes)));
  m.few = m.tokens <= kFewTokens;
  const long pairs = lmin(m.tokens, m.slice) * m.k;
  const long row_blocks = lmax(ceil_div(pairs, kRowBlock), lmin(m.experts, pairs) / 2);
  m.coarse = !m.few && row_blocks * ceil_div(m.inner, kActBlock) >= 16 * threads;
  m.by_columns = pairs <= kColumnPairs;
  return m;
}

struct MlpShared {
  Pairs pairs;      // not when every thread sorts for itself
  uint32_t* done;   // [active][inner block]: columns written
  char *x, *inner;  // records
  float* wide;      // [pair][wide_pitch] inner rows as they come, when units are fine
  float* parts;     // [pair][parts_pitch], unless down goes by columns
  long wide_pitch, parts_pitch;
  size_t total;
};

static MlpShared mlp_shared_of(const Mlp& m, char* base) {
  const long tokens = lmin(m.tokens, m.slice), pairs = tokens * m.k;
  size_t at = 0;
  const auto take = [&at, base](size_t bytes) {
    char* here = base + at;
    at += align64(bytes);
    return here;
  };
  MlpShared s{};
  s.wide_pitch = ceil_div(m.inner, 16) * 16;
  const long unit = kDownTiles * 16, most = kPartsBytes / (lmax(pairs, 1) * 4) / unit * unit;
  s.parts_pitch = lmin(m.w2->tiles * 16, lmax(unit, most));
  s.pairs = pairs_at(m, take(m.few ? 0 : pairs_bytes(m)));
  const long blocks = ceil_div(m.inner, kActBlock);
  s.done = reinterpret_cast<uint32_t*>(take(m.coarse ? 0 : lmin(m.experts, pairs) * blocks * 4));
  s.x = take(rows_bytes(*m.w13, rows_kind(*m.w13, m.tokens), m.few ? tokens : pairs));
  s.inner = take(rows_bytes(*m.w2, rows_kind(*m.w2, m.tokens), pairs));
  s.wide = reinterpret_cast<float*>(take(m.coarse ? 0 : size_t(pairs) * s.wide_pitch * 4));
  s.parts = reinterpret_cast<float*>(take(m.by_columns ? 0 : size_t(pairs) * s.parts_pitch * 4));
  s.total = at;
  return s;
}

// Of each thread: scratch of rows_times, C, inner columns of a coarse unit or parts of a column
// unit, and tables for sorting.
struct MlpLocal {
  char* times;
  float *c, *wide, *parts;
  int* next;
  Pairs pairs;
  size_t total;
};

static MlpLocal mlp_local_of(const Mlp& m, char* base) {
  const long pairs = lmin(m.tokens, m.slice) * m.k;
  size_t at = 0;
  const auto take = [&at, base](size_t bytes) {
    char* here = base + at;
    at += align64(bytes);
    return here;
  };
  MlpLocal l{};
  l.times = take(kTimesBytes);
  l.c = reinterpret_cast<float*>(take(kCBytes));
  l.wide = reinterpret_cast<float*>(take(m.coarse ? kRowBlock * kActBlock * 4 : 0));
  l.parts = reinterpret_cast<float*>(take(m.by_columns ? size_t(pairs) * kCRow * 4 : 0));
  l.next = reinterpret_cast<int*>(take((m.experts + 1) * 4));
  l.pairs = pairs_at(m, take(m.few ? pairs_bytes(m) : 0));
  l.total = at;
  return l;
}

// One slice in progress.
struct MlpRun {
  const Mlp& m;
  const MlpShared& s;
  const MlpLocal& l;
  Pairs p;
  Rows x, inner;
  long t0, tokens;
};

// What put_block wrote, for another record.
static void copy_block(const Rows& r, long from, long to, long block) {
  char *src = r.base + from * r.stride, *dst = r.base + to * r.stride;
  const long first = block * kActBlock, width = lmin(kActBlock, r.kpad - first);
  const long item = r.kind == ACTS_INT8 ? 1 : r.kind == ACTS_BF16 ? 2 : 4;
  __builtin_memcpy(dst + first * item, src + first * item, size_t(width * item));
  if (r.kind != ACTS_INT8) return;
  const IntRow a = int_row(src, r.kpad), b = int_row(dst, r.kpad);
  b.scale[block] = a.scale[block], b.block_sum[block] = a.block_sum[block];
  r.scales[block * r.count + to] = a.scale[block];
  for (long i = first / kSumColumns; i < (first + width) / kSumColumns; ++i) b.sum[i] = a.sum[i];
}

static void stage_token_block(const MlpRun& r, long t, long block) {
  if (r.m.few) return stage_block(*r.m.x, r.t0 + t, 0, r.x, t, block);
  long kept = -1;
  for (long k = 0; k < r.m.k; ++k) {
    const long pair = r.p.place[t * r.m.k + k];
    if (pair < 0) continue;
    kept < 0 ? stage_block(*r.m.x, r.t0 + t, 0, r.x, pair, block)
             : copy_block(r.x, kept, pair, block);
    if (kept < 0) kept = pair;
  }
}

// gate, up and activation of `tiles` (gate and up alternate) for pairs [p0, p0 + rows) of one
// expert, into out[row][...] at column (tile / 2) * 16 - first.
static void gate_up_tiles(const MlpRun& r, long expert, long p0, long rows, long tile, long tiles,
                          float* out, long pitch) {
  const Mlp& m = r.m;
  rows_times(tiles_of(*m.w13, expert, tile, tiles), r.x, p0, rows, r.l.c, kCRow, r.l.times);
  for (long n = 0; n < tiles; n += 2) {
    const long f = (tile + n) / 2 * 16, left = m.inner - f;
    F bias_gate = zero(), bias_up = zero();
    if (m.b13) {
      const float* b = f32_row(*m.b13, expert);
      bias_gate = load_n(b + f, lmin(16, left)), bias_up = load_n(b + m.inner + f, lmin(16, left));
    }
    for (long i = 0; i < rows; ++i) {
      F gate = load(r.l.c + i * kCRow + n * 16), up = load(r.l.c + i * kCRow + n * 16 + 16);
      if (m.b13) gate = add(gate, bias_gate), up = add(up, bias_up);
      store(out + i * pitch + n / 2 * 16, gated(m.act, gate, up));
    }
  }
}

// Inner columns of a block that are not padding.
KTG_IN long inner_width(const Mlp& m, long block) {
  return lmin(kActBlock, m.inner - block * kActBlock);
}

// A barrier behind which every thread reads `lines` lines of weights: they are on their way while it
// waits for the others, so that memory does not idle at the end of a phase.
template <class Line>
static void barrier_ahead(const Ctx& ctx, long lines, const Line& line) {
  const uint32_t ticket = arrive(ctx);
  lines = lmin(lines, kAheadLines);
  for (long i = 0; i < lines && !opened(ctx, ticket);)
    for (const long end = lmin(i + 8, lines); i < end; ++i) _mm_prefetch(line(i), _MM_HINT_T1);
  await(ctx, ticket);
}

static void gate_up_coarse(const Ctx& ctx, const MlpRun& r) {
  barrier(ctx);  // all rows are staged
  UnitWalk walk{ctx, 0, r.p, ceil_div(r.m.inner, kActBlock)};
  for (long p0, rows, block; walk.next(&p0, &rows, &block);) {
    const long first = block * kBlockPairs * 2, end = lmin(first + kBlockPairs * 2, r.m.w13->tiles);
    for (long tile = first; tile < end; tile += kUnitTiles)
      gate_up_tiles(r, r.p.expert[walk.a], p0, rows, tile, lmin(kUnitTiles, end - tile),
                    r.l.wide + (tile - first) * 8, kActBlock);
    for (long i = 0; i < rows; ++i)
      put_block(r.inner, p0 + i, block, r.l.wide + i * kActBlock, inner_width(r.m, block));
  }
}

static void gate_up_fine(const Ctx& ctx, const MlpRun& r) {
  const long groups = ceil_div(r.m.w13->tiles, kUnitTiles), blocks = ceil_div(r.m.inner, kActBlock);
  const long pitch = r.s.wide_pitch;
  NearUnits units{ctx, 0, groups, *r.p.active};
  long group = 0, a = 0;
  bool more = units.next(&group, &a);
  const Tiles t = tiles_of(*r.m.w13, more ? r.p.expert[a] : 0, group * kUnitTiles, kUnitTiles);
  barrier_ahead(ctx, more ? kUnitTiles * t.w->tile_bytes / 64 : 0,
                [&](long i) { return tile_data(t, 0) + 64 * i; });
  for (; more; more = units.next(&group, &a)) {
    const long tile = group * kUnitTiles;
    const long tiles = lmin(kUnitTiles, r.m.w13->tiles - tile);
    const long first = r.p.first[a], end = r.p.first[a + 1], column = tile / 2 * 16;
    for (long p = first; p < end; p += kRowBlock)
      gate_up_tiles(r, r.p.expert[a], p, lmin(kRowBlock, end - p), tile, tiles,
                    r.s.wide + p * pitch + column, pitch);
    const long block = column / kActBlock;
    const uint32_t columns = uint32_t(tiles / 2 * 16);
    const uint32_t before =
        __atomic_fetch_add(r.s.done + a * blocks + block, columns, __ATOMIC_ACQ_REL);
    const long whole = round_up(inner_width(r.m, block), 16);
    if (before + columns != uint32_t(whole)) continue;
    for (long p = first; p < end; ++p)
      put_block(r.inner, p, block, r.s.wide + p * pitch + block * kActBlock,
                inner_width(r.m, block));
  }
}

// Short rows: a call to memcpy, or rep movs in its place, costs more than the bytes.
KTG_IN void copy_vectors(const float* from, long vectors, float* to) {
  for (long j = 0; j < vectors; ++j) store(to + j * 16, load(from + j * 16));
}

static void add_bias(const Mlp& m, long expert, long tile, long n, long rows, float* out,
                     long pitch) {
  if (!m.b2) return;
  const float* bias = f32_row(*m.b2, expert) + tile * 16;
  for (long i = 0; i < rows; ++i)
    for (long j = 0; j < n; ++j) out[i * pitch + j] += bias[j];
}

// Sums a token's parts over k, in order: `tiles` of them, from parts[pair][pitch].
static void merge_token(const MlpRun& r, long t, long tile, long tiles, const float* parts,
                        long pitch) {
  const Mlp& m = r.m;
  const long token = r.t0 + t;
  for (long j = 0; j < tiles; ++j) {
    F acc = zero();
    for (long k = 0; k < m.k; ++k) {
      const long pair = r.p.place[t * m.k + k];
      if (pair < 0) continue;
      const F part = load(parts + pair * pitch + j * 16);
      acc = m.wts ? fma(set1(f32_row(*m.wts, token)[k]), part, acc) : part;
    }
    const long column = (tile + j) * 16, n = lmin(16, m.w2->rows - column);
    float out[16];
    store(out, acc);
    narrow(out, n, row_ptr(*m.y, token, 0) + column * item_bytes(m.y->dtype), m.y->dtype);
  }
}

static void down_by_columns(const Ctx& ctx, const MlpRun& r) {
  const Mlp& m = r.m;
  // Small units when there are few of them per thread.
  const long quads = ceil_div(m.w2->tiles, kUnitTiles);
  const long span = quads >= 8 * ctx.threads ? kUnitTiles : quads >= 2 * ctx.threads ? 2 : 1;
  NearUnits units{ctx, 1, ceil_div(m.w2->tiles, span), 1};
  long u = 0, one = 0;
  bool more = units.next(&u, &one);
  const long lines = span * m.w2->tile_bytes / 64;  // of each expert
  barrier_ahead(ctx, more ? *r.p.active * lines : 0, [&](long i) {
    const Tiles t = tiles_of(*m.w2, r.p.expert[i / lines], u * span, span);
    return tile_data(t, 0) + i % lines * 64;
  });
  for (; more; more = units.next(&u, &one)) {
    const long tile = u * span, tiles = lmin(span, m.w2->tiles - tile);
    const long n = lmin(tiles * 16, m.w2->rows - tile * 16);
    for (long a = 0; a < *r.p.active; ++a) {
      const Tiles t = tiles_of(*m.w2, r.p.expert[a], tile, tiles);
      const long end = r.p.first[a + 1];
      for (long p = r.p.first[a]; p < end; p += kRowBlock) {
        const long rows = lmin(kRowBlock, end - p);
        rows_times(t, r.inner, p, rows, r.l.c, kCRow, r.l.times);
        add_bias(m, r.p.expert[a], tile, n, rows, r.l.c, kCRow);
        for (long i = 0; i < rows; ++i)
          copy_vectors(r.l.c + i * kCRow, tiles, r.l.parts + (p + i) * kCRow);
      }
    }
    for (long t = 0; t < r.tokens; ++t) merge_token(r, t, tile, tiles, r.l.parts, kCRow);
  }
}

// Output tiles [tile0, tile1) of every pair into s.parts.
static void down_parts(const Ctx& ctx, const MlpRun& r, long tile0, long tile1, int phase) {
  UnitWalk walk{ctx, phase, r.p, ceil_div(tile1 - tile0, kDownTiles)};
  for (long p0, rows, piece; walk.next(&p0, &rows, &piece);) {
    const long first = tile0 + piece * kDownTiles, end = lmin(first + kDownTiles, tile1);
    const long expert = r.p.expert[walk.a];
    for (long tile = first; tile < end; tile += kUnitTiles) {
      const long tiles = lmin(kUnitTiles, end - tile);
      rows_times(tiles_of(*r.m.w2, expert, tile, tiles), r.inner, p0, rows, r.l.c, kCRow,
                 r.l.times);
      add_bias(r.m, expert, tile, lmin(tiles * 16, r.m.w2->rows - tile * 16), rows, r.l.c, kCRow);
      for (long i = 0; i < rows; ++i)
        copy_vectors(r.l.c + i * kCRow, tiles,
                     r.s.parts + (p0 + i) * r.s.parts_pitch + (tile - tile0) * 16);
    }
  }
}

static void down_by_expert(const Ctx& ctx, const MlpRun& r) {
  const long span = r.s.parts_pitch / 16;
  for (long tile0 = 0, pass = 0; tile0 < r.m.w2->tiles; tile0 += span, ++pass) {
    const long tile1 = lmin(tile0 + span, r.m.w2->tiles);
    barrier(ctx);  // inner rows are there, the parts before are merged
    down_parts(ctx, r, tile0, tile1, 1 + pass % 2);
    barrier(ctx);
    if (ctx.tid == 0)  // nobody takes from it before the next barrier
      reset_units(ctx, 1 + pass % 2);
    const Range range = my_range(ctx, r.tokens);
    for (long t = range.begin; t < range.end; ++t)
      merge_token(r, t, tile0, tile1 - tile0, r.s.parts, r.s.parts_pitch);
  }
}

static void run_slice(const Ctx& ctx, MlpRun& r, bool first) {
  const Mlp& m = r.m;
  if (m.few) sort_pairs(ctx, m, r.p, r.t0, r.tokens, r.l.next);
  if (ctx.tid == 0) {
    if (!m.few) sort_pairs(ctx, m, r.p, r.t0, r.tokens, r.l.next);
    if (!m.coarse)
      __builtin_memset(r.s.done, 0, size_t(*r.p.active * ceil_div(m.inner, kActBlock)) * 4);
    for (int p = 0; !first && p < 2; ++p) reset_units(ctx, p);
  }
  if (!m.few) barrier(ctx);
  const long blocks = row_blocks(r.x);
  const Range range = my_range(ctx, r.tokens * blocks);
  for (long i = range.begin; i < range.end; ++i) stage_token_block(r, i / blocks, i % blocks);
  m.coarse ? gate_up_coarse(ctx, r) : gate_up_fine(ctx, r);
  m.by_columns ? down_by_columns(ctx, r) : down_by_expert(ctx, r);
}

static void run_mlp(const Ctx& ctx, const Mlp& m) {
  const MlpShared s = mlp_shared_of(m, ctx.shared);
  const MlpLocal l = mlp_local_of(m, ctx.local);
  const Pairs pairs = m.few ? l.pairs : s.pairs;
  const long tokens = lmin(m.tokens, m.slice), count = tokens * m.k;
  const Rows x = rows_for(*m.w13, rows_kind(*m.w13, m.tokens), s.x, m.few ? tokens : count,
                          m.few ? pairs.token : nullptr);
  const Rows inner = rows_for(*m.w2, rows_kind(*m.w2, m.tokens), s.inner, count, nullptr);
  MlpRun r{m, s, l, pairs, x, inner, 0, 0};
  for (long t0 = 0; t0 < m.tokens; t0 += m.slice) {
    if (t0 > 0) barrier(ctx);  // the slice before is read to its end
    r.t0 = t0, r.tokens = lmin(m.slice, m.tokens - t0);
    run_slice(ctx, r, t0 == 0);
  }
}

static void grouped_mlp(const Ctx& ctx, const Instr& in) {
  run_mlp(ctx, mlp_of(in, true, ctx.threads));
}
static size_t grouped_shared(const Instr& in, const Sizes& sizes) {
  return mlp_shared_of(mlp_of(in, true, sizes.threads), nullptr).total;
}
static size_t grouped_local(const Instr& in, const Sizes& sizes) {
  return mlp_local_of(mlp_of(in, true, sizes.threads), nullptr).total;
}

static void swiglu(const Ctx& ctx, const Instr& in) {
  run_mlp(ctx, mlp_of(in, false, ctx.threads));
}
static size_t swiglu_shared(const Instr& in, const Sizes& sizes) {
  return mlp_shared_of(mlp_of(in, false, sizes.threads), nullptr).total;
}
static size_t swiglu_local(const Instr& in, const Sizes& sizes) {
  return mlp_local_of(mlp_of(in, false, sizes.threads), nullptr).total;
}

}  // namespace
}  // namespace KTG_ISA
}  // namespace ktg
