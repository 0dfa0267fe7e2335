# pyright: basic, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
"""Packed weights times one row of x, without matrix units: y = x @ w.T + b, or act(gate) * up.

Every program multiplies TILES tiles with the row (tile_rows.py), its first words on their way
before it waits for x.  Programs share the columns of few tiles, to fill the GPU; shares are added
in their order (packed_sums.py).
Floor: the packed bytes.  Budget: tile_words.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
import triton
import triton.language as tl

from ktgraph.triton_kernels.compile import CompileCase
from ktgraph.triton_kernels.dependent import start_dependents
from ktgraph.triton_kernels.packed import FORMATS, PackedWeight
from ktgraph.triton_kernels.packed_sums import (
    Launch,
    finish,
    product_case,
    shared_sums,
    splits_of_case,
)
from ktgraph.triton_kernels.tile_bytes import in_quads
from ktgraph.triton_kernels.tile_rows import tiles_times_rows

FULL_GPU = 640  # tiles that fill an H200, with a program's columns shared or not


@dataclass(frozen=True)
class RowConfig:
    """tiles: tiles of a program (even where gate meets up).

    kb: 64-byte blocks of a step, 16 * warps at most.
    ahead: with one stage; see `tiles_times_rows`.
    splits: programs that share a tile's columns; 0: by `splits_of`.
    """

    tiles: int
    kb: int
    warps: int
    stages: int
    ahead: bool = False
    splits: int = 0


ROW = RowConfig(1, 128, 8, 1, ahead=True)
ROW_BYTES = RowConfig(2, 128, 8, 1, ahead=True)
ROW_SHALLOW = RowConfig(2, 64, 4, 1, ahead=True)  # of int8, and of bytes
_FP8 = RowConfig(2, 64, 8, 1, ahead=True)  # scales take as many registers as words
ROW_GATE_UP = {  # of up to FULL_GPU, and of more
    "int4": (ROW_BYTES, ROW_BYTES),
    "int4p": (ROW_BYTES, ROW_BYTES),
    "int8": (RowConfig(2, 64, 4, 1, ahead=True, splits=4), RowConfig(2, 64, 8, 1, splits=1)),
    "fp8": (_FP8, _FP8),
    "bytes": (ROW_BYTES, ROW_SHALLOW),
}
ROW_SWEEP = tuple(
    RowConfig(tiles, 16 * warps, warps, 1, ahead=ahead, splits=splits)
    for tiles, warps, ahead, splits in product((1, 2), (4, 8), (True, False), (0, 1, 2, 4))
)


def row_launch(x: torch.Tensor, w: PackedWeight, config: RowConfig) -> Launch:
    assert x.shape[0] == 1
    programs, steps = triton.cdiv(w.tiles, config.tiles), triton.cdiv(w.blocks, config.kb)
    splits = min(config.splits, steps) or splits_of(w.tiles, steps)
    whole = (
        w.blocks % config.kb == 0 and w.blocks * w.step == w.cols and w.tiles % config.tiles == 0
    )
    extra = {
        "EVEN": whole,
        "TILES": config.tiles,
        "KB": config.kb,
        "STAGES": config.stages,
        "AHEAD": config.ahead,
        "BYTES": w.rounds(x.dtype),
        "QUADS": in_quads(x),
        "SPLITS": splits,
        "share": triton.cdiv(steps, splits) * config.kb,
        **shared_sums(programs, splits, config.tiles * 16, x.device),
    }
    return (programs, splits), _row, extra


def splits_of(tiles: int, steps: int) -> int:
    """Programs that share a tile's columns: as many as fill the GPU, with work to overlap in each.

    The next kernel's programs fill what the last wave leaves free.
    """
    return max(n for n in (1, 2, 4) if n == 1 or (tiles * n <= FULL_GPU and 2 * steps >= 3 * n))


@triton.jit
def _row(
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
    share,
    parts,
    counters,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    GATE_UP: tl.constexpr,
    ACT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    TILES: tl.constexpr,
    KB: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    BYTES: tl.constexpr,
    QUADS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    start_dependents()
    first, split = tl.program_id(0) * TILES, tl.program_id(1)
    tile = first + tl.arange(0, TILES)
    shown = tile[:, None, None]
    acc = tiles_times_rows(
        x,
        data,
        (shown * 0).to(tl.int64),
        shown,
        shown < tiles,
        cols,
        blocks,
        split * share,
        tl.minimum((split + 1) * share, blocks),
        groups,
        scales_at,
        row_scales_at,
        FORMAT,
        GROUP,
        EVEN,
        TILES,
        KB,
        STAGES,
        AHEAD,
        BYTES,
        QUADS,
        True,
    )
    acc = tl.reshape(acc, [1, TILES * 16])
    finish(
        acc,
        parts,
        counters,
        bias,
        y,
        tokens,
        rows,
        stride_y,
        GATE_UP,
        ACT,
        HAS_BIAS,
        TILES,
        SPLITS,
    )


def _case(
    format: str, dtype: str, config: RowConfig, gate_up: bool, even: bool, rounds: bool = False
) -> CompileCase:
    constants = {
        "TILES": config.tiles,
        "KB": config.kb,
        "STAGES": config.stages,
        "AHEAD": config.ahead,
        "BYTES": rounds,
        "QUADS": even,
        **splits_of_case(even),
    }
    return product_case(
        _row,
        1,
        format,
        dtype,
        constants,
        gate_up=gate_up,
        even=even,
        warps=config.warps,
        stages=config.stages,
        more=" bytes" if rounds else "",
    )


COMPILE_CASES = [
    *(
        _case(format, dtype, ROW, False, even)
        for format in FORMATS
        for dtype, even in (("bf16", True), ("fp32", False))
    ),
    *(
        _case(format, "bf16", config, True, bool(even))
        for format in FORMATS
        for even, config in enumerate(ROW_GATE_UP[format])
    ),
    *(
        _case(format, dtype, config, gate_up, even, rounds=True)
        for format in ("int4", "int4p")
        for dtype, config, gate_up, even in (
            ("bf16", ROW_BYTES, False, True),
            ("fp16", ROW_BYTES, False, False),
            ("bf16", ROW_SHALLOW, False, True),
            ("bf16", ROW_GATE_UP["bytes"][0], True, False),
            ("bf16", ROW_GATE_UP["bytes"][1], True, True),
        )
    ),
    _case("int8", "bf16", ROW_SHALLOW, False, True),
]

__all__ = [
    "FULL_GPU",
    "ROW",
    "ROW_BYTES",
    "ROW_GATE_UP",
    "ROW_SHALLOW",
    "ROW_SWEEP",
    "RowConfig",
    "row_launch",
]
