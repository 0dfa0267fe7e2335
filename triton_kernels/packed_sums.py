# pyright: basic, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
"""What the packed products (packed_row, packed_tokens, packed_rows) do with their sums.

Programs that share the columns of tiles leave their sums in memory, and the one that comes last
adds them, in their order: same inputs, same bits.  Then y = sums + b, or, of tiles gate and up in
turn, y = act(gate) * up, rounded once (gate and up before, as in the reference).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from ktgraph.triton_kernels.activations import gated
from ktgraph.triton_kernels.compile import CompileCase
from ktgraph.triton_kernels.counters import counters
from ktgraph.triton_kernels.packed import GROUPS
from ktgraph.triton_kernels.rounding import rounded, through
from ktgraph.triton_kernels.tile_rows import gate_and_up
from ktgraph.triton_kernels.tile_words import logical_row

Launch = tuple[tuple[int, ...], Any, dict[str, Any]]
"""Grid, kernel and the arguments of this kernel alone; `product_of_tiles` knows the others."""


def shared_sums(programs: int, splits: int, size: int, device: torch.device) -> dict[str, Any]:
    """Where programs that share columns put `size` sums each, and how many have arrived."""
    if splits == 1:
        return {"parts": None, "counters": None}
    parts = torch.empty(programs * splits * size, dtype=torch.float32, device=device)
    return {"parts": parts, "counters": counters(programs, device)}


@triton.jit
def finish(
    acc,  # [BLOCK_T, TILES * 16] f32, without what other programs have of it
    parts,
    counters,
    bias,
    y,
    tokens,
    rows,
    stride_y,
    GATE_UP: tl.constexpr,
    ACT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILES: tl.constexpr,
    SPLITS: tl.constexpr,
):
    BLOCK_T: tl.constexpr = acc.shape[0]
    SIZE: tl.constexpr = BLOCK_T * TILES * 16
    token = tl.arange(0, BLOCK_T)
    if SPLITS == 1:
        store_product(acc, token, bias, y, tokens, rows, stride_y, GATE_UP, ACT, HAS_BIAS, TILES)
    else:
        # The program that comes last adds all shares, in their order.
        at = token[:, None] * (TILES * 16) + tl.arange(0, TILES * 16)[None, :]
        at = parts + tl.program_id(0).to(tl.int64) * (SPLITS * SIZE) + at
        tl.store(at + tl.program_id(1) * SIZE, acc)
        tl.debug_barrier()
        arrived = counters + tl.program_id(0)
        if tl.atomic_add(arrived, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(arrived, 0)
            total = tl.zeros([BLOCK_T, TILES * 16], dtype=tl.float32)
            for n in tl.static_range(SPLITS):
                total += tl.load(at + n * SIZE, cache_modifier=".cg")
            store_product(
                total, token, bias, y, tokens, rows, stride_y, GATE_UP, ACT, HAS_BIAS, TILES
            )


@triton.jit
def store_product(
    acc,  # [BLOCK_T, TILES * 16] f32
    token,
    bias,
    y,
    tokens,
    rows,
    stride_y,
    GATE_UP: tl.constexpr,
    ACT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILES: tl.constexpr,
):
    kind = y.dtype.element_ty
    first = tl.program_id(0) * TILES
    if ACT == "":
        n = tl.arange(0, TILES * 16)
        at, is_row = logical_row(first + n // 16, n % 16, rows, GATE_UP)
        if HAS_BIAS:
            acc += tl.load(bias + at, mask=is_row, other=0.0).to(tl.float32)[None, :]
        result = acc
    else:
        gate, up = gate_and_up(acc, TILES)
        result = gated(through(gate, kind), through(up, kind), 0.0, 0.0, ACT, kind)
        at = first * 8 + tl.arange(0, TILES * 8)
        is_row = at < rows // 2
    target = y + token.to(tl.int64)[:, None] * stride_y + at[None, :]
    tl.store(target, rounded(result, kind), mask=(token < tokens)[:, None] & is_row[None, :])


_SIZES = ("rows", "cols", "blocks", "scales_at", "row_scales_at", "stride_x", "stride_y")
_TYPES = {
    "parts": "*fp32:16",
    "counters": "*i32:16",
    "share": "i32:16",
    "data": "*u8:16",
    "tokens": "i32",
    "tiles": "i32",
    "groups": "i32",
    **{n: "i32:16" for n in _SIZES},
}


def product_case(
    kernel: Any,
    tokens: int,
    format: str,
    dtype: str,
    constants: Mapping[str, Any],
    *,
    gate_up: bool,
    even: bool,
    warps: int,
    stages: int,
    more: str = "",
    lockstep: bool = False,
) -> CompileCase:
    """constants: of this kernel alone.  even: columns are whole steps.  more: of the name."""
    every: dict[str, Any] = {
        "FORMAT": format,
        "GROUP": GROUPS[format],
        "GATE_UP": gate_up,
        "ACT": "silu" if gate_up else "",
        "HAS_BIAS": not gate_up,
        "EVEN": even,
        **constants,
    }
    types = {**_TYPES, **{n: f"*{dtype}:16" for n in ("x", "bias", "y")}}
    form = f"{'gate_up' if gate_up else 'linear'} {'even' if even else 'odd'}{more}"
    return CompileCase(
        kernel,
        f"linear_packed T={tokens} {format} {dtype} {form}",
        {n: t for n, t in types.items() if n in kernel.arg_names and n not in every},
        every,
        warps,
        stages,
        lockstep=lockstep,
    )


def splits_of_case(even: bool) -> dict[str, Any]:
    """Constants of a case; programs share columns that are not even, to have both compiled."""
    return {"SPLITS": 1, "parts": None, "counters": None} if even else {"SPLITS": 2}


__all__ = [
    "Launch",
    "finish",
    "product_case",
    "shared_sums",
    "splits_of_case",
    "store_product",
]
