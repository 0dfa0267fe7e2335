// Where the bytes of packed weights lie on a machine with several memory nodes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "formats.h"

namespace ktg {

constexpr long kNodeTiles = 4;  // nodes share a matrix by groups of so many tiles: a kernel's unit

struct NodeSlice {
  long begin, end;  // bytes from the start of the stack
  int node;         // 0 .. nodes - 1
};

// Node n owns tile groups [groups n / nodes, groups (n + 1) / nodes) of every matrix of the stack,
// the share whose units its threads take first (kernels/units.h); what follows the data (scales,
// padding) is split in the same proportion. Slices are in order and cover the stack.
std::vector<NodeSlice> node_slices(const WeightArg& w, int nodes);

// Binds each slice to memory node numbers[slice.node], and moves pages that lie elsewhere; a page
// goes to the slice that holds its middle. Returns "" or why the system refused; bytes not yet
// bound then stay where they are.
std::string numa_place(uintptr_t address, size_t nbytes, const std::vector<NodeSlice>& slices,
                       const std::vector<int>& numbers);

int numa_node_of(uintptr_t address);  // of the page, which must be there; -1 when refused

}  // namespace ktg
