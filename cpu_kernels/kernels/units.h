// Work units of a weight, by memory node: a thread takes those of its own node first, then those of
// the others. Whoever computes a unit computes it whole, so bits do not depend on nodes.
#pragma once

namespace ktg {
namespace KTG_ISA {
namespace {

// Parts [begin, begin + count) of a matrix's tiles, which lie on one node (node_slices in numa.h).
struct NodeShare {
  long node, begin, count;
};
// The share that a thread serves in its `turn`-th turn.
KTG_IN NodeShare node_share(const Ctx& ctx, long turn, long parts) {
  const long node = (ctx.node + turn) % ctx.nodes, begin = parts * node / ctx.nodes;
  return {node, begin, parts * (node + 1) / ctx.nodes - begin};
}

// Units (part, index), index < count: heads, experts, blocks of rows. Parts run fastest.
struct NearUnits {
  const Ctx& ctx;
  int phase;
  long parts, count;
  long turn = 0;  // shares that are used up

  // False when no unit is left.
  bool next(long* part, long* index) {
    for (; turn < ctx.nodes; ++turn) {
      const NodeShare share = node_share(ctx, turn, parts);
      const long unit = next_unit(ctx, phase, share.node);
      if (unit >= share.count * count) continue;
      *part = share.begin + unit % share.count, *index = unit / share.count;
      return true;
    }
    return false;
  }
};

}  // namespace
}  // namespace KTG_ISA
}  // namespace ktg
