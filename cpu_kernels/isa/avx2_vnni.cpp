// The avx2_vnni unit: all kernels, compiled with this unit's flags (CMakeLists.txt) in a namespace
// of its own.
#define KTG_ISA avx2_vnni
#include "plan.h"

#include "kernels/vec_avx2.h"

#include "kernels/all.h"

namespace ktg {

const IsaTable& avx2_vnni_table() {
  static constexpr IsaTable table{"avx2_vnni", avx2_vnni::kKernels,
                                  int(sizeof avx2_vnni::kKernels / sizeof(Kernel)), avx2_vnni::pack,
                                  avx2_vnni::default_many_rows};
  return table;
}

}  // namespace ktg
