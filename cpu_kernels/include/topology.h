// Which CPUs this process may use, how they share cores, and which memory node each is near to.
#pragma once
#include <map>
#include <string>
#include <vector>

namespace ktg {

struct Cpu {
  int number;
  int core;  // the lowest CPU number of its physical core
  int node;  // index into Topology::nodes
};

struct Topology {
  std::vector<Cpu> cpus;   // online and allowed (affinity, cpuset), ascending
  std::vector<int> nodes;  // the system's numbers of the memory nodes that have such CPUs
  double quota = 0;        // CPUs' worth of time the control groups allow; 0: no limit
};

// Reads <root>/sys and <root>/proc; with a root, affinity comes from there too (for tests).
Topology read_topology(const std::string& root = "");

// CPU -> the number of its memory node; empty where the system knows no nodes.
std::map<int, int> cpu_nodes(const std::string& root = "");

// One CPU per physical core first, nodes in turn, then the siblings; not more than the quota.
std::vector<int> order_cpus(const Topology& topology);
std::vector<int> default_cpus();  // order_cpus of this process

std::vector<int> parse_cpu_list(const std::string& text);  // "0-2,8" is 0, 1, 2, 8

}  // namespace ktg
