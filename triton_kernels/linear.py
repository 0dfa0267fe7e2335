# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""nn.linear with dense weights: out[T, N] = x[T, K] @ w[N, K].T + b, sums in float32.

T = 1 (T = 2 for matrices of up to 16 MB): multiply-add.  A program owns ROWS rows of w for all
tokens and walks K by COLS; every loaded weight is used T times from registers.  The tile of partial
sums is reduced once at the end, so a row's result is the same for both T.
Floor: 2*N*K bytes (bf16) at memory bandwidth.

More: torch (cuBLAS), after a cast of w where its dtype differs.

Why no more of it is written here: on an H200 multiply-add takes 0.5 to 0.9 of cuBLAS's time for one
token and 0.5 to 1.0 for two up to 16 MB, but 1.1 to 1.3 for two above.  A pipelined tl.dot form for
3 to 32 tokens took 1.0 to 1.7 of cuBLAS's time on all matrices but those of a vocabulary, where it
won 4 %.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ktgraph.triton_kernels.compile import CompileCase
from ktgraph.triton_kernels.dense import dense_weights, in_kind
from ktgraph.triton_kernels.dependent import dependent_launch, enter
from ktgraph.triton_kernels.registry import cuda_kernel
from ktgraph.triton_kernels.rounding import rounded

_TWO_TOKENS_BYTES = 16 << 20  # of w, up to which two tokens are multiplied and added


@dataclass(frozen=True)
class LinearConfig:
    """Rows of w of a program, columns of a step, steps whose loads may be in flight together."""

    rows: int
    cols: int
    warps: int
    unroll: int = 1


# A step holds rows * cols * 2 bytes in registers, those of several programs per multiprocessor
# being in flight together.
_HALF_FEW_ROWS = LinearConfig(2, 1024, 4, unroll=2)  # 2048 rows still make 1000 programs
_HALF = LinearConfig(8, 512, 4)
_FLOAT32 = LinearConfig(4, 512, 4)


@cuda_kernel("nn.linear", name="triton.linear", nmse=1e-5, supports=dense_weights(1, 2))
def linear(
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    *,
    out: tuple[torch.Tensor],
    config: LinearConfig | None = None,
) -> None:
    """`config` overrides the choice of `linear_config` (for benchmarks)."""
    assert x.stride(-1) == w.stride(-1) == out[0].stride(-1) == 1
    assert b is None or b.is_contiguous()
    if x.shape[0] == 0:
        return
    if multiplies_and_adds(x.shape[0], w, _TWO_TOKENS_BYTES):
        _few(x, w, b, out[0], config or linear_config(x, w))
    else:
        _many(x, w, b, out[0])


def multiplies_and_adds(tokens: int, w: torch.Tensor, most_bytes: int) -> bool:
    """Whether so few tokens are faster without cuBLAS: one, or two up to `most_bytes` of w."""
    return tokens == 1 or (tokens == 2 and w.numel() * w.element_size() <= most_bytes)


def _many(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, out: torch.Tensor) -> None:
    weight = w.to(x.dtype).t()
    if b is None:
        torch.mm(x, weight, out=out)
    else:
        torch.addmm(b.to(x.dtype), x, weight, out=out)


def _few(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, out: torch.Tensor, c: LinearConfig
) -> None:
    _multiply_add[(triton.cdiv(w.shape[0], c.rows),)](
        x,
        w,
        b,
        out,
        w.shape[0],
        w.shape[1],
        x.stride(0),
        w.stride(0),
        out.stride(0),
        HAS_BIAS=b is not None,
        EVEN_K=w.shape[1] % c.cols == 0,
        TOKENS=x.shape[0],
        ROWS=c.rows,
        COLS=c.cols,
        UNROLL=c.unroll,
        num_warps=c.warps,
        **dependent_launch(),
    )


def linear_config(x: torch.Tensor, w: torch.Tensor) -> LinearConfig:
    """Matrices of few rows need fewer rows a program."""
    if x.dtype == torch.float32:
        return _FLOAT32
    return _HALF if w.shape[0] >= 8192 else _HALF_FEW_ROWS


@triton.jit
def _multiply_add(
    x,
    w,
    b,
    out,
    width,
    depth,
    stride_x,
    stride_w,
    stride_out,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    enter()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = tl.minimum(row, width - 1).to(tl.int64)  # rows past the edge repeat the last one
    column = tl.arange(0, COLS)
    w_at = w + inside[:, None] * stride_w + column[None, :]
    x_at = x + column
    kind = x.dtype.element_ty
    first = tl.zeros([ROWS, COLS], dtype=tl.float32)
    second = tl.zeros([ROWS, COLS], dtype=tl.float32)
    for done in tl.range(0, depth, COLS, loop_unroll_factor=UNROLL):
        if EVEN_K:
            weight = tl.load(w_at + done)
            value = tl.load(x_at + done)
        else:
            left = column < depth - done
            weight = tl.load(w_at + done, mask=left[None, :], other=0.0)
            value = tl.load(x_at + done, mask=left, other=0.0)
        wide = in_kind(weight, kind).to(tl.float32)
        first += wide * value.to(tl.float32)[None, :]
        if TOKENS == 2:
            other = tl.load(x_at + stride_x + done, mask=column < depth - done, other=0.0)
            second += wide * other.to(tl.float32)[None, :]
    _store_row(out, tl.sum(first, axis=1), b, row, width, HAS_BIAS)
    if TOKENS == 2:
        _store_row(out + stride_out, tl.sum(second, axis=1), b, row, width, HAS_BIAS)


@triton.jit
def _store_row(out, y, b, row, width, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        y += tl.load(b + row, mask=row < width, other=0.0).to(tl.float32)
    tl.store(out + row, rounded(y, out.dtype.element_ty), mask=row < width)


def _case(name: str, kind: str, c: LinearConfig, tokens: int, even: bool) -> CompileCase:
    """Whole steps without a bias, or neither."""
    types = {n: f"*{kind}:16" for n in ("x", "w", "out")} | ({} if even else {"b": f"*{kind}:16"})
    types |= {n: "i32:16" for n in ("width", "depth", "stride_x", "stride_w", "stride_out")}
    constants = {"HAS_BIAS": not even, "EVEN_K": even, "TOKENS": tokens} | {
        "ROWS": c.rows,
        "COLS": c.cols,
        "UNROLL": c.unroll,
    }
    return CompileCase(
        _multiply_add,
        f"linear {name} T={tokens}{' even' if even else ''}",
        types,
        constants | ({"b": None} if even else {}),
        c.warps,
    )


COMPILE_CASES = [
    _case(name, kind, c, tokens, even)
    for name, kind, c in (
        ("few rows", "bf16", _HALF_FEW_ROWS),
        ("many rows", "bf16", _HALF),
        ("float32", "fp32", _FLOAT32),
    )
    for tokens in (1, 2)
    for even in (True, False)
]

__all__ = ["LinearConfig", "linear", "linear_config", "multiplies_and_adds"]
