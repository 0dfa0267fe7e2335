// The avx512_bf16 unit: all kernels, compiled with this unit's flags (CMakeLists.txt) in a
// namespace of its own.
#define KTG_ISA avx512_bf16
#define KTG_BF16_DOTS 1
#include "plan.h"

#include "kernels/vec_avx512.h"

#include "kernels/all.h"

namespace ktg {

const IsaTable& avx512_bf16_table() {
  static constexpr IsaTable table{"avx512_bf16", avx512_bf16::kKernels,
                                  int(sizeof avx512_bf16::kKernels / sizeof(Kernel)),
                                  avx512_bf16::pack, avx512_bf16::default_many_rows};
  return table;
}

}  // namespace ktg
