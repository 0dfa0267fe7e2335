// ktg_stress [calls] [seed]: random calls with changing sizes, routings, formats, thread counts and
// ways to start them; outputs must be bit for bit those of one thread. Meant to run under ASan with
// UBSan, and under TSan (`make sanitize`).
#include <cstdio>
#include <cstring>
#include <map>
#include <stdexcept>
#include <thread>

#include "checks.h"
#include "isa.h"
#include "service.h"
#include "works.h"

using namespace ktg;
using namespace stress;

namespace {

constexpr int kThreads[] = {1, 2, 3, 5};  // the first is what the others are compared with
constexpr const char* kLevels[] = {"amx_emulated", "avx2",        "avx2_vnni", "avx512",
                                   "avx512_vnni",  "avx512_bf16", "amx"};
constexpr int kPoison = 0xFF;  // NaN in every float format, -1 as an id

struct Level {
  std::string name;
  std::vector<std::unique_ptr<Engine>> engines;  // of kThreads
};

// Threads of larger engines lie on two memory nodes, as far as units go.
std::unique_ptr<Engine> make_engine(int threads, const std::string& level) {
  std::vector<int> nodes;
  for (int t = 0; threads > 2 && t < threads; ++t) nodes.push_back(t % 2);
  return std::make_unique<Engine>(threads, std::vector<int>{}, level, nodes);
}

std::vector<Level> make_levels() {
  std::vector<Level> out;
  for (const char* name : kLevels) {
    try {
      choose_isa(name);
    } catch (const std::runtime_error&) {
      continue;  // not on this machine, or not built
    }
    Level level{name, {}};
    for (int n : kThreads) level.engines.push_back(make_engine(n, name));
    out.push_back(std::move(level));
  }
  return out;
}

CallSizes sizes_of(const Work& w) {
  CallSizes s;
  s.tokens = w.tokens, s.rows = w.rows, s.has_batch = w.has_batch, s.batch = w.batch;
  return s;
}

void by_mailbox(Program& p, const Work& w) {
  alignas(64) uint32_t words[32] = {};
  Service service(p.engine(), 100'000);
  service.add({words, words + 16, &p, sizes_of(w)});
  service.start();
  std::atomic_ref(words[0]).store(7, std::memory_order_release);
  while (std::atomic_ref(words[16]).load(std::memory_order_acquire) == 0) std::this_thread::yield();
  service.stop();
  service.check();
}

void by_call(Program& p, const Work& w, bool submitted) {
  Call call(p, sizes_of(w));
  submitted ? call.submit() : call.run();
  call.wait();
}

// Runs the work on an engine in one of several ways; returns the bytes of its outputs.
std::vector<char> outputs_of(Engine& engine, const Work& w, long way) {
  for (const Output& o : w.outputs) std::memset(o.data, kPoison, o.bytes);
  Program p(engine, 0, 0);
  for (const Step& s : w.steps) p.add(s.kernel, s.operands, s.attrs);
  if (way == 0) by_mailbox(p, w);
  if (way >= 1 && way <= 4) by_call(p, w, way > 1);
  if (way >= 5) p.run(w.tokens, w.rows, w.has_batch ? &w.batch : nullptr, nullptr);
  std::vector<char> bytes;
  for (const Output& o : w.outputs) bytes.insert(bytes.end(), o.data, o.data + o.bytes);
  return bytes;
}

bool same_bits(Level& level, const Work& w, Random& random) {
  const std::vector<char> want = outputs_of(*level.engines[0], w, 5);
  for (size_t i = 1; i < level.engines.size(); ++i) {
    const long way = random.below(20);
    if (outputs_of(*level.engines[i], w, way) == want) continue;
    std::fprintf(stderr, "stress: %s on %s: %d threads (way %ld) differ from one\n", w.text.c_str(),
                 level.name.c_str(), kThreads[i], way);
    return false;
  }
  return true;
}

// Two engines at work at the same time, each started by a thread of its own.
bool side_by_side(Level& level, Random& random) {
  const IsaTable& isa = level.engines[0]->table();
  std::unique_ptr<Work> works[2] = {random_work(random, isa), random_work(random, isa)};
  std::vector<char> want[2], got[2];
  for (int i = 0; i < 2; ++i) want[i] = outputs_of(*level.engines[0], *works[i], 5);
  std::thread other([&] { got[1] = outputs_of(*level.engines[1], *works[1], 5); });
  got[0] = outputs_of(*level.engines[2], *works[0], 5);
  other.join();
  if (got[0] == want[0] && got[1] == want[1]) return true;
  std::fprintf(stderr, "stress: side by side: %s and %s differ\n", works[0]->text.c_str(),
               works[1]->text.c_str());
  return false;
}

bool one_round(std::vector<Level>& levels, Random& random, long call) {
  Level& level = levels[call % long(levels.size())];
  if (call % 50 == 17 && !side_by_side(level, random)) return false;
  if (call % 50 == 33) {  // engines come and go
    const size_t i = size_t(random.below(long(level.engines.size())));
    level.engines[i] = make_engine(kThreads[i], level.name);
  }
  if (call % 25 == 8) check_failing_worker(*level.engines[1 + random.below(3)], random.bits());
  return same_bits(level, *random_work(random, level.engines[0]->table()), random);
}

}  // namespace

int main(int argc, char** argv) {
  const long calls = argc > 1 ? std::atol(argv[1]) : 10'000;
  const long seed = argc > 2 ? std::atol(argv[2]) : 1;
  Random random{uint64_t(seed)};
  try {
    check_units();
    check_mailbox_failure();
    std::vector<Level> levels = make_levels();
    for (long call = 0; call < calls; ++call) {
      if (!one_round(levels, random, call)) {
        std::fprintf(stderr, "stress: failed at call %ld of seed %ld\n", call, seed);
        return 1;
      }
    }
    std::printf("stress: %ld random calls, seed %ld, %zu instruction sets: equal bits\n", calls,
                seed, levels.size());
  } catch (const std::exception& e) {
    std::fprintf(stderr, "stress: %s\n", e.what());
    return 1;
  }
  return 0;
}
