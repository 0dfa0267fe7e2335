# pyright: basic, reportCallIssue=false, reportOperatorIssue=false
"""nn.swiglu with dense weights: out = w2 @ (act(gate) * up), gate and up = x @ w13.T halves.

T <= 32: two launches.  The first makes h[T, M]: a program owns the same ROWS of the gate and of the
up half of w13 and applies the activation in registers; multiply-add for T = 1, 2 and tl.dot above,
as in linear.py, which also makes the second launch.
T > 32: torch (cuBLAS), a gated multiply, torch.

gate, up, act(gate) and h are rounded to x's dtype, as in the reference.
Floor for few tokens: 6*M*D bytes (bf16) at memory bandwidth.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ktgraph.triton_kernels.activations import gated
from ktgraph.triton_kernels.compile import CompileCase
from ktgraph.triton_kernels.dense import dense_weights, in_kind, unaligned
from ktgraph.triton_kernels.dots import dot
from ktgraph.triton_kernels.linear import (
    FEW_TOKENS,
    MULTIPLY_ADD_TOKENS,
    LinearConfig,
    linear,
)
from ktgraph.triton_kernels.registry import cuda_kernel
from ktgraph.triton_kernels.rounding import rounded, through

# rows: of each half of w13 in a program.
_MULTIPLY_ADD = {"half": LinearConfig(4, 512, 8), "float32": LinearConfig(2, 256, 4)}
_DOT = {
    "half": LinearConfig(16, 256, 4, 3),
    "float32": LinearConfig(16, 64, 4, 2),
    "unaligned": LinearConfig(16, 64, 4, 1),
}
_BLOCK = 1024  # columns of a program of the gated multiply


@cuda_kernel("nn.swiglu", name="triton.swiglu", nmse=6e-5, supports=dense_weights(1, 2))
def swiglu(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    *,
    out: tuple[torch.Tensor],
    act: str,
    config: LinearConfig | None = None,
) -> None:
    """`config` overrides the table's choice for the first launch (for benchmarks)."""
    assert x.stride(-1) == w13.stride(-1) == w2.stride(-1) == out[0].stride(-1) == 1
    tokens, width = x.shape[0], w2.shape[1]
    if tokens == 0:
        return
    hidden = x.new_empty(tokens, width)
    if tokens > FEW_TOKENS:
        both = x.new_empty(tokens, 2 * width)
        linear(x, w13, None, out=(both,))
        grid = (tokens, triton.cdiv(width, _BLOCK))
        _gated_rows[grid](both, hidden, width, ACT=act, BLOCK=_BLOCK, num_warps=4)
    else:
        _gate_up(x, w13, hidden, act, config or _config(x, w13))
    linear(hidden, w2, None, out=out)


def _config(x: torch.Tensor, w13: torch.Tensor) -> LinearConfig:
    single = x.shape[0] <= MULTIPLY_ADD_TOKENS
    table = _MULTIPLY_ADD if single else _DOT
    if x.dtype == torch.float32:
        return table["float32"]
    return table["unaligned" if not single and unaligned(x, w13) else "half"]


def _gate_up(
    x: torch.Tensor, w13: torch.Tensor, hidden: torch.Tensor, act: str, c: LinearConfig
) -> None:
    tokens, width = hidden.shape
    kernel = _gate_up_multiply_add if tokens <= MULTIPLY_ADD_TOKENS else _gate_up_dot
    padded = tokens if kernel is _gate_up_multiply_add else max(16, triton.next_power_of_2(tokens))
    kernel[(triton.cdiv(width, c.rows),)](
        x,
        w13,
        hidden,
        tokens,
        width,
        x.shape[1],
        x.stride(0),
        w13.stride(0),
        ACT=act,
        TOKENS=padded,
        ROWS=c.rows,
        COLS=c.cols,
        num_warps=c.warps,
        num_stages=c.stages,
    )


@triton.jit
def _gate_up_multiply_add(
    x,
    w13,
    hidden,
    tokens,
    width,
    depth,
    stride_x,
    stride_w,
    ACT: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = tl.minimum(row, width - 1).to(tl.int64)  # rows past the edge repeat the last one
    column = tl.arange(0, COLS)
    gate_at = w13 + inside[:, None] * stride_w + column[None, :]
    up_at = gate_at + width.to(tl.int64) * stride_w
    x_at = x + column
    kind = x.dtype.element_ty
    gate = tl.zeros([ROWS, COLS], dtype=tl.float32)
    up = tl.zeros([ROWS, COLS], dtype=tl.float32)
    gate_2 = tl.zeros([ROWS, COLS], dtype=tl.float32)
    up_2 = tl.zeros([ROWS, COLS], dtype=tl.float32)
    for done in range(0, depth, COLS):
        left = column < depth - done
        g = tl.load(gate_at + done, mask=left[None, :], other=0.0)
        u = tl.load(up_at + done, mask=left[None, :], other=0.0)
        g = in_kind(g, kind).to(tl.float32)
        u = in_kind(u, kind).to(tl.float32)
        value = tl.load(x_at + done, mask=left, other=0.0).to(tl.float32)[None, :]
        gate += g * value
        up += u * value
        if TOKENS == 2:
            other = tl.load(x_at + stride_x + done, mask=left, other=0.0).to(tl.float32)[None, :]
            gate_2 += g * other
            up_2 += u * other
    _store_row(hidden, tl.sum(gate, axis=1), tl.sum(up, axis=1), row, width, ACT)
    if TOKENS == 2:
        _store_row(hidden + width, tl.sum(gate_2, axis=1), tl.sum(up_2, axis=1), row, width, ACT)


@triton.jit
def _store_row(hidden, gate, up, row, width, ACT: tl.constexpr):
    kind = hidden.dtype.element_ty
    h = gated(through(gate, kind), through(up, kind), 0.0, 0.0, ACT, kind)
    tl.store(hidden + row, rounded(h, kind), mask=row < width)


@triton.jit
def _gate_up_dot(
    x,
    w13,
    hidden,
    tokens,
    width,
    depth,
    stride_x,
    stride_w,
    ACT: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = tl.minimum(row, width - 1).to(tl.int64)
    token = tl.arange(0, TOKENS)
    read = tl.minimum(token, tokens - 1)  # tokens past the edge repeat the last one
    column = tl.arange(0, COLS)
    x_at = x + read.to(tl.int64)[:, None] * stride_x + column[None, :]
    gate_at = w13 + inside[None, :] * stride_w + column[:, None]
    up_at = gate_at + width.to(tl.int64) * stride_w
    gate = tl.zeros([TOKENS, ROWS], dtype=tl.float32)
    up = tl.zeros([TOKENS, ROWS], dtype=tl.float32)
    for done in range(0, depth, COLS):
        left = column < depth - done
        value = tl.load(x_at + done, mask=left[None, :], other=0.0)
        g = tl.load(gate_at + done, mask=left[:, None], other=0.0)
        u = tl.load(up_at + done, mask=left[:, None], other=0.0)
        gate = dot(value, in_kind(g, value.dtype), gate)
        up = dot(value, in_kind(u, value.dtype), up)
    kind = hidden.dtype.element_ty
    h = gated(through(gate, kind), through(up, kind), 0.0, 0.0, ACT, kind)
    at = hidden + token[:, None] * width + row[None, :]
    tl.store(at, rounded(h, kind), mask=(token < tokens)[:, None] & (row < width)[None, :])


@triton.jit
def _gated_rows(both, hidden, width, ACT: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kind = hidden.dtype.element_ty
    gate_at = both + token * 2 * width + column
    gate = tl.load(gate_at, mask=column < width, other=0.0).to(tl.float32)
    up = tl.load(gate_at + width, mask=column < width, other=0.0).to(tl.float32)
    h = gated(gate, up, 0.0, 0.0, ACT, kind)
    tl.store(hidden + token * width + column, rounded(h, kind), mask=column < width)


def _cases() -> list[CompileCase]:
    made: list[CompileCase] = []
    for kernel, table, token_tiles in (
        (_gate_up_multiply_add, _MULTIPLY_ADD, (1, 2)),
        (_gate_up_dot, _DOT, (16, 32)),
    ):
        for name, c in table.items():
            kind = "fp32" if name == "float32" else "bf16"
            size = "i32" if name == "unaligned" else "i32:16"
            types = {n: f"*{kind}:16" for n in ("x", "w13", "hidden")} | {"tokens": "i32"}
            types |= {n: size for n in ("width", "depth", "stride_x", "stride_w")}
            for tokens in token_tiles:
                tile = {"TOKENS": tokens, "ROWS": c.rows, "COLS": c.cols}
                title = f"swiglu.{kernel.fn.__name__[1:]} {name} T={tokens}"
                constants = {"ACT": "silu", **tile}
                made.append(CompileCase(kernel, title, types, constants, c.warps, c.stages))
    types = {"both": "*bf16:16", "hidden": "*bf16:16", "width": "i32:16"}
    constants = {"ACT": "silu", "BLOCK": _BLOCK}
    made.append(CompileCase(_gated_rows, "swiglu.gated_rows", types, constants))
    return made


COMPILE_CASES = _cases()

__all__ = ["swiglu"]
