// Random calls for the stress run: steps over exactly sized buffers, so that a sanitizer sees every
// byte read or written outside them.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "program.h"

namespace stress {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t bits();
  long below(long n) { return long(bits() % uint64_t(n)); }
  long between(long low, long high) { return low + below(high - low + 1); }
  float normal();  // about normal, in -3 .. 3

 private:
  uint64_t state_;
};

using Bytes = std::unique_ptr<char, void (*)(void*)>;

struct Step {
  std::string kernel;
  std::vector<ktg::Operand> operands;
  std::map<std::string, ktg::AttrValue> attrs;
};

struct Output {
  char* data;
  size_t bytes;
};

// One call. The outputs are written by each run; everything else stays as it is.
struct Work {
  std::string text;  // what it is, for messages
  long tokens = 0, rows = 0;
  std::vector<Step> steps;
  std::vector<Output> outputs;
  bool has_batch = false;
  ktg::BatchArg batch{};
  std::vector<Bytes> memory;
};

// A random call of a random kind; `isa` packs its weights.
std::unique_ptr<Work> random_work(Random& random, const ktg::IsaTable& isa);

}  // namespace stress
