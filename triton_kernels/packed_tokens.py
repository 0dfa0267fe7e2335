# pyright: basic, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
"""Packed weights times 2 to 16 rows of 16-bit x: y = x @ w.T + b, or act(gate) * up.

Words become operands of the matrix units in the registers that they were loaded to, exactly
(tile_mma.py); sums of a group take its scale.  Warps of a program, and programs, share the columns
of tiles; programs' shares are added in their order (packed_sums.py).

2.0 instructions an int4 weight up to 8 tokens, 2.4 up to 16, where an H200's bandwidth leaves 4.1;
int8 3.2 of 8.2.  For 10,240 x 8,192 that took (4 and 16 tokens, packed_rows.py in brackets) int8 25
(36) and 28 us (37), int4 21 (37) and 28 (33), int4p 23 (52) and 36 (48).
Floor: the packed bytes.
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
from ktgraph.triton_kernels.tile_mma import in_octets, tiles_times_tokens
from ktgraph.triton_kernels.tile_words import has_row_scales, row_scales, step_of

_WARPS = 2560  # that fill an H200 where a thread takes 96 to 128 registers


@dataclass(frozen=True)
class TokenConfig:
    """warps: of which `shares` share the columns of a tile.

    units: of 32 columns, of a warp in a step.
    splits: programs that share a tile's columns; 0: by `token_splits`.
    """

    warps: int
    shares: int
    units: int
    splits: int = 0

    @property
    def tiles(self) -> int:
        """Of a program."""
        return 2 * self.warps // self.shares


TOKENS = TokenConfig(4, 4, 4)  # up to 8
TOKENS_16 = TokenConfig(4, 4, 2)  # more sums take the registers
TOKENS_16_BYTES = TokenConfig(8, 4, 2)  # of int8 and fp8
TOKENS_SWEEP = tuple(
    TokenConfig(warps, shares, units, splits)
    for (warps, shares), units, splits in product(((4, 4), (8, 8), (4, 2)), (2, 4), (1, 2, 4))
)


def token_config(tokens: int, format: str) -> TokenConfig:
    if tokens <= 8:
        return TOKENS
    return TOKENS_16_BYTES if format in ("int8", "fp8") else TOKENS_16


def tokens_launch(x: torch.Tensor, w: PackedWeight, config: TokenConfig) -> Launch:
    programs = triton.cdiv(w.tiles, config.tiles)
    units, step = w.blocks * w.step // 32, config.shares * config.units
    steps = triton.cdiv(units, step)
    splits = min(config.splits, steps) or token_splits(programs * config.warps, steps)
    share = triton.cdiv(steps, splits)
    splits = triton.cdiv(steps, share)  # none without columns
    fragments = triton.next_power_of_2(triton.cdiv(x.shape[0], 8))
    extra = {
        "EVEN": units % step == 0 and units * 32 == w.cols,
        "QUADS": in_octets(x),
        "WARPS": config.warps,
        "SHARES": config.shares,
        "UNITS": config.units,
        "FRAGMENTS": fragments,
        "SPLITS": splits,
        "share": share * step,
        **shared_sums(programs, splits, fragments * 8 * config.tiles * 16, x.device),
    }
    return (programs, splits), _tokens, extra


def token_splits(warps: int, steps: int) -> int:
    """Programs that share the columns of tiles which take `warps` without sharing."""
    return max(n for n in (1, 2, 4, 8) if n == 1 or (warps * n <= _WARPS and steps >= 2 * n))


@triton.jit
def _tokens(
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
    QUADS: tl.constexpr,
    WARPS: tl.constexpr,
    SHARES: tl.constexpr,
    UNITS: tl.constexpr,
    FRAGMENTS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    start_dependents()
    TILES: tl.constexpr = 2 * (WARPS // SHARES)
    first, split = tl.program_id(0) * TILES, tl.program_id(1)
    acc = tiles_times_tokens(
        x,
        stride_x,
        tokens,
        data,
        first,
        tiles,
        cols,
        split * share,
        tl.minimum((split + 1) * share, blocks * step_of(FORMAT) // 32),
        blocks,
        groups,
        scales_at,
        FORMAT,
        GROUP,
        EVEN,
        QUADS,
        WARPS,
        SHARES,
        UNITS,
        FRAGMENTS,
    )
    if has_row_scales(FORMAT):
        n = tl.arange(0, TILES * 16)
        at = first * 16 + n
        acc *= row_scales(data + row_scales_at, at, at < tiles * 16)[None, :]
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


def _case(format: str, dtype: str, tokens: int, gate_up: bool, even: bool) -> CompileCase:
    config = token_config(tokens, format)
    constants = {
        "QUADS": even,
        "WARPS": config.warps,
        "SHARES": config.shares,
        "UNITS": config.units,
        "FRAGMENTS": tokens // 8,
        **splits_of_case(even),
    }
    return product_case(
        _tokens,
        tokens,
        format,
        dtype,
        constants,
        gate_up=gate_up,
        even=even,
        warps=config.warps,
        stages=1,
        lockstep=True,
    )


COMPILE_CASES = [
    _case(format, dtype, tokens, gate_up, even)
    for format in FORMATS
    for dtype, tokens, gate_up, even in (
        ("bf16", 8, False, True),
        ("bf16", 16, True, True),
        ("fp16", 16, False, False),
    )
]

__all__ = [
    "TOKENS",
    "TOKENS_SWEEP",
    "TokenConfig",
    "token_config",
    "tokens_launch",
]
