// Calls that run without the caller: a plan with its sizes, submitted to a thread of the engine.
#pragma once
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "program.h"

namespace ktg {

// What a call runs with. `header`, when given, holds int32 tokens and rows, read as the call starts
// (a device may write them); `keep` owns what `batch` points to.
struct CallSizes {
  long tokens = 0, rows = 0;
  const int32_t* header = nullptr;
  bool has_batch = false;
  BatchArg batch{};
  std::shared_ptr<const void> keep;
};
void run_sized(Program& program, const CallSizes& sizes);

// A prepared call: run, submitted and waited for any number of times, one at a time.
class Call {
 public:
  Call(Program& program, CallSizes sizes);
  ~Call();  // waits for a submitted run
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  void set(CallSizes sizes);  // of the runs to come; throws while one is pending
  void submit();              // queues the call; throws while it is pending
  void run();                 // on the calling thread as worker 0; returns even when it failed
  bool done() const;          // false only while a run is pending
  void finish();              // until done
  void wait();                // until done; throws what the last run threw
  void refuse() { refused_ = true; }  // wait() will say that a start came while one was pending

 private:
  friend class Driver;
  struct State {
    std::atomic<bool> pending{false};
    Signal finished;
    std::string error;
    std::atomic<bool> ran{false};
  };
  void claim();
  static void execute(Program& program, const CallSizes& sizes, State& state) noexcept;

  Program& program_;
  CallSizes sizes_;
  std::shared_ptr<State> state_;  // the driver may still hold it when the call is gone
  std::atomic<bool> refused_{false};
  int pid_;
};

// Runs submitted calls in order, as worker 0 of its engine.
class Driver {
 public:
  explicit Driver(Engine& engine);
  ~Driver();  // after the calls that are queued
  void push(Call& call);

 private:
  void work();
  struct Item {
    Program* program;
    const CallSizes* sizes;
    std::shared_ptr<Call::State> state;
  };
  bool pop(Item* item);

  Engine& engine_;
  std::mutex mutex_;
  std::deque<Item> queue_;
  bool stop_ = false;
  Signal pushed_;
  std::thread thread_;
};

}  // namespace ktg

// For cudaLaunchHostFunc and its like: `call` is a ktg::Call. They return nothing and throw
// nothing; an error stays in the call, and Call.wait() raises it.
extern "C" {
__attribute__((visibility("default"))) void ktgraph_run_call(void* call);
__attribute__((visibility("default"))) void ktgraph_submit_call(void* call);
__attribute__((visibility("default"))) void ktgraph_wait_call(void* call);
}
