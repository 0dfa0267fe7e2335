#include "service.h"

#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>

#include "engine.h"

namespace ktg {

namespace {

constexpr long kShortestSleepNs = 20'000, kLongestSleepNs = 1'000'000;

using Clock = std::chrono::steady_clock;

void sleep_ns(long ns) {
  const timespec t{0, ns};
  nanosleep(&t, nullptr);
}

long nanoseconds_of(Clock::time_point t) {
  return std::chrono::nanoseconds(t.time_since_epoch()).count();
}

}  // namespace

void SpanRing::put(const Span& span) {
  const unsigned long at = put_.load(std::memory_order_relaxed);
  if (at - taken_.load(std::memory_order_acquire) == kSize) return;
  spans_[at % kSize] = span;
  put_.store(at + 1, std::memory_order_release);
}

std::vector<Span> SpanRing::take() {
  const unsigned long end = put_.load(std::memory_order_acquire);
  std::vector<Span> found;
  for (unsigned long at = taken_.load(std::memory_order_relaxed); at != end; ++at)
    found.push_back(spans_[at % kSize]);
  taken_.store(end, std::memory_order_release);
  return found;
}

Service::Service(Engine& engine, long spin_ns)
    : engine_(engine), spin_ns_(spin_ns), pid_(getpid()) {
  if (spin_ns < 0) throw std::invalid_argument("Service: spin_us must not be negative");
}

Service::~Service() {
  if (getpid() != pid_) {  // a forked child has no such thread
    new std::thread(std::move(thread_));
    return;
  }
  stop();
}

void Service::add(Mailbox box) {
  if (running()) throw std::runtime_error("Service.add: the service runs already; stop() it first");
  if (&box.program->engine() != &engine_)
    throw std::invalid_argument("Service.add: the plan belongs to another engine");
  for (uint32_t* word : {box.request, box.reply})
    if (!word || reinterpret_cast<uintptr_t>(word) % 4)
      throw std::invalid_argument(
          "Service.add: request and reply must be 4-byte aligned addresses");
  if (box.request == box.reply)
    throw std::invalid_argument("Service.add: request and reply must be two words");
  boxes_.push_back(std::move(box));
}

void Service::start() {
  engine_.check_process();
  if (running()) throw std::runtime_error("Service.start: it runs already");
  if (boxes_.empty()) throw std::runtime_error("Service.start: no mailbox was added");
  stop_ = false;
  {
    std::lock_guard<std::mutex> lock(error_mutex_);
    error_.clear();
  }
  // Workers watch for as long as the service does, unless they share their CPUs.
  if (engine_.spin_ns() > 0) engine_.set_idle_spin_ns(std::max(engine_.idle_spin_ns(), spin_ns_));
  thread_ = std::thread([this] { watch(); });
}

void Service::stop() {
  if (!running()) return;
  engine_.check_process();
  stop_ = true;
  thread_.join();
  engine_.set_idle_spin_ns(engine_.spin_ns());
}

void Service::check() {
  std::lock_guard<std::mutex> lock(error_mutex_);
  if (!error_.empty()) throw std::runtime_error(error_);
}

void Service::answer(Mailbox& box, uint32_t value) {
  bool failed;
  {
    std::lock_guard<std::mutex> lock(error_mutex_);
    failed = !error_.empty();  // what follows a failure may be built on its outputs
  }
  if (!failed) try {
      const Clock::time_point begin = Clock::now();
      run_sized(*box.program, box.sizes);
      const long begin_ns = nanoseconds_of(begin), end_ns = nanoseconds_of(Clock::now());
      busy_ns_ += end_ns - begin_ns;
      spans_.put({int(&box - boxes_.data()), begin_ns, end_ns});
      ++served_;
    } catch (const std::exception& e) {
      std::lock_guard<std::mutex> lock(error_mutex_);
      error_ = "mailbox " + std::to_string(&box - boxes_.data()) + ": " + e.what();
      failed = true;
    }
  std::atomic_ref(*box.reply)
      .store(failed ? value | kReplyFailed : value, std::memory_order_release);
}

// Answers one request, if there is one; the mailbox after the last answered is looked at first.
bool Service::look() {
  for (size_t i = 0; i < boxes_.size(); ++i) {
    const size_t at = (next_ + i) % boxes_.size();
    const std::atomic_ref request(*boxes_[at].request);
    const uint32_t value = request.load(std::memory_order_acquire);
    if (value == 0) continue;
    request.store(0, std::memory_order_relaxed);
    next_ = (at + 1) % boxes_.size();
    answer(boxes_[at], value);
    return true;
  }
  return false;
}

void Service::watch() {
  engine_.pin_as(0);
  prctl(PR_SET_TIMERSLACK, 1000UL);  // ns; the default lets a short sleep last 50 us longer
  Clock::time_point last = Clock::now();
  for (long sleep = kShortestSleepNs; !stop_.load(std::memory_order_relaxed);) {
    bool answered = false;
    for (int i = 0; i < 16 && !answered; ++i) {
      answered = look();
      if (!answered) __builtin_ia32_pause();
    }
    if (answered) {
      last = Clock::now(), sleep = kShortestSleepNs;
    } else if (Clock::now() - last >= std::chrono::nanoseconds(spin_ns_)) {
      sleep_ns(sleep);
      sleep = std::min(2 * sleep, kLongestSleepNs);
    }
  }
}

}  // namespace ktg
