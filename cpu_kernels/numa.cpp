#include "numa.h"

#include <errno.h>
#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace ktg {

namespace {

std::string refusal(int error, int node) {
  const std::string what = "mbind to memory node " + std::to_string(node) + ": ";
  if (error == EPERM || error == ENOSYS)
    return what + "not allowed here (a container's seccomp profile?); pages stay where they are";
  if (error == EINVAL) return what + "there is no such node, or this process may not use it";
  if (error == ENOMEM)
    return what + "too many separate ranges (vm.max_map_count), or no memory is left there";
  return what + std::strerror(error);
}

std::string bind_pages(uintptr_t begin, uintptr_t end, int node) {
  if (node < 0 || node >= 1024) return refusal(EINVAL, node);
  unsigned long mask[1024 / (8 * sizeof(long))] = {};
  mask[node / (8 * sizeof(long))] = 1UL << node % (8 * sizeof(long));
  // Preferred: a full node costs speed, not the process.
  if (syscall(SYS_mbind, begin, end - begin, MPOL_PREFERRED, mask, 8 * sizeof mask + 1,
              MPOL_MF_MOVE) == 0)
    return "";
  return refusal(errno, node);
}

}  // namespace

std::vector<NodeSlice> node_slices(const WeightArg& w, int nodes) {
  if (nodes < 1) throw std::invalid_argument("node_slices: nodes must be positive");
  const long groups = (w.tiles + kNodeTiles - 1) / kNodeTiles;
  std::vector<NodeSlice> out;
  const auto split = [&](long base, long bytes_of_all) {
    for (int n = 0; n < nodes; ++n) {
      const auto at = [&](long node) {
        const long tile = std::min(w.tiles, groups * node / nodes * kNodeTiles);
        return base + bytes_of_all / w.tiles * tile + bytes_of_all % w.tiles * tile / w.tiles;
      };
      if (at(n) < at(n + 1)) out.push_back({at(n), at(n + 1), n});
    }
  };
  for (long m = 0; m < w.count; ++m) {
    split(m * w.stride, w.scale_offset);
    split(m * w.stride + w.scale_offset, w.stride - w.scale_offset);
  }
  return out;
}

std::string numa_place(uintptr_t address, size_t nbytes, const std::vector<NodeSlice>& slices,
                       const std::vector<int>& numbers) {
  const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE));
  const auto nearest = [page](uintptr_t at) { return (at + page / 2) / page * page; };
  // Only pages that lie wholly in the buffer: the others hold memory of somebody else too.
  const uintptr_t first = (address + page - 1) / page * page;
  const uintptr_t last = (address + nbytes) / page * page;
  for (const NodeSlice& s : slices) {
    if (s.begin < 0 || s.begin > s.end || size_t(s.end) > nbytes)
      throw std::invalid_argument("numa_place: slice [" + std::to_string(s.begin) + ", " +
                                  std::to_string(s.end) + ") is outside the " +
                                  std::to_string(nbytes) + " bytes");
    if (s.node < 0 || size_t(s.node) >= numbers.size())
      throw std::invalid_argument("numa_place: slice of node " + std::to_string(s.node) + ", but " +
                                  std::to_string(numbers.size()) + " node numbers were given");
    const uintptr_t begin = std::max(first, nearest(address + s.begin));
    const uintptr_t end = std::min(last, nearest(address + s.end));
    if (begin >= end) continue;
    const std::string error = bind_pages(begin, end, numbers[s.node]);
    if (!error.empty()) return error;
  }
  return "";
}

int numa_node_of(uintptr_t address) {
  int node = -1;
  const long failed = syscall(SYS_get_mempolicy, &node, nullptr, 0UL, address,
                              (unsigned long)(MPOL_F_NODE | MPOL_F_ADDR));
  return failed ? -1 : node;
}

}  // namespace ktg
