// The avx512 unit: all kernels, compiled with this unit's flags (CMakeLists.txt) in a namespace of
// its own.
#define KTG_ISA avx512
#include "plan.h"

#include "kernels/vec_avx512.h"

#include "kernels/all.h"

namespace ktg {

const IsaTable& avx512_table() {
  static constexpr IsaTable table{"avx512", avx512::kKernels,
                                  int(sizeof avx512::kKernels / sizeof(Kernel)), avx512::pack,
                                  avx512::default_many_rows};
  return table;
}

}  // namespace ktg
