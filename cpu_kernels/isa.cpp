#include "isa.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <stdexcept>

namespace ktg {

namespace {

uint64_t read_xcr0() {
  uint32_t lo, hi;
  __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
  return (uint64_t(hi) << 32) | lo;
}

// Every level, lowest first, with the flags it needs. amx_emulated is for tests and never chosen by
// itself.
struct Level {
  const char* name;
  std::vector<const char*> flags;
  const IsaTable& (*table)();
  bool chosen;
};
const std::vector<Level>& levels() {
  static const std::vector<const char*> k2 = {"avx2", "fma", "f16c", "os_ymm"};
  static const std::vector<const char*> k512 = {"avx2",     "fma",      "avx512f", "avx512bw",
                                                "avx512vl", "avx512dq", "os_zmm"};
  const auto with = [](std::vector<const char*> base, std::initializer_list<const char*> more) {
    base.insert(base.end(), more);
    return base;
  };
  static const std::vector<Level> all = {
      {"amx_emulated", k2, amx_emulated_table, false},
      {"avx2", k2, avx2_table, true},
      {"avx2_vnni", with(k2, {"avx_vnni"}), avx2_vnni_table, true},
      {"avx512", k512, avx512_table, true},
      {"avx512_vnni", with(k512, {"avx512_vnni"}), avx512_vnni_table, true},
      {"avx512_bf16", with(k512, {"avx512_vnni", "avx512_bf16"}), avx512_bf16_table, true},
      {"amx",
       with(k512, {"avx512_vnni", "amx_tile", "amx_int8", "amx_bf16", "os_amx", "amx_permission"}),
       amx_table, true},
  };
  return all;
}

std::string missing_of(const IsaInfo& info, const Level& level) {
  std::string out;
  for (const char* name : level.flags)
    if (!info.flags.at(name)) out += (out.empty() ? "" : ", ") + std::string(name);
  return out;
}

// Linux lets a process use tile registers only after it asked (Documentation/arch/x86/xstate.rst).
bool ask_for_tiles() {
  constexpr int request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, request, tile_data) == 0;
}

IsaInfo detect() {
  IsaInfo info;
  uint32_t a = 0, b = 0, c = 0, d = 0, b7 = 0, c7 = 0, d7 = 0, a71 = 0, max7 = 0;
  uint64_t xcr0 = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) && (c >> 27 & 1))
    xcr0 = read_xcr0();  // bit 27: the OS uses xsave
  const bool fma = c >> 12 & 1, f16c = c >> 29 & 1;
  if (__get_cpuid_count(7, 0, &max7, &b7, &c7, &d7) && max7 >= 1) {
    uint32_t b71, c71, d71;
    __get_cpuid_count(7, 1, &a71, &b71, &c71, &d71);
  }
  info.flags = {
      {"avx2", b7 >> 5 & 1},
      {"fma", fma},
      {"f16c", f16c},
      {"avx512f", b7 >> 16 & 1},
      {"avx512dq", b7 >> 17 & 1},
      {"avx512bw", b7 >> 30 & 1},
      {"avx512vl", b7 >> 31 & 1},
      {"avx512_vnni", c7 >> 11 & 1},
      {"avx512_bf16", a71 >> 5 & 1},
      {"avx_vnni", a71 >> 4 & 1},
      {"amx_tile", d7 >> 24 & 1},
      {"amx_int8", d7 >> 25 & 1},
      {"amx_bf16", d7 >> 22 & 1},
      {"os_ymm", (xcr0 & 0x6) == 0x6},    // xmm and ymm state saved by the OS
      {"os_zmm", (xcr0 & 0xE6) == 0xE6},  // and opmask and zmm state
      {"os_amx", (xcr0 & 0x60000) == 0x60000},
  };
  info.flags["amx_permission"] = info.flags["amx_tile"] && info.flags["os_amx"] && ask_for_tiles();
  for (const Level& level : levels()) {
    const std::string missing = missing_of(info, level);
    if (missing.empty()) {
      info.levels.push_back(level.name);
      if (level.chosen) info.best = level.name, info.missing.clear();
    } else if (info.missing.empty()) {
      info.missing = missing;
    }
  }
  return info;
}

std::string level_names() {
  std::string out;
  for (const Level& level : levels()) out += (out.empty() ? "" : ", ") + std::string(level.name);
  return out;
}

}  // namespace

const IsaInfo& detect_isa() {
  static const IsaInfo info = detect();
  return info;
}

const IsaTable& choose_isa(const std::string& wanted, std::string* why) {
  const IsaInfo& info = detect_isa();
  const char* env = std::getenv("KTGRAPH_ISA");
  const bool by_env = wanted.empty() && env && *env;
  const std::string level = !wanted.empty() ? wanted : by_env ? env : info.best;
  if (info.best.empty())
    throw std::runtime_error("this CPU cannot run ktgraph's native kernels: missing " +
                             info.missing + " (AVX2 with FMA and F16C is the least)");
  const std::string source = by_env ? "KTGRAPH_ISA=" + level : "isa=\"" + level + "\"";
  const auto at = std::find_if(levels().begin(), levels().end(),
                               [&level](const Level& l) { return l.name == level; });
  if (at == levels().end())
    throw std::runtime_error(source + " is not a known level; use one of " + level_names());
  if (const std::string missing = missing_of(info, *at); !missing.empty())
    throw std::runtime_error(source + " asks for more than this CPU and OS have: missing " +
                             missing + ". Use " + info.best + " or a lower level");
  if (why)
    *why = by_env            ? "forced by KTGRAPH_ISA"
           : !wanted.empty() ? "asked for by the caller"
           : info.missing.empty()
               ? "the best level built in, and the CPU has all its flags"
               : "the best level this CPU has; the next one misses " + info.missing;
  return at->table();
}

}  // namespace ktg
