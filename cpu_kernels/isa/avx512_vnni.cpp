// The avx512_vnni unit: all kernels, compiled with this unit's flags (CMakeLists.txt) in a
// namespace of its own.
#define KTG_ISA avx512_vnni
#include "plan.h"

#include "kernels/vec_avx512.h"

#include "kernels/all.h"

namespace ktg {

const IsaTable& avx512_vnni_table() {
  static constexpr IsaTable table{"avx512_vnni", avx512_vnni::kKernels,
                                  int(sizeof avx512_vnni::kKernels / sizeof(Kernel)),
                                  avx512_vnni::pack, avx512_vnni::default_many_rows};
  return table;
}

}  // namespace ktg
