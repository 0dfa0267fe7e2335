// Persistent pinned threads that run one function together (SPMD), with a barrier between steps.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "plan.h"
#include "signal_word.h"

namespace ktg {

class Driver;

// Thrown out of barrier() in threads that wait for one that failed.
struct Aborted {};

class Engine {
 public:
  // Whoever calls run() is worker 0, kept on cpus[0] for as long; the others are pinned to
  // cpus[1:].
  // nodes: the memory node of each thread, by any numbers; empty: as the system says.
  Engine(int threads, std::vector<int> cpus, const std::string& isa, std::vector<int> nodes = {});
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  using Body = void (*)(void* arg, int tid);
  // Runs body on all threads and returns when all are done; rethrows the first exception of any of
  // them. The caller holds mutex().
  void run(Body body, void* arg);

  // A barrier of all threads, in two steps.
  uint32_t arrive();
  bool opened(uint32_t ticket) const { return phase_.value() != ticket; }
  void await(uint32_t ticket);
  void set_error(const std::string& message);

  int threads() const { return threads_; }
  const std::vector<int>& cpus() const { return cpus_; }
  int node(int tid) const { return node_of_[tid]; }  // 0 .. nodes() - 1
  int nodes() const { return int(node_numbers_.size()); }
  const std::vector<int>& node_numbers() const { return node_numbers_; }  // the system's
  const IsaTable& table() const { return *table_; }
  char* local(int tid) const { return local_[tid]; }
  char* shared() const { return shared_; }
  void reserve(size_t shared_bytes, size_t local_bytes);  // grows only; never while running
  std::mutex& mutex() { return mutex_; }                  // one run at a time
  void check_process() const;                             // throws in a forked child

  // How long workers spin for the next run before they sleep; a service raises it while it watches.
  long spin_ns() const { return spin_ns_; }  // at barriers
  long idle_spin_ns() const { return idle_spin_ns_.load(std::memory_order_relaxed); }
  void set_idle_spin_ns(long ns) { idle_spin_ns_.store(ns, std::memory_order_relaxed); }

  Driver& driver();            // the thread that runs submitted calls; started on first use
  void pin_as(int tid) const;  // pins the calling thread to the CPU of worker `tid`, names it

 private:
  void assign_nodes(std::vector<int> nodes);
  void worker(int tid);
  void body_guarded(int tid);
  void fail_run(const std::string& message);

  int threads_;
  std::vector<int> cpus_;
  std::vector<int> node_of_, node_numbers_;
  const IsaTable* table_;
  int pid_;
  long spin_ns_;
  std::atomic<long> idle_spin_ns_;

  Signal start_, done_;                           // of runs
  Signal phase_;                                  // of the barrier
  alignas(64) std::atomic<uint32_t> running_{0};  // workers still in the run
  alignas(64) std::atomic<uint32_t> arrived_{0};  // at the barrier
  alignas(64) std::atomic<bool> broken_{false};
  std::atomic<bool> stop_{false};

  Body body_ = nullptr;
  void* arg_ = nullptr;
  std::mutex mutex_, error_mutex_, driver_mutex_;
  std::string error_;
  std::vector<std::thread> workers_;
  std::unique_ptr<Driver> driver_;
  std::vector<char*> local_;
  char* shared_ = nullptr;
  size_t local_bytes_ = 0, shared_bytes_ = 0;
};

}  // namespace ktg
