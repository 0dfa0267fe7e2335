# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""The routed experts' outputs of a token, weighted and added in order of k.

    out[t] = sum over k of weights[t, k] * y[t * K + k]       ids[t, k] >= 0; float32 sum, one store

Tiling: a program owns BLOCK columns of one token.  Bytes: y once, out once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ktgraph.triton_kernels.compile import CompileCase
from ktgraph.triton_kernels.dependent import dependent_launch, enter
from ktgraph.triton_kernels.rounding import rounded

_BLOCK, _WARPS = 1024, 4


def weighted_sum(
    y: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
) -> None:
    """y[T*K, D] (rows of skipped pairs are not read), ids and weights [T, K] -> out[T, D]."""
    tokens, top_k = ids.shape
    width = y.shape[1]
    _weighted_sum[(tokens, triton.cdiv(width, _BLOCK))](
        y,
        ids,
        weights,
        out,
        width,
        out.stride(0),
        K=top_k,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
        **dependent_launch(),
    )


@triton.jit
def _weighted_sum(y, ids, weights, out, width, stride_out, K: tl.constexpr, BLOCK: tl.constexpr):
    enter()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for k in tl.static_range(K):
        pair = token * K + k
        filled = tl.where(tl.load(ids + pair) < 0, 0, width)  # a skipped pair's row holds garbage
        row = tl.load(y + pair * width + column, mask=column < filled, other=0.0)
        total += tl.load(weights + pair) * row.to(tl.float32)
    at = out + token * stride_out + column
    tl.store(at, rounded(total, out.dtype.element_ty), mask=column < width)


COMPILE_CASES = [
    CompileCase(
        _weighted_sum,
        f"weighted_sum K={k}",
        {
            "y": "*bf16:16",
            "ids": "*i32:16",
            "weights": "*fp32:16",
            "out": "*bf16:16",
            "width": "i32:16",
            "stride_out": "i32:16",
        },
        {"K": k, "BLOCK": _BLOCK},
        num_warps=_WARPS,
    )
    for k in (2, 8)
]

__all__ = ["weighted_sum"]
