// Pairs (token, k) of a slice, ordered by expert: one pass of counting sort.
#pragma once

namespace ktg {
namespace KTG_ISA {
namespace {

struct Mlp {
  const TensorArg *x, *ids, *wts, *y;  // ids, wts null: swiglu
  const TensorArg *b13, *b2;           // may be null
  const WeightArg *w13, *w2;
  ActArgs act;
  long tokens, k, experts;
  long inner;       // F
  long slice;       // tokens per pass
  bool few;         // rows stay where they are; every thread sorts for itself
  bool coarse;      // gate_up units of a whole block of inner columns
  bool by_columns;  // down units for all experts, merged at once
};

struct Pairs {
  long* active;  // [0] how many experts have tokens
  int* expert;   // [active] its id
  int* first;    // [active + 1] its first pair
  int* place;    // [token][k] the pair, or -1
  int* token;    // [pair]
};

KTG_IN size_t pairs_bytes(const Mlp& m) {
  const long pairs = lmin(m.tokens, m.slice) * m.k;
  return 64 + 2 * align64((m.experts + 1) * 4) + 2 * align64(pairs * 4);
}
static Pairs pairs_at(const Mlp& m, char* at) {
  const long pairs = lmin(m.tokens, m.slice) * m.k;
  const size_t table = align64((m.experts + 1) * 4);
  Pairs p{};
  p.active = reinterpret_cast<long*>(at);
  p.expert = reinterpret_cast<int*>(at + 64);
  p.first = reinterpret_cast<int*>(at + 64 + table);
  p.place = reinterpret_cast<int*>(at + 64 + 2 * table);
  p.token = reinterpret_cast<int*>(at + 64 + 2 * table + align64(pairs * 4));
  return p;
}

KTG_IN int expert_of(const Mlp& m, long token, long k) {
  return m.ids ? int_row(*m.ids, token)[k] : 0;
}

// Pairs of tokens [t0, t0 + tokens); `next` is scratch of experts + 1 numbers.
static void sort_pairs(const Ctx& ctx, const Mlp& m, const Pairs& p, long t0, long tokens,
                       int* next) {
  for (long e = 0; e <= m.experts; ++e) next[e] = 0;
  for (long t = 0; t < tokens; ++t)
    for (long k = 0; k < m.k; ++k) {
      const int e = expert_of(m, t0 + t, k);
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
    p.expert[active] = int(e), p.first[active++] = at;
    at += count;
  }
  p.first[active] = at;
  *p.active = active;
  for (long t = 0; t < tokens; ++t)
    for (long k = 0; k < m.k; ++k) {
      const int e = expert_of(m, t0 + t, k);
      const bool real = e >= 0 && e < m.experts;
      const int pair = real ? next[e]++ : -1;
      p.place[t * m.k + k] = pair;
      if (real) p.token[pair] = int(t);
    }
}

// Walks work units (expert, block of rows, piece of the matrix) in order, those of the thread's own
// memory node first; within a node a thread's unit numbers only grow.
struct UnitWalk {
  const Ctx& ctx;
  int phase;
  const Pairs& p;
  long pieces;  // per expert and row block
  long turn = 0, a = 0, before = 0;

  // False past the last unit; else the expert `a`, its rows [p0, p0 + rows) and the piece.
  bool next(long* p0, long* rows, long* piece) {
    for (; turn < ctx.nodes; ++turn, a = before = 0) {
      const NodeShare share = node_share(ctx, turn, pieces);
      const long unit = next_unit(ctx, phase, share.node);
      if (!find(unit, share.count, p0, rows, piece)) continue;
      *piece += share.begin;
      return true;
    }
    return false;
  }

  // The same for a number among the units of `pieces` pieces.
  bool find(long unit, long pieces, long* p0, long* rows, long* piece) {
    for (; a < *p.active; ++a) {
      const long blocks = ceil_div(p.first[a + 1] - p.first[a], kRowBlock);
      if (unit < before + blocks * pieces) {
        const long block = (unit - before) % blocks, count = p.first[a + 1] - p.first[a];
        *p0 = p.first[a] + count * block / blocks;
        *rows = p.first[a] + count * (block + 1) / blocks - *p0;
        *piece = (unit - before) / blocks;
        return true;
      }
      before += blocks * pieces;
    }
    return false;
  }
};

}  // namespace
}  // namespace KTG_ISA
}  // namespace ktg
