#include "engine.h"

#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <stdexcept>

#include "isa.h"

namespace ktg {

namespace {

inline void pause() { __builtin_ia32_pause(); }

// Spins for a bounded time, then sleeps in the kernel until `word` is no longer `old`.
void wait_while(std::atomic<uint32_t>& word, uint32_t old, long spin_ns) {
  if (spin_ns > 0) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::nanoseconds(spin_ns);
    do {
      for (int i = 0; i < 32; ++i) {
        if (word.load(std::memory_order_acquire) != old) return;
        pause();
      }
    } while (std::chrono::steady_clock::now() < until);
  }
  while (word.load(std::memory_order_acquire) == old) word.wait(old, std::memory_order_acquire);
}

// What one small file says, read with C's stdio: iostreams would bind to whichever libstdc++ the
// process loaded first, and some wheels bring one that does not fit.
template <class... T>
bool read_values(const std::string& path, const char* format, T*... values) {
  std::FILE* f = std::fopen(path.c_str(), "r");
  if (!f) return false;
  const int found = std::fscanf(f, format, values...);
  std::fclose(f);
  return found == int(sizeof...(values));
}

// First hardware thread of each core before the second ones.
std::vector<int> cores_first(const std::vector<int>& cpus) {
  std::vector<int> first, second;
  for (int cpu : cpus) {
    int lowest = cpu;
    read_values(
        "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list",
        "%d", &lowest);
    (lowest == cpu ? first : second).push_back(cpu);
  }
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

// The CPU quota of this process's cgroup; a quota of "max" reads as no number.
long cgroup_cpus() {
  double quota = 0, period = 0;
  if (read_values("/sys/fs/cgroup/cpu.max", "%lf %lf", &quota, &period) && period > 0)
    return std::max(1L, std::lround(quota / period));
  if (read_values("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "%lf", &quota) && quota > 0 &&
      read_values("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "%lf", &period) && period > 0)
    return std::max(1L, std::lround(quota / period));
  return 1L << 30;
}

char* allocate(size_t bytes) {
  const size_t huge = size_t(2) << 20;
  const size_t align = bytes >= huge ? huge : 64;
  void* p = std::aligned_alloc(align, (bytes + align - 1) / align * align);
  if (!p) throw std::bad_alloc();
  if (align == huge) madvise(p, bytes, MADV_HUGEPAGE);  // a hint; failure is harmless
  return static_cast<char*>(p);
}

}  // namespace

std::vector<int> default_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int> cpus;
  if (sched_getaffinity(0, sizeof set, &set) == 0)
    for (int i = 0; i < CPU_SETSIZE; ++i)
      if (CPU_ISSET(i, &set)) cpus.push_back(i);
  if (cpus.empty()) cpus.push_back(0);
  cpus = cores_first(cpus);
  if (long(cpus.size()) > cgroup_cpus()) cpus.resize(cgroup_cpus());
  return cpus;
}

Engine::Engine(int threads, std::vector<int> cpus, const std::string& isa)
    : cpus_(cpus.empty() ? default_cpus() : std::move(cpus)),
      table_(&choose_isa(isa)),
      pid_(getpid()) {
  threads_ = threads > 0 ? threads : int(cpus_.size());
  if (threads_ > 1024)
    throw std::invalid_argument("Engine: at most 1024 threads, got " + std::to_string(threads_));
  // With more threads than CPUs a spinning thread keeps the one it waits for from running.
  spin_ns_ = threads_ <= int(cpus_.size()) ? 50'000 : 0;
  local_.assign(threads_, nullptr);
  for (int tid = 1; tid < threads_; ++tid) workers_.emplace_back([this, tid] { worker(tid); });
}

Engine::~Engine() {
  if (getpid() != pid_) {  // a forked child has no such threads; joining them would hang
    for (auto& t : workers_) t.detach();
    return;
  }
  stop_ = true;
  generation_.fetch_add(1);
  generation_.notify_all();
  for (auto& t : workers_) t.join();
  for (char* p : local_) std::free(p);
  std::free(shared_);
}

void Engine::check_process() const {
  if (getpid() != pid_)
    throw std::runtime_error(
        "this Engine was made before fork(); its threads live in the parent process. "
        "Make a new Engine in the child.");
}

void Engine::reserve(size_t shared_bytes, size_t local_bytes) {
  if (shared_bytes > shared_bytes_) {
    std::free(shared_);
    shared_ = nullptr, shared_bytes_ = 0;
    shared_ = allocate(shared_bytes);
    shared_bytes_ = shared_bytes;
  }
  if (local_bytes <= local_bytes_) return;
  local_bytes_ = 0;
  for (char*& p : local_) {
    std::free(p);
    p = nullptr;
  }
  for (char*& p : local_) p = allocate(local_bytes);  // touched first by its own thread
  local_bytes_ = local_bytes;
}

void Engine::set_error(const std::string& message) {
  std::lock_guard<std::mutex> lock(error_mutex_);
  if (error_.empty()) error_ = message;
}

void Engine::body_guarded(int tid) {
  try {
    body_(arg_, tid);
    return;
  } catch (const Aborted&) {
    return;
  } catch (const std::exception& e) {
    set_error(e.what());
  } catch (...) {
    set_error("unknown C++ exception in worker " + std::to_string(tid));
  }
  broken_ = true;  // release the threads that wait at the barrier
  phase_.fetch_add(1);
  phase_.notify_all();
}

void Engine::run(Body body, void* arg) {
  check_process();
  body_ = body, arg_ = arg;
  broken_ = false, arrived_ = 0;
  error_.clear();
  running_.store(threads_ - 1, std::memory_order_relaxed);
  if (threads_ > 1) {
    generation_.fetch_add(1, std::memory_order_seq_cst);
    generation_.notify_all();
  }
  body_guarded(0);
  for (uint32_t n; (n = running_.load(std::memory_order_acquire)) != 0;)
    wait_while(running_, n, spin_ns_);
  if (!error_.empty()) throw std::runtime_error(error_);
}

void Engine::worker(int tid) {
  if (tid < int(cpus_.size())) {  // a thread too many stays unpinned
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpus_[tid], &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
  }
  char name[16];
  std::snprintf(name, sizeof name, "ktgraph-%d", tid);
  pthread_setname_np(pthread_self(), name);
  for (uint32_t seen = 0;;) {
    wait_while(generation_, seen, spin_ns_);
    seen = generation_.load(std::memory_order_acquire);
    if (stop_) return;
    body_guarded(tid);
    if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) running_.notify_all();
  }
}

void Engine::wait_barrier() {
  const uint32_t phase = phase_.load(std::memory_order_acquire);
  if (broken_) throw Aborted{};
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == uint32_t(threads_)) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.fetch_add(1, std::memory_order_seq_cst);
    phase_.notify_all();
    return;
  }
  wait_while(phase_, phase, spin_ns_);
  if (broken_) throw Aborted{};
}

void barrier(const Ctx& ctx) {
  if (ctx.threads > 1) ctx.engine->wait_barrier();
}

long next_unit(const Ctx& ctx, int phase) {
  return __atomic_fetch_add(ctx.counters + phase * 16, 1u, __ATOMIC_RELAXED);
}

void fail(const Ctx& ctx, const char* what, long value) {
  ctx.engine->set_error(std::string(what) + ": " + std::to_string(value));
}

}  // namespace ktg
