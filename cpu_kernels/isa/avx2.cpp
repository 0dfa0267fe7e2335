// The avx2 unit: all kernels, compiled with this unit's flags (CMakeLists.txt) in a namespace of
// its own.
#define KTG_ISA avx2
#include "plan.h"

#include "kernels/vec_avx2.h"

#include "kernels/all.h"

namespace ktg {

const IsaTable& avx2_table() {
  static constexpr IsaTable table{"avx2", avx2::kKernels,
                                  int(sizeof avx2::kKernels / sizeof(Kernel)), avx2::pack,
                                  avx2::default_many_rows};
  return table;
}

}  // namespace ktg
