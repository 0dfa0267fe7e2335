# pyright: basic, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
"""Packed weights times 2 to 32 rows of x, by way of shared memory: y = x @ w.T + b, act(gate) * up.

Tiles become operands of x's dtype, rounded once, as a dense copy of the weight would be, and meet
the rows in `tl.dot`; every warp of a program has columns of its own, and their sums meet at the
end.  For 17 to 32 rows (10,240 x 8,192 int4 takes 43 us, with packed_tokens.py 56), for 9 to 16 of
wide weights of few columns, and for 2 to 16 rows of float32, in full precision.
Floor: the packed bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ktgraph.triton_kernels.compile import CompileCase
from ktgraph.triton_kernels.dependent import enter
from ktgraph.triton_kernels.dots import dot
from ktgraph.triton_kernels.packed import FORMATS, PackedWeight
from ktgraph.triton_kernels.packed_sums import Launch, product_case, store_product
from ktgraph.triton_kernels.tile_words import (
    group_scale,
    has_row_scales,
    loaded,
    operands,
    row_scales,
    span_of,
    step_of,
)


@dataclass(frozen=True)
class RowsConfig:
    """tiles: tiles of a program (even where gate meets up).

    kb: 64-byte blocks of a warp in a step, 16 at least (a group of 128 columns).
    """

    tiles: int
    kb: int
    warps: int
    stages: int


ROWS = RowsConfig(2, 16, 4, 3)
ROWS_F16 = RowsConfig(2, 16, 4, 2)  # a third stage spills 8 bytes of int8
ROWS_F32 = RowsConfig(1, 16, 4, 1)  # two tiles spill: no pair of gate and up


def rows_launch(x: torch.Tensor, w: PackedWeight, config: RowsConfig) -> Launch:
    whole = w.blocks % (config.kb * config.warps) == 0 and w.tiles % config.tiles == 0
    extra = {
        "EVEN": whole and w.blocks * w.step == w.cols,
        "TILES": config.tiles,
        "KB": config.kb,
        "STAGES": config.stages,
        "BLOCK_T": 16 if x.shape[0] <= 16 else 32,
        "SPLIT": config.warps,
    }
    return (triton.cdiv(w.tiles, config.tiles),), _rows, extra


@triton.jit
def _rows(
    x,
    data,
    bias,
    y,
    tokens,
    rows,
    cols,
    blocks,
    tiles,
    groups,
    scales_at,
    row_scales_at,
    stride_x,
    stride_y,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    GATE_UP: tl.constexpr,
    ACT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    TILES: tl.constexpr,
    KB: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SPLIT: tl.constexpr,
):
    enter()
    STEP: tl.constexpr = step_of(FORMAT)
    kind = x.dtype.element_ty
    n = tl.arange(0, TILES * 16)
    tile, row = tl.program_id(0) * TILES + n // 16, n % 16
    token = tl.arange(0, BLOCK_T)
    split = tl.arange(0, SPLIT)[:, None, None]
    words_at = data.to(tl.pointer_type(tl.int32)) + tile[None, None, :].to(tl.int64) * blocks * 16
    acc = tl.zeros([SPLIT, BLOCK_T, TILES * 16], dtype=tl.float32)
    for start in tl.range(0, blocks, SPLIT * KB, num_stages=STAGES):
        kb = start + split * KB + tl.arange(0, KB)[None, :, None]
        inside = (tile < tiles)[None, None, :] & (kb < blocks)
        words = loaded(words_at + kb * 16 + row[None, None, :], inside, EVEN)
        if FORMAT == "int8":
            scale, less = 1.0, 0.0
        else:
            scale, less = _group_scales(
                data + scales_at,
                tile,
                row,
                tiles,
                start + split * KB,
                blocks,
                groups,
                FORMAT,
                span_of(FORMAT, GROUP),
                EVEN,
                TILES,
                KB,
                SPLIT,
            )
        col = (start + split * KB) * STEP + tl.arange(0, KB * STEP)[None, None, :]
        mask = (token < tokens)[None, :, None] & (col < cols)
        xs = tl.load(x + token[None, :, None] * stride_x + col, mask=mask, other=0.0)
        planes = _planes(xs, SPLIT, BLOCK_T, KB, FORMAT)
        if FORMAT == "fp8":
            part = tl.zeros([SPLIT, BLOCK_T, TILES * 16], dtype=tl.float32)
            for i in tl.static_range(STEP):
                part = dot(planes[i], operands(words, i, 1.0, 0.0, FORMAT, kind), part)
            acc += part * scale
        else:
            for i in tl.static_range(STEP):
                acc = dot(planes[i], operands(words, i, scale, less, FORMAT, kind), acc)
    sums = tl.sum(acc, axis=0)
    if has_row_scales(FORMAT):
        sums *= row_scales(data + row_scales_at, tile * 16 + row, tile < tiles)[None, :]
    store_product(sums, token, bias, y, tokens, rows, stride_y, GATE_UP, ACT, HAS_BIAS, TILES)


@triton.jit
def _group_scales(
    scales,
    tile,
    row,
    tiles,
    first,
    blocks,
    groups,
    FORMAT: tl.constexpr,
    SPAN: tl.constexpr,
    EVEN: tl.constexpr,
    TILES: tl.constexpr,
    KB: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Scales [SPLIT, KB, TILES * 16] of which every group is loaded once: blocks of a step are
    whole groups, SPAN blocks each.  Of fp8 [SPLIT, 1, TILES * 16]: a step lies in one group."""
    tl.static_assert(SPAN % KB == 0 if FORMAT == "fp8" else KB % SPAN == 0)
    COUNT: tl.constexpr = 1 if FORMAT == "fp8" else KB // SPAN
    kb = first + SPAN * tl.arange(0, COUNT)[None, :, None]
    inside = (tile < tiles)[None, None, :] & (kb < blocks)
    at = (tile[None, None, :] * groups + kb // SPAN) * 16 + row[None, None, :]
    scale, less = group_scale(scales, at, inside, FORMAT, EVEN)
    if FORMAT == "fp8":
        return scale, less
    else:
        scale = _repeated(scale, SPAN)
        return scale, _repeated(less, SPAN) if FORMAT == "int4p" else less


@triton.jit
def _repeated(values, TIMES: tl.constexpr):
    """[a, b, c] -> [a, b * TIMES, c], each row of the middle axis TIMES times."""
    a: tl.constexpr = values.shape[0]
    b: tl.constexpr = values.shape[1]
    c: tl.constexpr = values.shape[2]
    return tl.reshape(tl.broadcast_to(values[:, :, None, :], [a, b, TIMES, c]), [a, b * TIMES, c])


@triton.jit
def _planes(xs, SPLIT: tl.constexpr, BLOCK_T: tl.constexpr, KB: tl.constexpr, FORMAT: tl.constexpr):
    """x [SPLIT, BLOCK_T, KB * step] as a [SPLIT, BLOCK_T, KB] for each number of a word."""
    if step_of(FORMAT) == 4:
        even, odd = tl.split(tl.reshape(xs, [SPLIT, BLOCK_T, KB, 2, 2]))
        p0, p2 = tl.split(even)
        p1, p3 = tl.split(odd)
        return p0, p1, p2, p3
    else:
        even, odd = tl.split(tl.reshape(xs, [SPLIT, BLOCK_T, KB, 2, 2, 2]))
        low0, low2 = tl.split(even)
        low1, low3 = tl.split(odd)
        p0, p4 = tl.split(low0)
        p1, p5 = tl.split(low1)
        p2, p6 = tl.split(low2)
        p3, p7 = tl.split(low3)
        return p0, p4, p1, p5, p2, p6, p3, p7


def _case(
    format: str, dtype: str, config: RowsConfig, tokens: int, gate_up: bool, even: bool
) -> CompileCase:
    constants = {
        "TILES": config.tiles,
        "KB": config.kb,
        "STAGES": config.stages,
        "BLOCK_T": tokens,
        "SPLIT": config.warps,
    }
    return product_case(
        _rows,
        tokens,
        format,
        dtype,
        constants,
        gate_up=gate_up,
        even=even,
        warps=config.warps,
        stages=config.stages,
    )


COMPILE_CASES = [
    *(_case(format, "bf16", ROWS, 32, up, up) for format in FORMATS for up in (False, True)),
    *(_case(format, "fp16", ROWS_F16, 32, False, True) for format in FORMATS),
    *(_case(format, "fp32", ROWS_F32, 16, False, False) for format in FORMATS),
]

__all__ = ["ROWS", "ROWS_F16", "ROWS_F32", "RowsConfig", "rows_launch"]
