// What every kernel takes: one signature line and one attribute line each (registry.cpp), parsed
// once.
#pragma once
#include <string>
#include <vector>

#include "plan.h"

namespace ktg {

struct OperandSpec {
  std::string name;
  std::string kind;  // "f" (f32 or bf16), "f32", "i32", "weight", "state1", "state2", "batch"; "|"
                     // joins two
  std::vector<std::string>
      dims;  // names, equal names are equal sizes; "?X" is an axis that may be absent (size 1)
  bool optional = false;
  bool output = false;
};

struct AttrSpec {
  std::string name;
  Attr id;
  std::vector<std::string> choices;  // empty: a number
  bool integer = false, boolean = false, required = true;
  double value = 0;  // default
  std::string default_text;
};

struct KernelSpec {
  std::string name, signature, attributes, note;
  std::vector<OperandSpec> operands;
  std::vector<AttrSpec> attrs;
};

const std::vector<KernelSpec>& kernel_specs();
const KernelSpec* find_spec(const std::string& name);

}  // namespace ktg
