#include "topology.h"

#include <dirent.h>
#include <sched.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>

namespace ktg {

namespace {

// A whole small file, read with C's stdio: iostreams would bind to whichever libstdc++ the process
// loaded first, and some wheels bring one that does not fit.
bool read_text(const std::string& path, std::string* text) {
  std::FILE* f = std::fopen(path.c_str(), "r");
  if (!f) return false;
  char buffer[4096];
  text->clear();
  for (size_t n; (n = std::fread(buffer, 1, sizeof buffer, f)) > 0;) text->append(buffer, n);
  std::fclose(f);
  return true;
}

std::string read_text(const std::string& path) {
  std::string text;
  read_text(path, &text);
  return text;
}

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> out;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(at, begin), text.size());
    out.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return out;
}

// Folders of this process's control groups for one controller, from its own up to the mount; both
// versions, also where the path that /proc tells lies outside this container's mount.
std::vector<std::string> control_groups(const std::string& root, const std::string& controller) {
  std::vector<std::string> out;
  const std::string mount = root + "/sys/fs/cgroup";
  for (const std::string& line : split(read_text(root + "/proc/self/cgroup"), '\n')) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string names = line.substr(first + 1, second - first - 1);
    const std::vector<std::string> listed = split(names, ',');
    const bool v2 = names.empty();
    if (!v2 && std::find(listed.begin(), listed.end(), controller) == listed.end()) continue;
    std::string path = line.substr(second + 1);
    for (;;) {
      while (!path.empty() && path.back() == '/') path.pop_back();
      if (v2) out.push_back(mount + path), out.push_back(mount + "/unified" + path);
      if (!v2) out.push_back(mount + "/" + names + path);
      if (!v2 && names != controller) out.push_back(mount + "/" + controller + path);
      if (path.empty()) break;
      path.resize(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
    }
  }
  if (out.empty()) out = {mount, mount + "/" + controller};
  return out;
}

double read_quota(const std::string& root) {
  double least = 0;
  for (const std::string& group : control_groups(root, "cpu")) {
    double quota = 0, period = 0;  // a quota of "max" reads as no number
    const std::string both = read_text(group + "/cpu.max");
    if (std::sscanf(both.c_str(), "%lf %lf", &quota, &period) != 2) {
      quota = std::atof(read_text(group + "/cpu.cfs_quota_us").c_str());
      period = std::atof(read_text(group + "/cpu.cfs_period_us").c_str());
    }
    if (quota <= 0 || period <= 0) continue;
    least = least > 0 ? std::min(least, quota / period) : quota / period;
  }
  return least;
}

std::set<int> affinity(const std::string& root) {
  if (root.empty()) {
    std::set<int> out;
    // Large machines have more CPUs than a cpu_set_t names; the kernel says when the set is short.
    for (int most = CPU_SETSIZE; most <= 1 << 16; most *= 4) {
      cpu_set_t* set = CPU_ALLOC(most);
      const size_t bytes = CPU_ALLOC_SIZE(most);
      CPU_ZERO_S(bytes, set);
      const bool fits = sched_getaffinity(0, bytes, set) == 0;
      for (int i = 0; fits && i < most; ++i)
        if (CPU_ISSET_S(i, bytes, set)) out.insert(i);
      CPU_FREE(set);
      if (fits) break;
    }
    return out;
  }
  const std::string status = read_text(root + "/proc/self/status");
  const char* key = "Cpus_allowed_list:";
  const size_t at = status.find(key);
  if (at == std::string::npos) return {};
  const std::string rest = status.substr(at + std::strlen(key));
  const std::vector<int> cpus = parse_cpu_list(rest.substr(0, rest.find('\n')));
  return {cpus.begin(), cpus.end()};
}

void keep_only(std::set<int>* cpus, const std::vector<int>& allowed) {
  if (allowed.empty()) return;
  const std::set<int> keep(allowed.begin(), allowed.end());
  for (auto it = cpus->begin(); it != cpus->end();)
    it = keep.count(*it) ? std::next(it) : cpus->erase(it);
}

std::set<int> usable_cpus(const std::string& root) {
  const std::vector<int> online =
      parse_cpu_list(read_text(root + "/sys/devices/system/cpu/online"));
  std::set<int> cpus = affinity(root);
  if (cpus.empty()) cpus.insert(online.begin(), online.end());
  keep_only(&cpus, online);
  for (const std::string& group : control_groups(root, "cpuset"))
    for (const char* name : {"/cpuset.cpus.effective", "/cpuset.effective_cpus"})
      keep_only(&cpus, parse_cpu_list(read_text(group + name)));
  if (cpus.empty()) cpus.insert(0);
  return cpus;
}

int lowest_sibling(const std::string& root, int cpu) {
  const std::string topology =
      root + "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/";
  for (const char* name : {"core_cpus_list", "thread_siblings_list"}) {
    const std::vector<int> cpus = parse_cpu_list(read_text(topology + name));
    if (!cpus.empty()) return cpus.front();
  }
  return cpu;
}

}  // namespace

std::map<int, int> cpu_nodes(const std::string& root) {
  std::map<int, int> out;
  const std::string folder = root + "/sys/devices/system/node";
  DIR* dir = opendir(folder.c_str());
  if (!dir) return out;
  while (const dirent* entry = readdir(dir)) {
    int number;
    char rest;
    if (std::sscanf(entry->d_name, "node%d%c", &number, &rest) != 1) continue;
    for (int cpu : parse_cpu_list(read_text(folder + "/" + entry->d_name + "/cpulist")))
      out[cpu] = number;
  }
  closedir(dir);
  return out;
}

std::vector<int> parse_cpu_list(const std::string& text) {
  std::vector<int> out;
  for (const std::string& part : split(text, ',')) {
    int first, last;
    const int found = std::sscanf(part.c_str(), " %d-%d", &first, &last);
    if (found < 1) continue;
    for (int cpu = first; cpu <= (found == 2 ? last : first); ++cpu) out.push_back(cpu);
  }
  return out;
}

Topology read_topology(const std::string& root) {
  Topology t;
  t.quota = read_quota(root);
  const std::map<int, int> node_of = cpu_nodes(root);
  for (int cpu : usable_cpus(root)) {
    const auto known = node_of.find(cpu);
    const int number = known == node_of.end() ? 0 : known->second;
    auto at = std::find(t.nodes.begin(), t.nodes.end(), number);
    if (at == t.nodes.end()) at = t.nodes.insert(t.nodes.end(), number);
    t.cpus.push_back({cpu, lowest_sibling(root, cpu), int(at - t.nodes.begin())});
  }
  return t;
}

std::vector<int> order_cpus(const Topology& t) {
  // Of each CPU: how many of its core, and then of its node, come before it.
  struct Place {
    int thread, turn, node, number;
  };
  std::map<int, int> threads;                // core -> CPUs seen
  std::map<std::pair<int, int>, int> turns;  // (node, thread) -> CPUs seen
  std::vector<Place> places;
  for (const Cpu& cpu : t.cpus) {
    const int thread = threads[cpu.core]++;
    places.push_back({thread, turns[{cpu.node, thread}]++, cpu.node, cpu.number});
  }
  std::sort(places.begin(), places.end(), [](const Place& a, const Place& b) {
    if (a.thread != b.thread) return a.thread < b.thread;
    return a.turn != b.turn ? a.turn < b.turn : a.node < b.node;
  });
  std::vector<int> out;
  for (const Place& p : places) out.push_back(p.number);
  if (t.quota > 0 && double(out.size()) > t.quota) out.resize(std::max(1L, std::lround(t.quota)));
  return out;
}

std::vector<int> default_cpus() { return order_cpus(read_topology()); }

}  // namespace ktg
