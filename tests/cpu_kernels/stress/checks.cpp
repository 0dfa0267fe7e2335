#include "checks.h"

#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

#include "service.h"

#define KTG_ISA checks
#define KTG_IN inline
#include "kernels/units.h"

namespace stress {

using namespace ktg;
using ktg::checks::NearUnits;

namespace {

void expect(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error("check failed: " + what);
}

Ctx context(Engine& e, int tid, uint32_t* counters) {
  Ctx c{};
  c.engine = &e, c.tid = tid, c.threads = e.threads(), c.counters = counters;
  c.node = e.node(tid), c.nodes = e.nodes();
  return c;
}

struct Failing {
  Engine* engine;
  int barriers, worker, at;  // worker throws before barrier `at`
};

void failing_body(void* arg, int tid) {
  const Failing& f = *static_cast<Failing*>(arg);
  const Ctx ctx = context(*f.engine, tid, nullptr);
  for (int i = 0; i < f.barriers; ++i) {
    if (tid == f.worker && i == f.at) throw std::runtime_error("thrown on purpose");
    barrier(ctx);
  }
}

std::string error_of(Engine& engine, Failing& f) {
  try {
    std::lock_guard<std::mutex> lock(engine.mutex());
    engine.run(failing_body, &f);
  } catch (const std::runtime_error& e) {
    return e.what();
  }
  return "";
}

struct Units {
  Engine* engine;
  long parts, count;
  std::vector<uint32_t> counters;
  std::vector<std::atomic<int>> taken;
};

void near_body(void* arg, int tid) {
  Units& u = *static_cast<Units*>(arg);
  const Ctx ctx = context(*u.engine, tid, u.counters.data());
  NearUnits units{ctx, 1, u.parts, u.count};
  for (long part, index; units.next(&part, &index);) ++u.taken.at(size_t(index * u.parts + part));
}

void plain_body(void* arg, int tid) {
  Units& u = *static_cast<Units*>(arg);
  const Ctx ctx = context(*u.engine, tid, u.counters.data());
  for (long unit; (unit = next_unit(ctx, 0)) < long(u.taken.size());) ++u.taken[size_t(unit)];
}

void check_once(Engine& e, Engine::Body body, long parts, long count) {
  Units u{&e, parts, count, std::vector<uint32_t>(kPhases * 16),
          std::vector<std::atomic<int>>(size_t(parts * count))};
  {
    std::lock_guard<std::mutex> lock(e.mutex());
    e.run(body, &u);
  }
  for (const auto& n : u.taken) expect(n == 1, "each unit is handed out once");
}

// One thread alone takes the units of its own node, then those of the next ones.
void check_own_first() {
  Engine e(3, {}, "", {0, 1, 2});
  std::vector<uint32_t> counters(kPhases * 16);
  const Ctx ctx = context(e, 1, counters.data());
  // Five parts among three nodes: part 0; 1 and 2; 3 and 4. Two units of each.
  const long order[][2] = {{1, 0}, {2, 0}, {1, 1}, {2, 1}, {3, 0},
                           {4, 0}, {3, 1}, {4, 1}, {0, 0}, {0, 1}};
  NearUnits units{ctx, 0, 5, 2};
  long part, index;
  for (const auto& unit : order)
    expect(units.next(&part, &index) && part == unit[0] && index == unit[1],
           "a node's own units come first");
  expect(!units.next(&part, &index), "units end");
  reset_units(ctx, 0);
  NearUnits again{ctx, 0, 5, 2};
  expect(again.next(&part, &index) && part == 1, "units begin again after reset_units");
}

}  // namespace

void check_failing_worker(Engine& engine, uint64_t seed) {
  Failing f{&engine, 8, int(seed % uint64_t(engine.threads())), int(seed / 64 % 8)};
  const std::string want = "worker " + std::to_string(f.worker) + ": thrown on purpose";
  const std::string got = error_of(engine, f);
  expect(got == want, "run() throws \"" + want + "\", got \"" + got + "\"");
  f.worker = -1;
  expect(error_of(engine, f).empty(), "the run after a failed one works");
}

void check_units() {
  check_own_first();
  Engine one(1, {}, ""), three(3, {}, ""), nodes(5, {}, "", {7, 3, 3, 5, 7});
  for (Engine* e : {&one, &three, &nodes})
    for (long parts : {0L, 1L, 2L, 7L, 40L}) {
      check_once(*e, plain_body, parts, 3);
      check_once(*e, near_body, parts, 3);
    }
}

void check_mailbox_failure() {
  Engine engine(2, {}, "");
  Program empty(engine, 4, 4);
  alignas(64) uint32_t words[32] = {};
  const int32_t header[2] = {5, 0};  // more than the plan allows
  Service service(engine, 0);
  CallSizes sizes;
  sizes.header = header;
  service.add({words, words + 16, &empty, sizes});
  service.start();
  for (uint32_t value : {3u, 4u}) {
    std::atomic_ref(words[0]).store(value, std::memory_order_release);
    while (std::atomic_ref(words[16]).load(std::memory_order_acquire) != (value | kReplyFailed))
      std::this_thread::yield();
  }
  service.stop();
  std::string said;
  try {
    service.check();
  } catch (const std::runtime_error& e) {
    said = e.what();
  }
  expect(said.find("mailbox 0: Plan.run: T = 5") == 0, "the first failure is kept, got " + said);
}

}  // namespace stress
