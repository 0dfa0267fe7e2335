# pyright: basic, reportCallIssue=false, reportOperatorIssue=false
"""moe.split_ids: the choices whose expert has a slot on the GPU, and the others.

    slot = slots[id]        hot = slot            cold = -1 if slot >= 0 else id

Tiling: a program takes 1,024 choices.  Bytes: 4 read and 8 written a choice and one load of the
table, which lies in L1; the time is that of one launch.
"""

import torch
import triton
import triton.language as tl

from ktgraph.triton_kernels.compile import CompileCase
from ktgraph.triton_kernels.dependent import dependent_launch, enter
from ktgraph.triton_kernels.registry import cuda_kernel

_BLOCK, _WARPS = 1024, 4


@cuda_kernel("moe.split_ids", name="triton.split_ids", nmse=0.0)
def split_ids(ids: torch.Tensor, slots: torch.Tensor, *, out) -> None:
    hot, cold = out
    assert all(t.is_contiguous() for t in (ids, slots, hot, cold))
    count = ids.numel()
    if count:
        grid = (triton.cdiv(count, _BLOCK),)
        _split_ids[grid](
            ids, slots, hot, cold, count, BLOCK=_BLOCK, num_warps=_WARPS, **dependent_launch()
        )


@triton.jit
def _split_ids(ids, slots, hot, cold, count, BLOCK: tl.constexpr):
    enter()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    id = tl.load(ids + at, mask=inside, other=-1)
    slot = tl.load(slots + id, mask=id >= 0, other=-1)  # a skipped choice has none
    tl.store(hot + at, slot, mask=inside)
    tl.store(cold + at, tl.where(slot >= 0, -1, id), mask=inside)


COMPILE_CASES = [
    CompileCase(
        _split_ids,
        "split_ids",
        {"ids": "*i32:16", "slots": "*i32:16", "hot": "*i32:16", "cold": "*i32:16", "count": "i32"},
        {"BLOCK": _BLOCK},
        num_warps=_WARPS,
    )
]

__all__ = ["split_ids"]
