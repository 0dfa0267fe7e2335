#include "engine.h"

#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <new>
#include <stdexcept>

#include "call.h"
#include "isa.h"
#include "topology.h"

namespace ktg {

namespace {

char* allocate(size_t bytes) {
  const size_t huge = size_t(2) << 20;
  const size_t align = bytes >= huge ? huge : 64;
  void* p = std::aligned_alloc(align, (bytes + align - 1) / align * align);
  if (!p) throw std::bad_alloc();
  if (align == huge) madvise(p, bytes, MADV_HUGEPAGE);  // a hint; failure is harmless
  return static_cast<char*>(p);
}

void pin(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);  // a refusal costs speed only
}

// Keeps the caller of a run on the CPU of worker 0. Left to the scheduler it may share a worker's
// CPU, and each of the two then spins while the other waits for the CPU: 50 us a barrier.
class CallerPin {
 public:
  explicit CallerPin(int cpu) {
    pinned_ = pthread_getaffinity_np(pthread_self(), sizeof before_, &before_) == 0 &&
              !(CPU_COUNT(&before_) == 1 && CPU_ISSET(cpu, &before_));
    if (pinned_) pin(cpu);
  }
  ~CallerPin() {
    if (pinned_) pthread_setaffinity_np(pthread_self(), sizeof before_, &before_);
  }

 private:
  cpu_set_t before_;
  bool pinned_;
};

}  // namespace

Engine::Engine(int threads, std::vector<int> cpus, const std::string& isa, std::vector<int> nodes)
    : cpus_(cpus.empty() ? default_cpus() : std::move(cpus)),
      table_(&choose_isa(isa)),
      pid_(getpid()) {
  threads_ = threads > 0 ? threads : int(cpus_.size());
  if (threads_ > 1024)
    throw std::invalid_argument("Engine: at most 1024 threads, got " + std::to_string(threads_));
  assign_nodes(std::move(nodes));
  // With more threads than CPUs a spinning thread keeps the one it waits for from running.
  spin_ns_ = threads_ <= int(cpus_.size()) ? kSpinNs : 0;
  idle_spin_ns_ = spin_ns_;
  local_.assign(threads_, nullptr);
  for (int tid = 1; tid < threads_; ++tid) workers_.emplace_back([this, tid] { worker(tid); });
}

void Engine::assign_nodes(std::vector<int> nodes) {
  if (nodes.empty()) {
    const std::map<int, int> known = cpu_nodes();
    for (int tid = 0; tid < threads_; ++tid) {
      const auto at = known.find(cpus_[tid % cpus_.size()]);
      nodes.push_back(at == known.end() ? 0 : at->second);
    }
  }
  if (int(nodes.size()) != threads_)
    throw std::invalid_argument("Engine: " + std::to_string(nodes.size()) + " nodes given for " +
                                std::to_string(threads_) + " threads");
  node_numbers_ = nodes;
  std::sort(node_numbers_.begin(), node_numbers_.end());
  node_numbers_.erase(std::unique(node_numbers_.begin(), node_numbers_.end()), node_numbers_.end());
  if (node_numbers_.size() > kMaxNodes)
    throw std::invalid_argument("Engine: at most " + std::to_string(kMaxNodes) +
                                " memory nodes, got " + std::to_string(node_numbers_.size()));
  for (int number : nodes)
    node_of_.push_back(int(std::lower_bound(node_numbers_.begin(), node_numbers_.end(), number) -
                           node_numbers_.begin()));
}

Engine::~Engine() {
  if (getpid() != pid_) {  // a forked child has no such threads: nothing to join, nothing to free
    new std::vector<std::thread>(std::move(workers_));
    driver_.release();
    return;
  }
  driver_.reset();
  stop_ = true;
  start_.raise();
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

Driver& Engine::driver() {
  check_process();
  std::lock_guard<std::mutex> lock(driver_mutex_);
  if (!driver_) driver_ = std::make_unique<Driver>(*this);
  return *driver_;
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

void Engine::fail_run(const std::string& message) {
  set_error(message);
  broken_ = true;  // releases the threads that wait at the barrier
  phase_.raise();
}

void Engine::body_guarded(int tid) {
  try {
    body_(arg_, tid);
  } catch (const Aborted&) {  // another thread failed and has said why
  } catch (const std::exception& e) {
    fail_run("worker " + std::to_string(tid) + ": " + e.what());
  } catch (...) {
    fail_run("worker " + std::to_string(tid) + ": unknown C++ exception");
  }
}

void Engine::run(Body body, void* arg) {
  check_process();
  body_ = body, arg_ = arg;
  broken_ = false, arrived_ = 0;
  error_.clear();
  running_.store(threads_ - 1, std::memory_order_relaxed);
  if (threads_ == 1) {
    body_guarded(0);
  } else {
    const CallerPin pinned(cpus_[0]);
    const uint32_t done = done_.value();
    start_.raise();
    body_guarded(0);
    done_.wait_past(done, spin_ns_);
  }
  if (!error_.empty()) throw std::runtime_error(error_);
}

void Engine::pin_as(int tid) const {
  if (tid < int(cpus_.size())) pin(cpus_[tid]);  // a thread too many stays unpinned
  char name[16];
  std::snprintf(name, sizeof name, "ktgraph-%d", tid);
  pthread_setname_np(pthread_self(), name);
}

void Engine::worker(int tid) {
  pin_as(tid);
  for (uint32_t seen = 0;; ++seen) {
    start_.wait_past(seen, idle_spin_ns());
    if (stop_) return;
    body_guarded(tid);
    if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) done_.raise();
  }
}

uint32_t Engine::arrive() {
  const uint32_t phase = phase_.value();
  if (broken_) throw Aborted{};
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == uint32_t(threads_)) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.raise();
  }
  return phase;
}

void Engine::await(uint32_t ticket) {
  phase_.wait_past(ticket, spin_ns_);
  if (broken_) throw Aborted{};
}

uint32_t arrive(const Ctx& ctx) { return ctx.threads > 1 ? ctx.engine->arrive() : 0; }

bool opened(const Ctx& ctx, uint32_t ticket) {
  return ctx.threads == 1 || ctx.engine->opened(ticket);
}

void await(const Ctx& ctx, uint32_t ticket) {
  if (ctx.threads > 1) ctx.engine->await(ticket);
}

void barrier(const Ctx& ctx) { await(ctx, arrive(ctx)); }

long next_unit(const Ctx& ctx, int phase, long node) {
  return __atomic_fetch_add(ctx.counters + phase * 16 + node, 1u, __ATOMIC_RELAXED);
}

void reset_units(const Ctx& ctx, int phase) {
  for (int node = 0; node < ctx.nodes; ++node)
    __atomic_store_n(ctx.counters + phase * 16 + node, 0u, __ATOMIC_RELAXED);
}

void fail(const Ctx& ctx, const char* what, long value) {
  ctx.engine->set_error(std::string(what) + ": " + std::to_string(value));
}

}  // namespace ktg
