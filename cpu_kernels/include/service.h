// Mailboxes: a device writes a flag in memory that both sides see, the engine's threads run a plan,
// and answer by a flag.
#pragma once
#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "call.h"

namespace ktg {

// request: the device writes a value in 1 .. 2^30 - 1 (a constant, or an epoch); the service takes
// it by writing 0. reply: the same value once the outputs are written, with kReplyFailed added
// where the run failed. So a device that waits for "reply >= value" is released in either case. The
// device clears or raises the value before it asks again.
inline constexpr uint32_t kReplyFailed = 1u << 30;

struct Mailbox {
  uint32_t* request;
  uint32_t* reply;
  Program* program;
  CallSizes sizes;
};

// When a request was answered: nanoseconds of the steady clock. Written by one thread and taken by
// another without locks; while the ring is full, further spans are dropped.
struct Span {
  int box;
  long begin_ns, end_ns;
};

class SpanRing {
 public:
  void put(const Span& span);
  std::vector<Span> take();  // oldest first

 private:
  static constexpr unsigned long kSize = 1024;  // more than a step has hand-overs

  std::array<Span, kSize> spans_;
  std::atomic<unsigned long> put_{0}, taken_{0};
};

// One thread that watches mailboxes and runs their plans as worker 0 of the engine. After `spin_ns`
// without a request it looks every 20 us, then ever more rarely, down to once a millisecond.
class Service {
 public:
  Service(Engine& engine, long spin_ns);
  ~Service();
  Service(const Service&) = delete;
  Service& operator=(const Service&) = delete;

  void add(Mailbox mailbox);  // before start
  void start();
  void stop();   // after the request that is being answered; further ones stay unanswered
  void check();  // throws the first failure; later ones are answered as failed too
  bool running() const { return thread_.joinable(); }
  long served() const { return served_; }
  long busy_ns() const { return busy_ns_; }  // spent in the plans of answered requests
  std::vector<Span> take_spans() { return spans_.take(); }  // of one thread at a time

 private:
  void watch();
  bool look();
  void answer(Mailbox& box, uint32_t value);

  Engine& engine_;
  const long spin_ns_;
  const int pid_;
  std::vector<Mailbox> boxes_;
  size_t next_ = 0;  // where the next request is expected
  std::atomic<bool> stop_{false};
  std::atomic<long> served_{0}, busy_ns_{0};
  SpanRing spans_;
  std::mutex error_mutex_;
  std::string error_;
  std::thread thread_;
};

}  // namespace ktg
