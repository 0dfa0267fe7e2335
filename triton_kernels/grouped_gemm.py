# pyright: basic, reportCallIssue=false, reportOperatorIssue=false
"""Grouped GEMMs of routed experts over rows sorted by `moe_align`: gate and up, then down.

    h[r] = act(x[token(r)] @ w1[e].T + b1) * (x[token(r)] @ w3[e].T + b3)     h: sorted rows [R, F]
    y[pair(r)] = h[r] @ w2[e].T + b2                                          y: [T*K, D]

Rounding as the op reference: gate, up, h and y to x's dtype; sums in float32.

Tiling: a program makes [BLOCK_M rows of one expert] x [BLOCK_N columns]; gate and up tiles of the
same columns share the load of x and meet in registers, so they never reach memory.  Programs run
through GROUP row blocks before the next columns, so that the row blocks of one expert find its
weights in L2.  Blocks past the used ones leave at once: grids depend on shapes only.

Floor: 6*T*K*D*F FLOPs at the matrix units' rate for many tokens; the touched experts' bytes for
few.  The form is that of Triton's grouped matrix products (Tillet et al., MAPL 2019).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ktgraph.triton_kernels.activations import gated
from ktgraph.triton_kernels.compile import CompileCase
from ktgraph.triton_kernels.dense import in_kind
from ktgraph.triton_kernels.dependent import dependent_launch, enter
from ktgraph.triton_kernels.dots import dot
from ktgraph.triton_kernels.moe_align import Alignment
from ktgraph.triton_kernels.rounding import rounded, through


@dataclass(frozen=True)
class Tile:
    """Launch configuration of one product."""

    block_n: int
    block_k: int
    warps: int
    stages: int
    group: int = 8


@dataclass(frozen=True)
class GroupedConfig:
    """Rows of a block, and the tiles of both products."""

    block_m: int
    gate_up: Tile
    down: Tile


# 86, 89 and 120 have 99 KB of shared memory: bytes of a stage are
# (BLOCK_M + rows of weights) * BLOCK_K * 2, where gate_up loads 2 * BLOCK_N rows.
_TILES = {
    16: GroupedConfig(16, Tile(32, 128, 4, 4), Tile(64, 128, 4, 4)),
    32: GroupedConfig(32, Tile(32, 128, 4, 4), Tile(64, 128, 4, 4)),
    64: GroupedConfig(64, Tile(64, 64, 4, 3), Tile(128, 64, 4, 3)),
    128: GroupedConfig(128, Tile(64, 64, 8, 3), Tile(128, 64, 8, 3)),
}
_TILES_SM90 = {
    16: GroupedConfig(16, Tile(32, 128, 4, 5), Tile(64, 128, 4, 5)),
    32: GroupedConfig(32, Tile(32, 128, 4, 5), Tile(64, 128, 4, 5)),
    64: GroupedConfig(64, Tile(64, 64, 4, 4), Tile(128, 64, 4, 4)),
    128: GroupedConfig(128, Tile(128, 64, 8, 4), Tile(256, 64, 8, 4)),
}
# float32 products are IEEE, on the plain units, and rows that are not 16-byte aligned load single
# elements: small tiles keep both in registers.
_TILES_SMALL = {
    16: GroupedConfig(16, Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)),
    32: GroupedConfig(32, Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)),
}


def grouped_config(
    pairs: int, experts: int, *, small: bool, capability: tuple[int, int] | None
) -> GroupedConfig:
    """The tiles for this many pairs: a block holds about the rows an expert can expect.

    small: float32 activations, or rows of activations or weights that are not 16-byte aligned.
    """
    table = _TILES_SMALL if small else _table(capability)
    expected = triton.next_power_of_2(max(1, pairs // experts))
    return table[min(max(expected, 16), max(table))]


def _table(capability: tuple[int, int] | None) -> dict[int, GroupedConfig]:
    return _TILES_SM90 if capability == (9, 0) else _TILES


def launch_gate_up(
    x: torch.Tensor,
    w13: torch.Tensor,
    b13: torch.Tensor | None,
    hidden: torch.Tensor,
    aligned: Alignment,
    top_k: int,
    *,
    act: str,
    alpha: float,
    limit: float,
    tile: Tile,
) -> None:
    """x[T, D], w13[E, 2F, D] (gate rows first) -> hidden[aligned.rows, F], rows sorted."""
    width, depth = w13.shape[1] // 2, w13.shape[2]
    grid = (aligned.blocks * triton.cdiv(width, tile.block_n),)
    _gate_up[grid](
        x,
        w13,
        b13,
        hidden,
        aligned.order,
        aligned.block_expert,
        aligned.block_rows,
        aligned.blocks,
        width,
        depth,
        top_k,
        x.stride(0),
        w13.stride(0),
        w13.stride(1),
        alpha,
        limit,
        ACT=act,
        HAS_BIAS=b13 is not None,
        EVEN_K=depth % tile.block_k == 0,
        BLOCK_M=aligned.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        GROUP=tile.group,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **dependent_launch(),
    )


def launch_down(
    hidden: torch.Tensor,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    y: torch.Tensor,
    aligned: Alignment,
    *,
    tile: Tile,
) -> None:
    """hidden[aligned.rows, F] sorted, w2[E, D, F] -> y[T*K, D] in the order of pairs."""
    width, depth = w2.shape[1], w2.shape[2]
    grid = (aligned.blocks * triton.cdiv(width, tile.block_n),)
    _down[grid](
        hidden,
        w2,
        b2,
        y,
        aligned.order,
        aligned.block_expert,
        aligned.block_rows,
        aligned.blocks,
        width,
        depth,
        w2.stride(0),
        w2.stride(1),
        HAS_BIAS=b2 is not None,
        EVEN_K=depth % tile.block_k == 0,
        BLOCK_M=aligned.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        GROUP=tile.group,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **dependent_launch(),
    )


@triton.jit
def tile_of_program(blocks, tiles, GROUP: tl.constexpr):
    """(row block, column tile) of this program: GROUP row blocks, then the next columns."""
    program = tl.program_id(0)
    per_group = GROUP * tiles
    first = program // per_group * GROUP
    size = min(blocks - first, GROUP)
    inside = program % per_group
    return first + inside % size, inside // size


@triton.jit
def _load_k(pointers, left, at, EVEN_K: tl.constexpr):
    """A tile; `at` numbers its elements along K, of which `left` remain."""
    if EVEN_K:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=at < left, other=0.0)


@triton.jit
def _add_bias(acc, bias, column, width, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        acc += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def _gate_up(
    x,
    w13,
    b13,
    hidden,
    order,
    block_expert,
    block_rows,
    blocks,
    width,
    depth,
    top_k,
    stride_x,
    stride_expert,
    stride_row,
    alpha,
    limit,
    ACT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    enter()
    block, tile = tile_of_program(blocks, tl.cdiv(width, BLOCK_N), GROUP)
    count = tl.load(block_rows + block)
    if count == 0:
        return
    expert = tl.load(block_expert + block).to(tl.int64)
    i = tl.arange(0, BLOCK_M)
    row = block.to(tl.int64) * BLOCK_M + i
    # Rows and columns past the edge compute on the first row and the last column; not stored.
    token = (tl.load(order + row, mask=i < count, other=0) // top_k).to(tl.int64)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = tl.minimum(column, width - 1).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    a_at = x + token[:, None] * stride_x + k[None, :]
    gate_at = w13 + expert * stride_expert + inside[None, :] * stride_row + k[:, None]
    up_at = gate_at + width.to(tl.int64) * stride_row
    gate = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for done in range(0, depth, BLOCK_K):
        a = _load_k(a_at + done, depth - done, k[None, :], EVEN_K)
        g = _load_k(gate_at + done, depth - done, k[:, None], EVEN_K)
        u = _load_k(up_at + done, depth - done, k[:, None], EVEN_K)
        gate = dot(a, in_kind(g, a.dtype), gate)
        up = dot(a, in_kind(u, a.dtype), up)
    bias = b13 + expert * 2 * width if HAS_BIAS else b13
    gate = _add_bias(gate, bias, column, width, HAS_BIAS)
    up = _add_bias(up, bias + width if HAS_BIAS else b13, column, width, HAS_BIAS)
    kind = hidden.dtype.element_ty
    h = gated(through(gate, kind), through(up, kind), alpha, limit, ACT, kind)
    at = hidden + row[:, None] * width + column[None, :]
    tl.store(at, rounded(h, kind), mask=(i < count)[:, None] & (column < width)[None, :])


@triton.jit
def _down(
    hidden,
    w2,
    b2,
    y,
    order,
    block_expert,
    block_rows,
    blocks,
    width,
    depth,
    stride_expert,
    stride_row,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    enter()
    block, tile = tile_of_program(blocks, tl.cdiv(width, BLOCK_N), GROUP)
    count = tl.load(block_rows + block)
    if count == 0:
        return
    expert = tl.load(block_expert + block).to(tl.int64)
    i = tl.arange(0, BLOCK_M)
    row = block.to(tl.int64) * BLOCK_M + tl.minimum(i, count - 1)  # unused rows were never written
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = tl.minimum(column, width - 1).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    a_at = hidden + row[:, None] * depth + k[None, :]
    b_at = w2 + expert * stride_expert + inside[None, :] * stride_row + k[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for done in range(0, depth, BLOCK_K):
        a = _load_k(a_at + done, depth - done, k[None, :], EVEN_K)
        b = _load_k(b_at + done, depth - done, k[:, None], EVEN_K)
        acc = dot(a, in_kind(b, a.dtype), acc)
    acc = _add_bias(acc, b2 + expert * width if HAS_BIAS else b2, column, width, HAS_BIAS)
    pair = tl.load(order + row).to(tl.int64)
    at = y + pair[:, None] * width + column[None, :]
    acc = rounded(acc, y.dtype.element_ty)
    tl.store(at, acc, mask=(i < count)[:, None] & (column < width)[None, :])


def _cases() -> list[CompileCase]:
    every = (80, 86, 89, 90, 120)
    tables = [
        ("bf16", _TILES, (80, 86, 89, 120), True),
        ("bf16", _TILES_SM90, (90,), True),
        ("fp16", {128: _TILES_SM90[128]}, (90,), True),
        ("bf16", _TILES_SMALL, every, False),
        ("fp32", _TILES_SMALL, every, True),
        ("fp32", _TILES_SMALL, every, False),
    ]
    return [
        made
        for kind, table, capabilities, aligned in tables
        for config in table.values()
        for even in ((True, False) if aligned else (False,))
        for made in _both(kind, config, even, aligned, capabilities)
    ]


def _both(
    kind: str, config: GroupedConfig, even: bool, aligned: bool, capabilities: tuple[int, ...]
) -> list[CompileCase]:
    tables = {n: "*i32:16" for n in ("order", "block_expert", "block_rows")}
    size = "i32:16" if aligned else "i32"
    sizes = {n: size for n in ("width", "depth", "stride_expert", "stride_row")}
    shared = {**tables, **sizes, "blocks": "i32"}
    pointer = f"*{kind}:16"
    gate_up = {n: pointer for n in ("x", "w13", "b13", "hidden")}
    gate_up |= {**shared, "top_k": "i32", "alpha": "fp32", "limit": "fp32"}
    gate_up |= {"stride_x": sizes["depth"]}
    down = {**{n: pointer for n in ("hidden", "w2", "b2", "y")}, **shared}
    end = f"M={config.block_m} {kind}{' even' if even else ''}{'' if aligned else ' unaligned'}"
    made: list[CompileCase] = []
    for kernel, name, types, tile, extra in (
        (_gate_up, "gate_up", gate_up, config.gate_up, {"ACT": "silu"}),
        (_down, "down", down, config.down, {}),
    ):
        bias = "b13" if kernel is _gate_up else "b2"
        absent = {bias: None} if even else {}
        constants = {
            **extra,
            **absent,
            "HAS_BIAS": not even,
            "EVEN_K": even,
            "BLOCK_M": config.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
            "GROUP": tile.group,
        }
        made.append(
            CompileCase(
                kernel,
                f"grouped_gemm.{name} {end}",
                {n: t for n, t in types.items() if n not in absent},
                constants,
                tile.warps,
                tile.stages,
                capabilities,
            )
        )
    return made


COMPILE_CASES = _cases()

__all__ = [
    "GroupedConfig",
    "Tile",
    "grouped_config",
    "launch_down",
    "launch_gate_up",
    "tile_of_program",
]
