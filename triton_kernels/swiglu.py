# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""nn.swiglu with dense weights: out = w2 @ (act(gate) * up), gate and up = x @ w13.T halves.

T = 1 (T = 2 for w13 of up to 32 MB): two launches.  The first makes h[T, M]: a program owns the
same ROWS of the gate and of the up half of w13, multiplies and adds as linear.py does, and applies
the activation in registers; linear.py makes the second launch.
Floor: 6*M*D bytes (bf16) at memory bandwidth.

More: a product, `gated_mul`, a product, both of linear.py.  On an H200 a fused tl.dot form for 3 to
32 tokens took 0.96 to 1.4 of the time of torch's ops, which these three launches undercut.

gate, up, act(gate) and h are rounded to x's dtype, as in the reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ktgraph.triton_kernels.activations import gated
from ktgraph.triton_kernels.compile import CompileCase
from ktgraph.triton_kernels.dense import dense_weights, in_kind
from ktgraph.triton_kernels.dependent import dependent_launch, enter
from ktgraph.triton_kernels.linear import LinearConfig, linear, multiplies_and_adds
from ktgraph.triton_kernels.registry import cuda_kernel
from ktgraph.triton_kernels.rounding import rounded, through
from ktgraph.triton_kernels.silu_mul import gated_mul

_TWO_TOKENS_BYTES = 32 << 20  # of w13, up to which two tokens are multiplied and added

# rows: of each half of w13 in a program.
_HALF, _FLOAT32 = LinearConfig(4, 512, 8, unroll=2), LinearConfig(2, 256, 4)


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
    """`config` overrides the first launch's configuration (for benchmarks)."""
    assert x.stride(-1) == w13.stride(-1) == w2.stride(-1) == out[0].stride(-1) == 1
    tokens, width = x.shape[0], w2.shape[1]
    if tokens == 0:
        return
    hidden = x.new_empty(tokens, width)
    if multiplies_and_adds(tokens, w13, _TWO_TOKENS_BYTES):
        default = _FLOAT32 if x.dtype == torch.float32 else _HALF
        _gate_up(x, w13, hidden, act, config or default)
    else:
        both = x.new_empty(tokens, 2 * width)
        linear(x, w13, None, out=(both,))
        gated_mul(both, hidden, act=act)
    linear(hidden, w2, None, out=out)


def _gate_up(
    x: torch.Tensor, w13: torch.Tensor, hidden: torch.Tensor, act: str, c: LinearConfig
) -> None:
    tokens, width = hidden.shape
    _gate_up_multiply_add[(triton.cdiv(width, c.rows),)](
        x,
        w13,
        hidden,
        width,
        x.shape[1],
        x.stride(0),
        w13.stride(0),
        ACT=act,
        TOKENS=tokens,
        ROWS=c.rows,
        COLS=c.cols,
        UNROLL=c.unroll,
        num_warps=c.warps,
        **dependent_launch(),
    )


@triton.jit
def _gate_up_multiply_add(
    x,
    w13,
    hidden,
    width,
    depth,
    stride_x,
    stride_w,
    ACT: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    enter()
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
    for done in tl.range(0, depth, COLS, loop_unroll_factor=UNROLL):
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


def _case(kind: str, c: LinearConfig, tokens: int) -> CompileCase:
    types = {n: f"*{kind}:16" for n in ("x", "w13", "hidden")}
    types |= {n: "i32:16" for n in ("width", "depth", "stride_x", "stride_w")}
    tile = {"TOKENS": tokens, "ROWS": c.rows, "COLS": c.cols, "UNROLL": c.unroll}
    return CompileCase(
        _gate_up_multiply_add,
        f"swiglu gate and up {kind} T={tokens}",
        types,
        {"ACT": "silu", **tile},
        c.warps,
    )


COMPILE_CASES = [
    _case(kind, c, tokens) for kind, c in (("bf16", _HALF), ("fp32", _FLOAT32)) for tokens in (1, 2)
]

__all__ = ["swiglu"]
