#include "isa.h"

#include <cpuid.h>

#include <cstdlib>
#include <stdexcept>

namespace ktg {

namespace {

uint64_t read_xcr0() {
  uint32_t lo, hi;
  __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
  return (uint64_t(hi) << 32) | lo;
}

constexpr const char* kAvx2Flags[] = {"avx2", "fma", "os_ymm"};
constexpr const char* kAvx512Flags[] = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "os_zmm"};

template <size_t N>
std::string missing_of(const IsaInfo& info, const char* const (&names)[N]) {
  std::string out;
  for (const char* name : names)
    if (!info.flags.at(name)) out += (out.empty() ? "" : ", ") + std::string(name);
  return out;
}

IsaInfo detect() {
  IsaInfo info;
  uint32_t a = 0, b = 0, c = 0, d = 0, b7 = 0, c7 = 0, d7 = 0, a71 = 0, max7 = 0;
  uint64_t xcr0 = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) && (c >> 27 & 1))
    xcr0 = read_xcr0();  // bit 27: the OS uses xsave
  const bool fma = c >> 12 & 1;
  if (__get_cpuid_count(7, 0, &max7, &b7, &c7, &d7) && max7 >= 1) {
    uint32_t b71, c71, d71;
    __get_cpuid_count(7, 1, &a71, &b71, &c71, &d71);
  }
  info.flags = {
      {"avx2", b7 >> 5 & 1},
      {"fma", fma},
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
  const std::string no2 = missing_of(info, kAvx2Flags), no512 = missing_of(info, kAvx512Flags);
  info.best = !no2.empty() ? "" : !no512.empty() ? "avx2" : "avx512";
  info.missing = !no2.empty() ? no2 : no512;
  return info;
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
                             info.missing + " (AVX2 with FMA is the least)");
  const std::string source = by_env ? "KTGRAPH_ISA=" + level : "isa=\"" + level + "\"";
  if (level != "avx2" && level != "avx512")
    throw std::runtime_error(source + " is not a known level; use avx2 or avx512");
  if (level == "avx512" && info.best != "avx512")
    throw std::runtime_error(source + " asks for AVX-512, but this CPU or OS lacks " +
                             info.missing);
  if (why)
    *why = by_env            ? "forced by KTGRAPH_ISA"
           : !wanted.empty() ? "asked for by the caller"
           : info.missing.empty()
               ? "the best level built in, and the CPU has all its flags"
               : "the best level this CPU has; the next one misses " + info.missing;
  return level == "avx512" ? avx512_table() : avx2_table();
}

}  // namespace ktg
