// Every kernel of one ISA unit, and the table it exports. Included once per unit, after the unit's
// vector header.
#pragma once
#include "plan.h"

#include "kernels/rows.h"

#include "kernels/math.h"

#include "kernels/gemm.h"

#include "kernels/columns.h"

#include "kernels/weights.h"

#include "kernels/tile_ops.h"

#include "kernels/int_rows.h"

#include "kernels/int_format.h"

#include "kernels/int_format_int4.h"
#include "kernels/int_format_int4p.h"
#include "kernels/int_format_int4z.h"
#include "kernels/int_format_int8.h"
#include "kernels/int_format_int8_group.h"
#include "kernels/int_format_mxfp4.h"

#include "kernels/int_format_gguf.h"

#include "kernels/int_format_q4_k.h"

#include "kernels/int_format_iq4_xs.h"
#include "kernels/int_format_q4_0.h"
#include "kernels/int_format_q5_k.h"
#include "kernels/int_format_q6_k.h"
#include "kernels/int_format_q8_0.h"

#include "kernels/int_panel.h"

#include "kernels/many_rows.h"

#include "kernels/units.h"

#include "kernels/int_tiles.h"

#include "kernels/int_weights.h"

#include "kernels/bf16_tiles.h"

#include "kernels/fp8_tiles.h"

#include "kernels/rows_times.h"

#include "kernels/mlp_sort.h"

#include "kernels/attention.h"
#include "kernels/cache.h"
#include "kernels/elementwise.h"
#include "kernels/linear.h"
#include "kernels/mlp.h"
#include "kernels/norm.h"
#include "kernels/rope.h"
#include "kernels/route.h"

#include "kernels/quantize_groups.h"

#include "kernels/quantize.h"

#include "kernels/mla_expanded.h"
#include "kernels/paged_attend.h"

namespace ktg {
namespace KTG_ISA {
namespace {

constexpr Kernel kKernels[] = {
    {"cpu.embedding", embedding, nullptr, copy_local},
    {"cpu.rms_norm", rms_norm, nullptr, row_local},
    {"cpu.add_rms_norm", add_rms_norm, nullptr, row_local},
    {"cpu.linear", linear, linear_shared, linear_local},
    {"cpu.batched_linear", batched_linear, linear_shared, linear_local},
    {"cpu.rope", rope, nullptr, rope_local},
    {"cpu.kv_append_latent", kv_append_latent, nullptr, append_local},
    {"cpu.kv_append", kv_append, nullptr, append_local},
    {"cpu.rope_append_latent", rope_append_latent, nullptr, rope_local},
    {"cpu.rope_append", rope_append, nullptr, rope_local},
    {"cpu.mla_attend", mla_attend, mla_shared, mla_local},
    {"cpu.mla_attend_expanded", mla_attend_expanded, nullptr, expanded_local},
    {"cpu.sdpa", sdpa, sdpa_shared, sdpa_local},
    {"cpu.moe_route", moe_route, route_shared, route_local},
    {"cpu.grouped_mlp", grouped_mlp, grouped_shared, grouped_local},
    {"cpu.swiglu", swiglu, swiglu_shared, swiglu_local},
    {"cpu.add", elementwise<EL_ADD, 2>, nullptr, elementwise_local<2>},
    {"cpu.add3", elementwise<EL_ADD3, 3>, nullptr, elementwise_local<3>},
    {"cpu.mul", elementwise<EL_MUL, 2>, nullptr, elementwise_local<2>},
    {"cpu.sigmoid", elementwise<EL_SIGMOID, 1>, nullptr, elementwise_local<1>},
    {"cpu.copy", elementwise<EL_COPY, 1>, nullptr, elementwise_local<1>},
    {"cpu.gather_rows", gather_rows, nullptr, copy_local},
};

}  // namespace
}  // namespace KTG_ISA
}  // namespace ktg
