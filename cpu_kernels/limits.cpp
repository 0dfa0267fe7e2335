// Measures the limits of include/cpu_limits.h on pinned threads, and shows them to Python.
#include "cpu_limits.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "engine.h"
#include "isa.h"
#include "topology.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ktg {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

bool has(const char* flag) { return detect_isa().flags.at(flag); }
bool has_avx512() { return has("avx512f") && has("os_zmm"); }

// Linux >= 5.16 hands out AMX tile state to a process that asks once; threads inherit it.
bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return has("amx_tile") && has("os_amx") &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// ---- threads

void pin(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

// Runs work(thread) on `threads` pinned threads that start together; returns seconds until the
// last has ended.
double together(int threads, const std::function<void(int)>& work) {
  const std::vector<int> cpus = default_cpus();
  if (threads < 1 || threads > int(cpus.size()))
    throw std::invalid_argument("limits: from 1 to " + std::to_string(cpus.size()) +
                                " threads (the CPUs that may be used), got " +
                                std::to_string(threads));
  std::atomic<int> ready{0};
  std::atomic<bool> go{false};
  std::vector<std::thread> pool;
  for (int t = 0; t < threads; ++t)
    pool.emplace_back([&, t] {
      pin(cpus[t]);
      ready.fetch_add(1);
      while (!go.load(std::memory_order_acquire)) __builtin_ia32_pause();
      work(t);
    });
  while (ready.load() < threads) std::this_thread::yield();
  const auto start = Clock::now();
  go.store(true, std::memory_order_release);
  for (auto& thread : pool) thread.join();
  return seconds_since(start);
}

// ---- memory

constexpr size_t kReadStep = 1024;  // bytes a read loop takes at once
constexpr size_t kReadChunk = 1 << 20;

struct Range {
  char* data;
  size_t bytes;
};

// How far a part was given out; a cache line each.
struct alignas(64) Taken {
  std::atomic<size_t> bytes{0};
};

// The part of a buffer that thread t of n reads first: contiguous.
Range part_of(char* data, size_t bytes, int t, int n) {
  const size_t steps = bytes / kReadStep, first = steps * t / n, last = steps * (t + 1) / n;
  return {data + first * kReadStep, (last - first) * kReadStep};
}

// Writes a buffer once, so that physical pages stand behind it.
void touch(uintptr_t data, size_t bytes, int threads) {
  together(threads, [&](int t) {
    const Range part = part_of(reinterpret_cast<char*>(data), bytes, t, threads);
    std::memset(part.data, t + 1, part.bytes);
  });
}

// Bytes/s of each of `passes` passes over the buffer, by all threads together. A thread reads its
// own part, whose pages lie on its memory node (`touch`), then what is left of the others', in
// chunks: one whose core is busy otherwise does not make all of them wait.
std::vector<double> read_bandwidth(uintptr_t data, size_t bytes, int threads, int passes) {
  if (data % 64 || bytes % kReadStep || bytes == 0)
    throw std::invalid_argument("read_bandwidth: 64-byte aligned data, a multiple of 1024 bytes");
  if (passes < 1) throw std::invalid_argument("read_bandwidth: at least one pass");
  const ReadLoop read = has_avx512() ? avx512_limits::read : avx2_limits::read;
  choose_isa("avx2");  // throws where there is no AVX2
  std::vector<double> found;
  std::atomic<long> keep{0};  // what was read, so that no compiler leaves it out
  for (int pass = 0; pass < passes; ++pass) {
    std::vector<Taken> taken(std::max(threads, 0));
    const double seconds = together(threads, [&](int t) {
      for (int turn = 0; turn < threads; ++turn) {
        const int owner = (t + turn) % threads;
        const Range part = part_of(reinterpret_cast<char*>(data), bytes, owner, threads);
        for (size_t at; (at = taken[owner].bytes.fetch_add(kReadChunk)) < part.bytes;)
          keep.fetch_xor(read(part.data + at, std::min(kReadChunk, part.bytes - at)));
      }
    });
    found.push_back(double(bytes) / seconds);
  }
  return found;
}

// ---- arithmetic

struct Unit {
  const char* name;
  ArithmeticLoop loop;
  long rounds;  // about a millisecond
};

// What this CPU has, from slow to fast.
std::vector<Unit> units() {
  std::vector<Unit> found;
  if (detect_isa().best.empty()) return found;
  found.push_back({"f32", has_avx512() ? avx512_limits::f32 : avx2_limits::f32, 300'000});
  if (!has_avx512()) return found;
  if (has("avx512_bf16")) found.push_back({"avx512_bf16", avx512_bf16_limits::bf16, 100'000});
  if (has("avx512_vnni")) found.push_back({"avx512_vnni", avx512_vnni_limits::int8, 300'000});
  if (!may_use_tiles()) return found;
  const auto add = [&found](const char* name, ArithmeticLoop loop) {
    found.push_back({name, loop, 40'000});
  };
  if (has("amx_bf16")) add("amx_bf16_loaded", avx512_amx_limits::bf16_loaded);
  if (has("amx_bf16")) add("amx_bf16", avx512_amx_limits::bf16);
  if (has("amx_int8")) add("amx_int8_loaded", avx512_amx_limits::int8_loaded);
  if (has("amx_int8")) add("amx_int8", avx512_amx_limits::int8);
  return found;
}

Unit unit_of(const std::string& name) {
  std::string known;
  for (const Unit& unit : units()) {
    if (name == unit.name) return unit;
    known += (known.empty() ? "" : ", ") + std::string(unit.name);
  }
  throw std::invalid_argument("arithmetic_peak: no unit '" + name + "' here; there are: " + known);
}

// Operations/s of one unit on all threads together, over about `seconds`.
double arithmetic_peak(const std::string& name, int threads, double seconds) {
  const Unit unit = unit_of(name);
  std::vector<double> rate(std::max(threads, 0), 0.0);
  together(threads, [&](int t) {
    unit.loop(unit.rounds);  // clocks rise, tiles are set up
    const auto start = Clock::now();
    double done = 0, spent = 0;
    do {
      done += unit.loop(unit.rounds);
      spent = seconds_since(start);
    } while (spent < seconds);
    rate[t] = done / spent;
  });
  double sum = 0;
  for (double r : rate) sum += r;
  return sum;
}

std::vector<std::string> arithmetic_units() {
  std::vector<std::string> names;
  for (const Unit& unit : units()) names.push_back(unit.name);
  return names;
}

}  // namespace

void bind_limits(nb::module_& m) {
  const auto released = nb::call_guard<nb::gil_scoped_release>();
  m.def("touch", &touch, "data"_a, "nbytes"_a, "threads"_a, released,
        "Writes a buffer with pinned threads, so that physical pages stand behind it.");
  m.def("read_bandwidth", &read_bandwidth, "data"_a, "nbytes"_a, "threads"_a, "passes"_a = 5,
        released,
        "Bytes/s of each pass over a buffer: pinned threads read a part each, then help others.");
  m.def("arithmetic_units", &arithmetic_units,
        "Units this CPU has: f32, avx512_bf16, avx512_vnni, amx_bf16, amx_int8; _loaded: tiles are "
        "loaded from the first-level cache for every product.");
  m.def("arithmetic_peak", &arithmetic_peak, "unit"_a, "threads"_a, "seconds"_a = 0.1, released,
        "Operations/s of a unit (a multiply-add is two), summed over threads.");
}

}  // namespace ktg
