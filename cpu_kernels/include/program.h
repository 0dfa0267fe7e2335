// A native plan: checked instructions and how to run them.
#pragma once
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "engine.h"
#include "registry.h"

namespace ktg {

using AttrValue = std::variant<bool, long, double, std::string>;

class Program {
 public:
  explicit Program(Engine& engine, long max_tokens, long max_rows)
      : engine_(engine), max_tokens_(max_tokens), max_rows_(max_rows) {}

  // Checks everything once; throws std::invalid_argument naming kernel, operand, expected and got.
  int add(const std::string& kernel, const std::vector<Operand>& operands,
          const std::map<std::string, AttrValue>& attrs);
  void run(long tokens, long rows, const BatchArg* batch,
           double* seconds);  // seconds: per instruction, or null
  // Bytes a run of these sizes keeps: (shared by all threads, of each thread).
  std::pair<size_t, size_t> scratch(const Sizes& sizes);  // waits for a run that is on its way
  Engine& engine() const { return engine_; }
  int size() const { return int(steps_.size()); }
  const std::string& name(int i) const { return steps_[i].spec->name; }

 private:
  struct Step {
    const KernelSpec* spec;
    const Kernel* kernel;
    Instr instr;
  };
  std::pair<size_t, size_t> resolve(const Sizes& sizes);
  void check_batch(const Sizes& sizes, const BatchArg* batch) const;
  void body(int tid);

  Engine& engine_;
  long max_tokens_, max_rows_;
  std::vector<Step> steps_;
  std::vector<uint32_t> counters_;
  Sizes sizes_{};
  const BatchArg* batch_ = nullptr;
  double* seconds_ = nullptr;
};

}  // namespace ktg
