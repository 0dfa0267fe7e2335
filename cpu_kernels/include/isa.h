// Which instruction sets the CPU and the operating system allow, and which one is used.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "plan.h"

namespace ktg {

struct IsaInfo {
  std::map<std::string, bool> flags;
  std::string best;                 // a level, or "" (none)
  std::string missing;              // flags that keep the next level away
  std::vector<std::string> levels;  // all that run here, lowest first
};

const IsaInfo& detect_isa();

// `wanted` empty: KTGRAPH_ISA, else the best. Throws std::runtime_error naming the missing flag.
const IsaTable& choose_isa(const std::string& wanted, std::string* why = nullptr);

}  // namespace ktg
