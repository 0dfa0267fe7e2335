# pyright: basic, reportCallIssue=false
"""moe.by_weight: each token's experts by descending weight.

A program is one token.  The place of expert k is the number of experts with a larger weight, or an
equal one that stands before it: K * K comparisons in registers, and no sort.
Floor: 16 * T * K bytes over memory bandwidth; a launch, for the sizes that occur.
"""

import torch
import triton
import triton.language as tl

from ktgraph.triton_kernels.compile import CompileCase
from ktgraph.triton_kernels.dependent import dependent_launch, enter
from ktgraph.triton_kernels.registry import cuda_kernel


@triton.jit
def _by_weight(ids, weights, out_ids, out_weights, K: tl.constexpr, WIDTH: tl.constexpr):
    enter()
    start = tl.program_id(0).to(tl.int64) * K
    k = tl.arange(0, WIDTH)
    real = k < K
    weight = tl.load(weights + start + k, mask=real, other=0.0)
    mine, other = weight[:, None], weight[None, :]
    stands_before = (other == mine) & (k[None, :] < k[:, None])
    ahead = ((other > mine) | stands_before) & real[None, :]
    place = start + tl.sum(ahead.to(tl.int32), 1)
    tl.store(out_ids + place, tl.load(ids + start + k, mask=real), mask=real)
    tl.store(out_weights + place, weight, mask=real)


@cuda_kernel("moe.by_weight", name="triton.moe_by_weight", nmse=0.0)
def by_weight(ids: torch.Tensor, weights: torch.Tensor, *, out) -> None:
    """ids i32[..., K], weights f32[..., K] -> the same, sorted."""
    if not ids.numel():
        return
    assert ids.is_contiguous()
    assert weights.is_contiguous()
    assert out[0].is_contiguous()
    assert out[1].is_contiguous()
    top_k = ids.shape[-1]
    _by_weight[(ids.numel() // top_k,)](
        ids,
        weights,
        *out,
        K=top_k,
        WIDTH=triton.next_power_of_2(top_k),
        num_warps=1,
        **dependent_launch(),
    )


COMPILE_CASES = [
    CompileCase(
        _by_weight,
        f"moe_by_weight K={k}",
        {"ids": "*i32:16", "weights": "*fp32:16", "out_ids": "*i32:16", "out_weights": "*fp32:16"},
        {"K": k, "WIDTH": triton.next_power_of_2(k)},
        num_warps=1,
    )
    for k in (6, 8)
]
