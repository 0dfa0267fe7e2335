#include "signal_word.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace ktg {

namespace {

long now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000L + t.tv_nsec;
}

void futex(std::atomic<uint32_t>& word, int op, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), op | FUTEX_PRIVATE_FLAG, value, nullptr,
          nullptr, 0);
}

}  // namespace

bool Signal::spin(uint32_t old, long spin_ns) const {
  if (spin_ns <= 0) return value() != old;
  const long until = now_ns() + spin_ns;
  do {
    for (int i = 0; i < 32; ++i) {
      if (value() != old) return true;
      __builtin_ia32_pause();
    }
  } while (now_ns() < until);
  return false;
}

void Signal::wait_past(uint32_t old, long spin_ns) {
  if (spin(old, spin_ns)) return;
  // The sleeper counts itself, then looks again; raise() changes the word, then looks for sleepers.
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  while (word_.load(std::memory_order_seq_cst) == old) futex(word_, FUTEX_WAIT, old);
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

void Signal::raise() {
  word_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) futex(word_, FUTEX_WAKE, INT_MAX);
}

}  // namespace ktg
