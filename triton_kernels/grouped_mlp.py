# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""moe.grouped_mlp with dense weights: out[t] = sum over k of weight * w2[e] @ (act(gate) * up).

Two forms by the number of (token, expert) pairs:

few, at most 64 and at most E (decode), two launches, bound by the bytes of the chosen experts:
    1. (pair, BLOCK_F rows of gate and of up): multiply-add over D, activation, h[pair, F];
       pairs are the fastest axis of the grid, so that tokens of one expert meet in L2.
    2. (token, BLOCK_D rows of w2): the rows of all K experts are loaded together, as one tile of
       K * BLOCK_D rows (16), so that a program has all its loads in flight; then the weighted sum.
more (prefill): moe_align, two grouped GEMMs, weighted sum (see those files).

Sums over K and over tiles have a fixed shape: same inputs, same bits, and in one form a token's
result does not depend on the other tokens.  Rounding points are the op reference's.

Floor: 6*T*K*D*F FLOPs; bytes of the touched experts (6*D*F each in bf16).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from ktgraph.triton_kernels.activations import gated
from ktgraph.triton_kernels.compile import CompileCase
from ktgraph.triton_kernels.dense import dense_weights, in_kind, unaligned
from ktgraph.triton_kernels.dependent import dependent_launch, enter
from ktgraph.triton_kernels.grouped_gemm import (
    GroupedConfig,
    grouped_config,
    launch_down,
    launch_gate_up,
)
from ktgraph.triton_kernels.moe_align import align
from ktgraph.triton_kernels.registry import cuda_kernel
from ktgraph.triton_kernels.rounding import rounded, through
from ktgraph.triton_kernels.weighted_sum import weighted_sum


def decode_pairs(experts: int) -> int:
    """The most pairs of the decode form: with more than E, most weights would be read twice."""
    return min(64, experts)


@dataclass(frozen=True)
class DecodeConfig:
    """Rows and columns of the multiply-add tiles of both launches.

    down_rows counts the rows of all K experts: a program makes down_rows / K output columns.
    """

    gate_up_rows: int = 4
    gate_up_cols: int = 512
    gate_up_warps: int = 4
    down_rows: int = 16
    down_cols: int = 256
    down_warps: int = 8
    unroll: int = 2  # steps whose loads may be in flight together


Config = DecodeConfig | GroupedConfig


@cuda_kernel(
    "moe.grouped_mlp", name="triton.grouped_mlp", nmse=6e-5, supports=dense_weights(3, 4, 5, 6)
)
def grouped_mlp(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    b13: torch.Tensor | None,
    b2: torch.Tensor | None,
    *,
    out: tuple[torch.Tensor],
    act: str,
    alpha: float,
    limit: float,
    config: Config | None = None,
) -> None:
    """`config` overrides the table's choice (for benchmarks); its type chooses the form."""
    tokens, top_k = ids.shape
    if tokens == 0:
        return
    assert x.stride(-1) == w13.stride(-1) == w2.stride(-1) == out[0].stride(-1) == 1
    assert all(b is None or b.is_contiguous() for b in (b13, b2))
    ids, weights = ids.contiguous(), weights.contiguous()  # a copy only where they are views
    chosen = config or _choose(x, w13, w2, ids.numel())
    if isinstance(chosen, DecodeConfig):
        _decode(x, ids, weights, w13, w2, b13, b2, out[0], act, alpha, limit, chosen)
        return
    aligned = align(ids, w13.shape[0], chosen.block_m)
    hidden = x.new_empty(aligned.rows, w2.shape[2])
    launch_gate_up(
        x, w13, b13, hidden, aligned, top_k, act=act, alpha=alpha, limit=limit, tile=chosen.gate_up
    )
    y = x.new_empty(ids.numel(), w2.shape[1])
    launch_down(hidden, w2, b2, y, aligned, tile=chosen.down)
    weighted_sum(y, ids, weights, out[0])


def _choose(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, pairs: int) -> Config:
    capability = torch.cuda.get_device_capability(x.device) if x.is_cuda else None
    if pairs <= decode_pairs(w13.shape[0]):
        return _decode_config(x.dtype)
    small = x.dtype == torch.float32 or unaligned(x, w13, w2)
    return grouped_config(pairs, w13.shape[0], small=small, capability=capability)


def _decode_config(dtype: torch.dtype) -> DecodeConfig:
    chosen = DecodeConfig()
    if dtype != torch.float32:
        return chosen
    return replace(chosen, gate_up_cols=256, down_cols=256)  # as many bytes in flight


def _decode(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    b13: torch.Tensor | None,
    b2: torch.Tensor | None,
    out: torch.Tensor,
    act: str,
    alpha: float,
    limit: float,
    config: DecodeConfig,
) -> None:
    tokens, top_k = ids.shape
    depth, width = w2.shape[1], w2.shape[2]
    hidden = x.new_empty(ids.numel(), width)
    _gate_up_few[(ids.numel(), triton.cdiv(width, config.gate_up_rows))](
        x,
        ids,
        w13,
        b13,
        hidden,
        width,
        depth,
        x.stride(0),
        w13.stride(0),
        w13.stride(1),
        alpha,
        limit,
        K=top_k,
        ACT=act,
        HAS_BIAS=b13 is not None,
        ROWS=config.gate_up_rows,
        COLS=config.gate_up_cols,
        UNROLL=config.unroll,
        num_warps=config.gate_up_warps,
        **dependent_launch(),
    )
    k_padded = triton.next_power_of_2(top_k)
    down_rows = max(1, config.down_rows // k_padded)
    _down_few[(tokens, triton.cdiv(depth, down_rows))](
        hidden,
        ids,
        weights,
        w2,
        b2,
        out,
        width,
        depth,
        w2.stride(0),
        w2.stride(1),
        out.stride(0),
        K=top_k,
        K_PADDED=k_padded,
        HAS_BIAS=b2 is not None,
        ROWS=down_rows,
        COLS=config.down_cols,
        UNROLL=config.unroll,
        num_warps=config.down_warps,
        **dependent_launch(),
    )


@triton.jit
def _gate_up_few(
    x,
    ids,
    w13,
    b13,
    hidden,
    width,
    depth,
    stride_x,
    stride_expert,
    stride_row,
    alpha,
    limit,
    K: tl.constexpr,
    ACT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    enter()
    pair = tl.program_id(0)
    expert = tl.load(ids + pair).to(tl.int64)
    if expert < 0:
        return
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = tl.minimum(row, width - 1).to(tl.int64)  # rows past the edge repeat the last one
    column = tl.arange(0, COLS)
    x_at = x + (pair // K).to(tl.int64) * stride_x + column
    gate_at = w13 + expert * stride_expert + inside[:, None] * stride_row + column[None, :]
    up_at = gate_at + width.to(tl.int64) * stride_row
    gate = tl.zeros([ROWS, COLS], dtype=tl.float32)
    up = tl.zeros([ROWS, COLS], dtype=tl.float32)
    kind = x.dtype.element_ty
    for done in tl.range(0, depth, COLS, loop_unroll_factor=UNROLL):
        left = column < depth - done
        g = tl.load(gate_at + done, mask=left[None, :], other=0.0)
        u = tl.load(up_at + done, mask=left[None, :], other=0.0)
        value = tl.load(x_at + done, mask=left, other=0.0).to(tl.float32)[None, :]
        gate += in_kind(g, kind).to(tl.float32) * value
        up += in_kind(u, kind).to(tl.float32) * value
    gate_row = tl.sum(gate, axis=1)
    up_row = tl.sum(up, axis=1)
    if HAS_BIAS:
        bias = b13 + expert * 2 * width + inside
        gate_row += tl.load(bias).to(tl.float32)
        up_row += tl.load(bias + width).to(tl.float32)
    h = gated(through(gate_row, kind), through(up_row, kind), alpha, limit, ACT, kind)
    tl.store(hidden + pair.to(tl.int64) * width + row, rounded(h, kind), mask=row < width)


@triton.jit
def _down_few(
    hidden,
    ids,
    weights,
    w2,
    b2,
    out,
    width,
    depth,
    stride_expert,
    stride_row,
    stride_out,
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    enter()
    token = tl.program_id(0)
    r = tl.arange(0, K_PADDED * ROWS)  # row r of the tile: choice r // ROWS, output row r % ROWS
    choice = r // ROWS
    first = tl.program_id(1) * ROWS
    row = first + r % ROWS
    inside = tl.minimum(row, depth - 1).to(tl.int64)
    pair = token * K + choice
    expert = tl.load(ids + pair, mask=choice < K, other=-1).to(tl.int64)
    chosen = expert >= 0
    column = tl.arange(0, COLS)
    w_at = w2 + (expert * stride_expert + inside * stride_row)[:, None] + column[None, :]
    h_at = hidden + (pair.to(tl.int64) * width)[:, None] + column[None, :]
    acc = tl.zeros([K_PADDED * ROWS, COLS], dtype=tl.float32)
    kind = hidden.dtype.element_ty
    for done in tl.range(0, width, COLS, loop_unroll_factor=UNROLL):
        mask = chosen[:, None] & (column < width - done)[None, :]
        w = tl.load(w_at + done, mask=mask, other=0.0)
        h = tl.load(h_at + done, mask=mask, other=0.0)
        acc += in_kind(w, kind).to(tl.float32) * h.to(tl.float32)
    y = tl.sum(acc, axis=1)
    if HAS_BIAS:
        y += tl.load(b2 + expert * depth + inside, mask=chosen, other=0.0).to(tl.float32)
    weight = tl.load(weights + pair, mask=chosen, other=0.0)
    y = through(y, out.dtype.element_ty) * weight
    total = tl.sum(tl.reshape(y, [K_PADDED, ROWS]), axis=0)
    place = first + tl.arange(0, ROWS)
    at = out + token.to(tl.int64) * stride_out + place
    tl.store(at, rounded(total, out.dtype.element_ty), mask=place < depth)


def _cases() -> list[CompileCase]:
    made: list[CompileCase] = []
    for kind, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        c = _decode_config(dtype)
        p, i, f = f"*{kind}:16", "i32:16", "fp32"
        sizes = {"width": i, "depth": i, "stride_expert": i, "stride_row": i}
        up = {"x": p, "ids": "*i32:16", "w13": p, "b13": p, "hidden": p, **sizes}
        up |= {"stride_x": i, "alpha": f, "limit": f}
        down = {"hidden": p, "ids": "*i32:16", "weights": "*fp32:16", "w2": p, "b2": p, "out": p}
        down |= {**sizes, "stride_out": i}
        for k in (4, 8):
            up_tile = {"ROWS": c.gate_up_rows, "COLS": c.gate_up_cols}
            padded = triton.next_power_of_2(k)
            down_tile = {"ROWS": max(1, c.down_rows // padded), "COLS": c.down_cols}
            shared = {"K": k, "HAS_BIAS": k == 4, "UNROLL": c.unroll}
            absent = ("b13", "b2") if k != 4 else ()
            made.append(
                CompileCase(
                    _gate_up_few,
                    f"grouped_mlp.gate_up_few K={k} {kind}",
                    {n: t for n, t in up.items() if n not in absent},
                    {
                        **dict.fromkeys(absent[:1]),
                        **shared,
                        **up_tile,
                        "ACT": "swiglu_clamped" if k == 4 else "silu",
                    },
                    c.gate_up_warps,
                )
            )
            made.append(
                CompileCase(
                    _down_few,
                    f"grouped_mlp.down_few K={k} {kind}",
                    {n: t for n, t in down.items() if n not in absent},
                    {**dict.fromkeys(absent[1:]), **shared, **down_tile, "K_PADDED": padded},
                    c.down_warps,
                )
            )
    return made


COMPILE_CASES = _cases()

__all__ = ["DecodeConfig", "decode_pairs", "grouped_mlp"]
