# pyright: basic, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
"""Packed tiles to dense row-major matrices: what a product with many tokens reads.

    out[i, r, c] = value of W[first + i][r, c], rounded to out's dtype; gate rows, then up rows

Tiling: a program reads KB blocks of one tile (contiguous, 64 * KB bytes) and writes 16 rows x
KB * step columns.  Floor: packed bytes read + dense bytes written; int4 to bf16 is 0.53 + 2 bytes a
weight, 1.7e12 weights a second at 4.3 TB/s, so 19 instructions each are free.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
import triton
import triton.language as tl

from ktgraph.triton_kernels.compile import CompileCase
from ktgraph.triton_kernels.dependent import dependent_launch, enter
from ktgraph.triton_kernels.packed import FORMATS, GROUPS, PackedWeight
from ktgraph.triton_kernels.rounding import rounded
from ktgraph.triton_kernels.tile_words import (
    group_scale,
    loaded,
    logical_row,
    row_scales,
    span_of,
    step_of,
    values,
)


@dataclass(frozen=True)
class UnpackConfig:
    """kb: blocks of a program (columns: times 8 for int4, times 4 for int8)."""

    kb: int = 64
    warps: int = 4


DEFAULT = UnpackConfig()
SWEEP = tuple(UnpackConfig(kb, warps) for kb in (32, 64, 128) for warps in (2, 4, 8))


def unpack(
    weight: PackedWeight, out: torch.Tensor, first: int = 0, config: UnpackConfig = DEFAULT
) -> None:
    """Matrices first .. first + len(out) - 1 of the stack into out[n, rows, cols]."""
    count, rows, cols = out.shape
    assert (rows, cols) == (weight.rows, weight.cols)
    assert 0 <= first <= first + count <= weight.count
    assert out.stride(2) == 1
    grid = (triton.cdiv(weight.blocks, config.kb), weight.tiles, count)
    _unpack[grid](
        weight.data,
        out,
        first,
        weight.stride,
        out.stride(0),
        out.stride(1),
        rows,
        cols,
        weight.blocks,
        weight.groups,
        weight.scales_at,
        weight.row_scales_at,
        FORMAT=weight.format,
        GROUP=weight.group,
        GATE_UP=weight.gate_up,
        KB=config.kb,
        num_warps=config.warps,
        **dependent_launch(),
    )


@triton.jit
def _unpack(
    data,
    out,
    first,
    stride,
    stride_matrix,
    stride_row,
    rows,
    cols,
    blocks,
    groups,
    scales_at,
    row_scales_at,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    GATE_UP: tl.constexpr,
    KB: tl.constexpr,
):
    enter()
    STEP: tl.constexpr = step_of(FORMAT)
    tile, place = tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = tl.arange(0, 16)
    kb = tl.program_id(0) * KB + tl.arange(0, KB)
    matrix = data + (first + place) * stride
    inside = (kb < blocks)[None, :] & (row < 16)[:, None]
    at = (tile * blocks + kb)[None, :] * 16 + row[:, None]
    words = loaded(matrix.to(tl.pointer_type(tl.int32)) + at, inside, False)
    if FORMAT == "int8":
        scale, less = 1.0, 0.0
    else:
        at = (tile * groups + kb // span_of(FORMAT, GROUP))[None, :] * 16 + row[:, None]
        scale, less = group_scale(matrix + scales_at, at, inside, FORMAT, False)
    if FORMAT == "int4p":  # the products in the order of the CPU's unpack, for equal bits
        scale *= row_scales(matrix + row_scales_at, tile * 16 + row, row < 16)[:, None]
    w = _in_order(words, scale, less, KB, FORMAT)
    if FORMAT == "int8":
        w *= row_scales(matrix + row_scales_at, tile * 16 + row, row < 16)[:, None]
    found, is_row = logical_row(tile, row, rows, GATE_UP)
    col = tl.program_id(0) * KB * STEP + tl.arange(0, KB * STEP)
    target = out + place * stride_matrix + found.to(tl.int64)[:, None] * stride_row + col[None, :]
    mask = is_row[:, None] & (col < cols)[None, :]
    tl.store(target, rounded(w, out.dtype.element_ty), mask=mask)


@triton.jit
def _in_order(words, scale, less, KB: tl.constexpr, FORMAT: tl.constexpr):
    """[16, KB] words to [16, KB * step] values in the order of columns: the joins of bits 2, 1, 0
    of a column's number within its block stay within a thread."""
    if step_of(FORMAT) == 4:
        low = tl.join(values(words, 0, scale, less, FORMAT), values(words, 2, scale, less, FORMAT))
        high = tl.join(values(words, 1, scale, less, FORMAT), values(words, 3, scale, less, FORMAT))
        return tl.reshape(tl.join(low, high), [16, KB * 4])
    else:
        c0 = tl.join(values(words, 0, scale, less, FORMAT), values(words, 1, scale, less, FORMAT))
        c1 = tl.join(values(words, 2, scale, less, FORMAT), values(words, 3, scale, less, FORMAT))
        c2 = tl.join(values(words, 4, scale, less, FORMAT), values(words, 5, scale, less, FORMAT))
        c3 = tl.join(values(words, 6, scale, less, FORMAT), values(words, 7, scale, less, FORMAT))
        return tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), [16, KB * 8])


_TYPES = {
    "data": "*u8:16",
    "first": "i32",
    "stride": "i32:16",
    "stride_matrix": "i64:16",
    "stride_row": "i32:16",
    "rows": "i32:16",
    "cols": "i32:16",
    "blocks": "i32:16",
    "groups": "i32",
    "scales_at": "i32:16",
    "row_scales_at": "i32:16",
}
COMPILE_CASES = [
    CompileCase(
        _unpack,
        f"unpack {format} {dtype}{' gate_up' if gate_up else ''}",
        {**_TYPES, "out": f"*{dtype}:16"},
        {
            "FORMAT": format,
            "GROUP": GROUPS[format],
            "GATE_UP": gate_up,
            "KB": DEFAULT.kb,
        },
        num_warps=DEFAULT.warps,
    )
    for format, (dtype, gate_up) in product(FORMATS, (("bf16", True), ("fp16", False), ("fp32", 0)))
]

__all__ = ["DEFAULT", "SWEEP", "UnpackConfig", "unpack"]
