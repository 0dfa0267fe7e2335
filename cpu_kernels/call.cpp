#include "call.h"

#include <unistd.h>

#include <stdexcept>

#include "engine.h"

namespace ktg {

void run_sized(Program& program, const CallSizes& s) {
  const long tokens = s.header ? s.header[0] : s.tokens, rows = s.header ? s.header[1] : s.rows;
  program.run(tokens, rows, s.has_batch ? &s.batch : nullptr, nullptr);
}

Call::Call(Program& program, CallSizes sizes)
    : program_(program),
      sizes_(std::move(sizes)),
      state_(std::make_shared<State>()),
      pid_(getpid()) {}

Call::~Call() {
  if (getpid() == pid_) finish();  // in a forked child nobody would
}

void Call::claim() {
  program_.engine().check_process();
  if (state_->pending.exchange(true))
    throw std::runtime_error("Call: the run before is still pending; wait() for it first");
}

void Call::set(CallSizes sizes) {
  claim();
  sizes_ = std::move(sizes);
  state_->pending = false;
}

void Call::execute(Program& program, const CallSizes& sizes, State& state) noexcept {
  state.error.clear();
  try {
    run_sized(program, sizes);
  } catch (const std::exception& e) {
    state.error = *e.what() ? e.what() : "unknown error";
  } catch (...) {
    state.error = "unknown error";
  }
  state.ran = true;
  state.pending = false;
  state.finished.raise();
}

void Call::run() {
  claim();
  const std::shared_ptr<State> state = state_;  // the call may be gone before this returns
  execute(program_, sizes_, *state);
}

void Call::submit() {
  claim();
  program_.engine().driver().push(*this);
}

bool Call::done() const { return !state_->pending; }

void Call::finish() {
  const uint32_t seen = state_->finished.value();
  if (state_->pending) state_->finished.wait_past(seen, kSpinNs);
}

void Call::wait() {
  program_.engine().check_process();
  finish();
  if (refused_.exchange(false))
    throw std::runtime_error("Call.wait: a run was asked for while the one before was pending");
  if (!state_->ran) throw std::runtime_error("Call.wait: the call was never submitted");
  if (!state_->error.empty()) throw std::runtime_error(state_->error);
}

Driver::Driver(Engine& engine) : engine_(engine), thread_([this] { work(); }) {}

Driver::~Driver() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  pushed_.raise();
  thread_.join();
}

void Driver::push(Call& call) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back({&call.program_, &call.sizes_, call.state_});
  }
  pushed_.raise();
}

bool Driver::pop(Item* item) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (queue_.empty()) return false;
  *item = std::move(queue_.front());
  queue_.pop_front();
  return true;
}

void Driver::work() {
  engine_.pin_as(0);
  for (;;) {
    const uint32_t seen = pushed_.value();
    Item item{};
    if (pop(&item)) {
      Call::execute(*item.program, *item.sizes, *item.state);
      continue;
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (stop_) return;
    }
    pushed_.wait_past(seen, engine_.idle_spin_ns());
  }
}

}  // namespace ktg

namespace {

// Nothing may be thrown into the caller's C code: what keeps a call from starting is told by
// wait().
void guarded(void* call, void (ktg::Call::*start)()) {
  ktg::Call& c = *static_cast<ktg::Call*>(call);
  try {
    (c.*start)();
  } catch (...) {
    c.refuse();
  }
}

}  // namespace

extern "C" {
void ktgraph_run_call(void* call) { guarded(call, &ktg::Call::run); }
void ktgraph_submit_call(void* call) { guarded(call, &ktg::Call::submit); }
void ktgraph_wait_call(void* call) { static_cast<ktg::Call*>(call)->finish(); }
}
