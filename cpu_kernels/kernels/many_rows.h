// Rows from which a weight's kernel has another path, where the plan brings no measured figure.
#pragma once

namespace ktg {
namespace KTG_ISA {
namespace {

// Integer weights: from packed bytes to panels or tiles (equal bits). bf16 and fp8 weights that may
// take bf16 rows: from f32 rows to those.
static long default_many_rows(const WeightArg& w) {
  if (w.activations == ACTS_INT8) return kHasTiles ? 7 : 2 * kIntRows + 1;
  return kHasTiles ? 1 : 8;
}

}  // namespace
}  // namespace KTG_ISA
}  // namespace ktg
