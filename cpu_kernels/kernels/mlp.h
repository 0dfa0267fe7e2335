// cpu.grouped_mlp and cpu.swiglu: y[t] = sum over k of wts[t, k] * down_e(act(gate_e x[t]) * up_e
// x[t]), e = ids[t, k]. One region with three barriers: (1) tokens are sorted by expert; (2) gate,
// up and activation, unit = two tile pairs of one expert for all its tokens; (3) down and merge,
// unit = up to four tiles of the output for all experts, so that each output is summed over k, in
// order, by the thread that computed its parts. swiglu is one expert with weight 1. Long inputs go
// in slices of tokens, which bounds the scratch.
#pragma once

namespace ktg {
namespace KTG_ISA {
namespace {

constexpr long kSlice = 512;  // tokens per pass

struct Mlp {
  const TensorArg *x, *ids, *wts, *y;  // ids, wts null: swiglu
  const TensorArg *b13, *b2;           // may be null
  const WeightArg *w13, *w2;
  ActArgs act;
  long tokens, k, experts, inner_pad;  // inner_pad: F rounded up to 16
  bool stage;
};

// In shared scratch: one slice's pairs (token, k) ordered by expert.
struct MlpShared {
  long* active;        // [0] how many experts have tokens
  int* expert;         // [active] its id
  int* first;          // [active + 1] its first pair
  int* place;          // [token][k] the pair, or -1
  const float** rows;  // [pair] the token's x
  float* x;            // staged rows
  float* inner;        // [pair][inner_pad]
  size_t total;
};

static Mlp mlp_of(const Instr& in, bool routed) {
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
  m.inner_pad = m.w13->tiles / 2 * 16;
  m.stage = needs_staging(*m.x, *m.w13);
  return m;
}

static MlpShared mlp_shared_of(const Mlp& m, char* base) {
  const long slice = lmin(m.tokens, kSlice), pairs = slice * m.k;
  size_t at = 0;
  const auto take = [&at, base](size_t bytes) {
    char* here = base + at;
    at += align64(bytes);
    return here;
  };
  MlpShared s{};
  s.active = reinterpret_cast<long*>(take(8));
  s.expert = reinterpret_cast<int*>(take(m.experts * 4));
  s.first = reinterpret_cast<int*>(take((m.experts + 1) * 4));
  s.place = reinterpret_cast<int*>(take(pairs * 4));
  s.rows = reinterpret_cast<const float**>(take(pairs * sizeof(float*)));
  s.x = reinterpret_cast<float*>(take(m.stage ? size_t(slice) * m.w13->kpad * 4 : 0));
  s.inner = reinterpret_cast<float*>(take(size_t(pairs) * m.inner_pad * 4));
  s.total = at;
  return s;
}

KTG_IN size_t mlp_c_bytes() { return kTokenBlock * kUnitTiles * 64; }
static size_t mlp_local_of(const Mlp& m) {
  const long pairs = lmin(m.tokens, kSlice) * m.k;
  return kPanelBytes + mlp_c_bytes() + align64(size_t(pairs) * kUnitTiles * 64) +
         align64((m.experts + 1) * 4);
}

// One pass of counting sort over a slice, by one thread; the others stage x meanwhile.
static void sort_pairs(const Ctx& ctx, const Mlp& m, const MlpShared& s, long t0, long tokens,
                       int* next) {
  for (long e = 0; e <= m.experts; ++e) next[e] = 0;
  for (long t = 0; t < tokens; ++t)
    for (long k = 0; k < m.k; ++k) {
      const int e = m.ids ? int_row(*m.ids, t0 + t)[k] : 0;
      if (e >= m.experts || e < -1)
        fail(ctx, "cpu.grouped_mlp: expert id outside the stack", e);
      else if (e >= 0)
        ++next[e];
    }
  int at = 0;
  long active = 0;
  for (long e = 0; e < m.experts; ++e) {
    const int count = next[e];
    next[e] = at;
    if (count == 0) continue;
    s.expert[active] = int(e), s.first[active++] = at;
    at += count;
  }
  s.first[active] = at;
  *s.active = active;
  for (long t = 0; t < tokens; ++t)
    for (long k = 0; k < m.k; ++k) {
      const int e = m.ids ? int_row(*m.ids, t0 + t)[k] : 0;
      const bool real = e >= 0 && e < m.experts;
      const int pair = real ? next[e]++ : -1;
      s.place[t * m.k + k] = pair;
      if (!real) continue;
      s.rows[pair] = m.stage ? s.x + t * m.w13->kpad
                             : reinterpret_cast<const float*>(row_ptr(*m.x, t0 + t, 0));
    }
}

// gate, up and activation of `tiles` (alternating gate and up) for some pairs of one expert.
static void gate_up_unit(const Mlp& m, const MlpShared& s, long expert, long p0, long rows,
                         long tile, long tiles, float* panel, float* c) {
  tiles_times_rows(tiles_of(*m.w13, expert, tile, tiles), s.rows + p0, rows, c, kUnitTiles * 16,
                   panel);
  const long inner = m.w13->rows / 2;
  for (long n = 0; n < tiles; n += 2) {
    const long f = (tile + n) / 2 * 16, left = inner - f;
    F bias_gate = zero(), bias_up = zero();
    if (m.b13) {
      const float* b = f32_row(*m.b13, expert);
      bias_gate = load_n(b + f, lmin(16, left)), bias_up = load_n(b + inner + f, lmin(16, left));
    }
    for (long i = 0; i < rows; ++i) {
      F gate = load(c + (i * kUnitTiles + n) * 16), up = load(c + (i * kUnitTiles + n + 1) * 16);
      if (m.b13) gate = add(gate, bias_gate), up = add(up, bias_up);
      store(s.inner + (p0 + i) * m.inner_pad + f, gated(m.act, gate, up));
    }
  }
}

static void gate_up(const Ctx& ctx, const Mlp& m, const MlpShared& s, int phase_base) {
  float* panel = reinterpret_cast<float*>(ctx.local);
  float* c = reinterpret_cast<float*>(ctx.local + kPanelBytes);
  const long groups = ceil_div(m.w13->tiles, kUnitTiles);
  for (long u; (u = next_unit(ctx, phase_base)) < *s.active * groups;) {
    const long a = u / groups, tile = u % groups * kUnitTiles,
               tiles = lmin(kUnitTiles, m.w13->tiles - tile);
    for (long p = s.first[a]; p < s.first[a + 1]; p += kTokenBlock)
      gate_up_unit(m, s, s.expert[a], p, lmin(kTokenBlock, s.first[a + 1] - p), tile, tiles, panel,
                   c);
  }
}

// parts[pair][64] of the output tiles, for all pairs
static void down_parts(const Mlp& m, const MlpShared& s, long tile, long tiles, float* panel,
                       float* parts) {
  const float* x[kTokenBlock];
  for (long a = 0; a < *s.active; ++a) {
    const Tiles t = tiles_of(*m.w2, s.expert[a], tile, tiles);
    for (long p = s.first[a]; p < s.first[a + 1]; p += kTokenBlock) {
      const long rows = lmin(kTokenBlock, s.first[a + 1] - p);
      for (long i = 0; i < rows; ++i) x[i] = s.inner + (p + i) * m.inner_pad;
      tiles_times_rows(t, x, rows, parts + p * kUnitTiles * 16, kUnitTiles * 16, panel);
    }
    if (!m.b2) continue;
    const float* bias = f32_row(*m.b2, s.expert[a]) + tile * 16;
    const long n = lmin(tiles * 16, m.w2->rows - tile * 16);
    for (long p = s.first[a]; p < s.first[a + 1]; ++p)
      for (long i = 0; i < n; ++i) parts[p * kUnitTiles * 16 + i] += bias[i];
  }
}

static void merge_token(const Mlp& m, const MlpShared& s, long t, long token, long tile, long tiles,
                        const float* parts) {
  float out[kUnitTiles * 16];
  const long n = lmin(tiles * 16, m.w2->rows - tile * 16);
  for (long j = 0; j < tiles; ++j) {
    F acc = zero();
    for (long k = 0; k < m.k; ++k) {
      const int pair = s.place[t * m.k + k];
      if (pair < 0) continue;
      const F part = load(parts + (pair * kUnitTiles + j) * 16);
      acc = m.wts ? fma(set1(f32_row(*m.wts, token)[k]), part, acc) : part;
    }
    store(out + j * 16, acc);
  }
  narrow(out, n, row_ptr(*m.y, token, 0) + tile * 16 * item_bytes(m.y->dtype), m.y->dtype);
}

static void down(const Ctx& ctx, const Mlp& m, const MlpShared& s, long t0, long tokens,
                 int phase) {
  float* panel = reinterpret_cast<float*>(ctx.local);
  float* parts = reinterpret_cast<float*>(ctx.local + kPanelBytes + mlp_c_bytes());
  // Small units when there are few of them per thread; bits do not depend on it.
  const long span = ceil_div(m.w2->tiles, kUnitTiles) >= 4 * ctx.threads ? kUnitTiles : 2;
  const long units = ceil_div(m.w2->tiles, span);
  for (long u; (u = next_unit(ctx, phase)) < units;) {
    const long tile = u * span, tiles = lmin(span, m.w2->tiles - tile);
    down_parts(m, s, tile, tiles, panel, parts);
    for (long t = 0; t < tokens; ++t) merge_token(m, s, t, t0 + t, tile, tiles, parts);
  }
}

static void run_mlp(const Ctx& ctx, const Mlp& m) {
  const MlpShared s = mlp_shared_of(m, ctx.shared);
  int* next = reinterpret_cast<int*>(ctx.local + mlp_local_of(m) - align64((m.experts + 1) * 4));
  for (long t0 = 0; t0 < m.tokens; t0 += kSlice) {
    const long tokens = lmin(kSlice, m.tokens - t0);
    if (t0 > 0) barrier(ctx);  // the slice before is read to its end
    if (ctx.tid == 0) {
      sort_pairs(ctx, m, s, t0, tokens, next);
      for (int p = 0; p < 2; ++p) __atomic_store_n(ctx.counters + p * 16, 0u, __ATOMIC_RELAXED);
    }
    if (m.stage) {
      const Range r = my_range(ctx, tokens);
      for (long t = r.begin; t < r.end; ++t)
        stage_row(*m.x, t0 + t, 0, m.w13->kpad, s.x + t * m.w13->kpad);
    }
    barrier(ctx);
    gate_up(ctx, m, s, 0);
    barrier(ctx);
    down(ctx, m, s, t0, tokens, 1);
  }
}

static void grouped_mlp(const Ctx& ctx, const Instr& in) { run_mlp(ctx, mlp_of(in, true)); }
static size_t grouped_shared(const Instr& in, const Sizes&) {
  return mlp_shared_of(mlp_of(in, true), nullptr).total;
}
static size_t grouped_local(const Instr& in, const Sizes&) {
  return mlp_local_of(mlp_of(in, true));
}

static void swiglu(const Ctx& ctx, const Instr& in) { run_mlp(ctx, mlp_of(in, false)); }
static size_t swiglu_shared(const Instr& in, const Sizes&) {
  return mlp_shared_of(mlp_of(in, false), nullptr).total;
}
static size_t swiglu_local(const Instr& in, const Sizes&) {
  return mlp_local_of(mlp_of(in, false));
}

}  // namespace
}  // namespace KTG_ISA
}  // namespace ktg
