// Persistent pinned threads that run one function together (SPMD), with a barrier between steps.
#pragma once
#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "plan.h"

namespace ktg {

// Thrown out of barrier() in threads that wait for one that failed.
struct Aborted {};

class Engine {
 public:
  // The calling thread is worker 0 and is not pinned; the others are pinned to cpus[1:].
  Engine(int threads, std::vector<int> cpus, const std::string& isa);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  using Body = void (*)(void* arg, int tid);
  // Runs body on all threads and returns when all are done; rethrows the first exception of any of
  // them.
  void run(Body body, void* arg);

  void wait_barrier();
  void set_error(const std::string& message);

  int threads() const { return threads_; }
  const std::vector<int>& cpus() const { return cpus_; }
  const IsaTable& table() const { return *table_; }
  char* local(int tid) const { return local_[tid]; }
  char* shared() const { return shared_; }
  void reserve(size_t shared_bytes, size_t local_bytes);  // grows only; never while running
  std::mutex& mutex() { return mutex_; }
  void check_process() const;

 private:
  void worker(int tid);
  void body_guarded(int tid);

  int threads_;
  std::vector<int> cpus_;
  const IsaTable* table_;
  int pid_;
  long spin_ns_;

  alignas(64) std::atomic<uint32_t> generation_{0};  // of runs
  alignas(64) std::atomic<uint32_t> running_{0};     // workers still in the run
  alignas(64) std::atomic<uint32_t> phase_{0};       // of the barrier
  alignas(64) std::atomic<uint32_t> arrived_{0};
  std::atomic<bool> broken_{false};
  std::atomic<bool> stop_{false};

  Body body_ = nullptr;
  void* arg_ = nullptr;
  std::mutex mutex_, error_mutex_;
  std::string error_;
  std::vector<std::thread> workers_;
  std::vector<char*> local_;
  char* shared_ = nullptr;
  size_t local_bytes_ = 0, shared_bytes_ = 0;
};

std::vector<int>
default_cpus();  // allowed CPUs, one per physical core first, limited by the cgroup's quota

}  // namespace ktg
