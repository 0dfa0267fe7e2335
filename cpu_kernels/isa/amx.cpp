// The amx unit: all kernels, compiled with this unit's flags (CMakeLists.txt) in a namespace of
// its own.
#define KTG_ISA amx
#define KTG_TILES 1
#include "plan.h"

#include "kernels/vec_avx512.h"

#include "kernels/all.h"

namespace ktg {

const IsaTable& amx_table() {
  static constexpr IsaTable table{"amx", amx::kKernels, int(sizeof amx::kKernels / sizeof(Kernel)),
                                  amx::pack, amx::default_many_rows};
  return table;
}

}  // namespace ktg
