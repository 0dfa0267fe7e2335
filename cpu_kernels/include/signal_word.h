// A counter that threads wait on: they spin for a bounded time, then sleep in the kernel.
#pragma once
#include <atomic>
#include <cstdint>

namespace ktg {

// How long a thread spins before it sleeps. There is no sched_yield in between: where another
// process shares the CPU it gives away a whole time slice (500 barriers: 1,200 ms against 35 ms).
inline constexpr long kSpinNs = 50'000;

class alignas(64) Signal {
 public:
  uint32_t value() const { return word_.load(std::memory_order_acquire); }
  void raise();                                // value + 1; a system call only for sleepers
  void wait_past(uint32_t old, long spin_ns);  // returns once the value is no longer `old`

 private:
  bool spin(uint32_t old, long spin_ns) const;

  std::atomic<uint32_t> word_{0};
  alignas(64) std::atomic<uint32_t> sleepers_{0};  // apart: sleepers do not disturb spinners
};

}  // namespace ktg
