// The amx_emulated unit: all kernels, compiled with this unit's flags (CMakeLists.txt) in a
// namespace of its own. Tile code without tile hardware: for tests.
#define KTG_ISA amx_emulated
#define KTG_TILES 2
#include "plan.h"

#include "kernels/vec_avx2.h"

#include "kernels/all.h"

namespace ktg {

const IsaTable& amx_emulated_table() {
  static constexpr IsaTable table{"amx_emulated", amx_emulated::kKernels,
                                  int(sizeof amx_emulated::kKernels / sizeof(Kernel)),
                                  amx_emulated::pack, amx_emulated::default_many_rows};
  return table;
}

}  // namespace ktg
