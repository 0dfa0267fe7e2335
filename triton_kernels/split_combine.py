# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
"""Combine the partial results of split-KV attention (flash-decoding, Dao et al. 2023).

    m = max_s m_s        out = sum_s exp2(m_s - m) acc_s  /  sum_s exp2(m_s - m) l_s

Split s of an output row (token, head) left the largest score m_s (base 2), the sum l_s and the
weighted, not yet divided sum acc_s in f32.  An empty split has m_s = -inf and wrote no acc_s: it
is not read.  One program per output row, all splits in one tile, added in one fixed order.
Floor: 4 * SPLITS * (V + 2) bytes per row, which lie in L2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ktgraph.triton_kernels.attention_tiles import padded, rounded, with_sink
from ktgraph.triton_kernels.compile import CompileCase
from ktgraph.triton_kernels.dependent import dependent_launch, enter


@triton.jit
def combine_kernel(
    acc,
    top,
    total,
    sinks,
    out,
    out_t,
    out_h,
    splits,
    H: tl.constexpr,
    V: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SINKS: tl.constexpr,
):
    enter()
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    token, head = row // H, row % H
    s = tl.arange(0, BLOCK_S)
    d = part * BLOCK_V + tl.arange(0, BLOCK_V)
    tops = tl.load(top + row * splits + s, mask=s < splits, other=float("-inf"))
    used = tops > float("-inf")
    sums = tl.load(total + row * splits + s, mask=used, other=0.0)
    parts = tl.load(
        acc + (row * splits + s)[:, None] * V + d[None, :],
        mask=used[:, None] & (d < V)[None, :],
        other=0.0,
    )
    best = tl.max(tops, 0)
    factor = tl.exp2(tops - tl.where(best == float("-inf"), 0.0, best))
    whole = tl.sum(sums * factor, 0)
    if SINKS:
        shrink, whole = with_sink(best, whole, tl.load(sinks + head).to(tl.float32))
        factor *= shrink
    result = tl.sum(parts * factor[:, None], 0) / tl.where(whole > 0, whole, 1.0)
    tl.store(
        out + token * out_t + head * out_h + d, rounded(result, out.dtype.element_ty), mask=d < V
    )


@dataclass(frozen=True)
class Partials:
    """Scratch of one split call: acc [T*H, splits, V], top and total [T*H, splits], f32."""

    acc: torch.Tensor
    top: torch.Tensor
    total: torch.Tensor

    @staticmethod
    def like(out: torch.Tensor, splits: int) -> Partials:
        rows = out.shape[0] * out.shape[1]
        sizes = ((rows, splits, out.shape[2]), (rows, splits), (rows, splits))
        return Partials(*(torch.empty(s, dtype=torch.float32, device=out.device) for s in sizes))


def combine(parts: Partials, out: torch.Tensor, sinks: torch.Tensor | None) -> None:
    """out[T, H, V] of all splits."""
    tokens, heads, width = out.shape
    splits = parts.top.shape[1]
    block_s = padded(splits, 2)
    block_v = min(padded(width), max(16, 8192 // block_s))
    combine_kernel[(tokens * heads, triton.cdiv(width, block_v))](
        parts.acc,
        parts.top,
        parts.total,
        sinks,
        out,
        out.stride(0),
        out.stride(1),
        splits,
        H=heads,
        V=width,
        BLOCK_S=block_s,
        BLOCK_V=block_v,
        SINKS=sinks is not None,
        num_warps=4,
        **dependent_launch(),
    )


def _case(splits: int, width: int, sinks: bool) -> CompileCase:
    signature = {n: "*fp32:16" for n in ("acc", "top", "total")}
    signature |= {"out": "*bf16:16", "out_t": "i32:16", "out_h": "i32:16", "splits": "i32"}
    constants = {"H": 32, "V": width, "BLOCK_S": splits, "SINKS": sinks}
    constants["BLOCK_V"] = min(width, 8192 // splits)
    if sinks:
        signature["sinks"] = "*bf16:16"
    else:
        constants["sinks"] = None
    return CompileCase(
        combine_kernel, f"split_combine {splits} splits, V={width}", signature, constants
    )


COMPILE_CASES = [_case(4, 128, False), _case(64, 128, True), _case(64, 512, False)]

__all__ = ["COMPILE_CASES", "Partials", "combine", "combine_kernel"]
