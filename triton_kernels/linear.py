# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""nn.linear with dense weights: out[T, N] = x[T, K] @ w[N, K].T + b, sums in float32.

Three forms by the number of tokens:

T = 1, 2     multiply-add: a program owns ROWS rows of w for all tokens and walks K by COLS; every
             loaded weight is used T times from registers.  The tile of partial sums is reduced once
             at the end, so a row's result is the same for both T.
T = 3..32    tl.dot with the tokens padded to a tile of 16 or 32; a program owns ROWS rows of w and
             walks K in a software pipeline.  No split of K: N / ROWS programs with several stages
             each keep as many bytes in flight as the GPU needs, and one launch is cheaper than
             the second one that a fixed-order sum of splits takes.
T > 32       torch (cuBLAS), after a cast of w where its dtype differs.

Floor for few tokens: 2*N*K bytes (bf16) at memory bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ktgraph.triton_kernels.compile import CompileCase
from ktgraph.triton_kernels.dense import dense_weights, in_kind, unaligned
from ktgraph.triton_kernels.dots import dot
from ktgraph.triton_kernels.registry import cuda_kernel
from ktgraph.triton_kernels.rounding import rounded

MULTIPLY_ADD_TOKENS, FEW_TOKENS = 2, 32


@dataclass(frozen=True)
class LinearConfig:
    """Rows of w of a program, columns of a step.

    stages: of the pipeline (tl.dot); unroll: steps whose loads may be in flight together
    (multiply-add).
    """

    rows: int
    cols: int
    warps: int
    stages: int = 1
    unroll: int = 1


# A step of the multiply-add form holds rows * cols * 2 bytes in registers, those of several
# programs per multiprocessor being in flight together.
_MULTIPLY_ADD = {
    "small": LinearConfig(2, 1024, 4),  # 2048 rows still make 1000 programs
    "large": LinearConfig(8, 512, 4),
    "float32": LinearConfig(4, 512, 4),
}
# Shared memory of the tl.dot form: (tokens + rows) * cols * 2 bytes a stage, at most 99 KB.
_DOT = {
    "small": LinearConfig(16, 256, 4, 5),
    "large": LinearConfig(64, 128, 4, 4),
    "float32": LinearConfig(16, 64, 4, 3),
    "unaligned": LinearConfig(16, 64, 4, 1),
}


@cuda_kernel("nn.linear", name="triton.linear", nmse=1e-5, supports=dense_weights(1, 2))
def linear(
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    *,
    out: tuple[torch.Tensor],
    config: LinearConfig | None = None,
) -> None:
    """`config` overrides the table's choice for up to 32 tokens (for benchmarks)."""
    assert x.stride(-1) == w.stride(-1) == out[0].stride(-1) == 1
    assert b is None or b.is_contiguous()
    tokens = x.shape[0]
    if tokens == 0:
        return
    if tokens > FEW_TOKENS:
        _many(x, w, b, out[0])
    else:
        _few(x, w, b, out[0], config)


def _many(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, out: torch.Tensor) -> None:
    weight = w.to(x.dtype).t()
    if b is None:
        torch.mm(x, weight, out=out)
    else:
        torch.addmm(b.to(x.dtype), x, weight, out=out)


def _few(
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    out: torch.Tensor,
    config: LinearConfig | None,
) -> None:
    tokens = x.shape[0]
    kernel = _multiply_add if tokens <= MULTIPLY_ADD_TOKENS else _dot
    c = config or linear_config(x, w)
    padded = tokens if kernel is _multiply_add else max(16, triton.next_power_of_2(tokens))
    extra = {"UNROLL": c.unroll} if kernel is _multiply_add else {}
    kernel[(triton.cdiv(w.shape[0], c.rows),)](
        x,
        w,
        b,
        out,
        tokens,
        w.shape[0],
        w.shape[1],
        x.stride(0),
        w.stride(0),
        out.stride(0),
        HAS_BIAS=b is not None,
        EVEN_K=w.shape[1] % c.cols == 0,
        TOKENS=padded,
        ROWS=c.rows,
        COLS=c.cols,
        **extra,
        num_warps=c.warps,
        num_stages=c.stages,
    )


def linear_config(x: torch.Tensor, w: torch.Tensor) -> LinearConfig:
    """The configuration for up to 32 tokens: matrices of few rows need fewer rows a program."""
    if x.shape[0] <= MULTIPLY_ADD_TOKENS:
        if x.dtype == torch.float32:
            return _MULTIPLY_ADD["float32"]
        return _MULTIPLY_ADD["large" if w.shape[0] >= 8192 else "small"]
    if x.dtype == torch.float32:
        return _DOT["float32"]
    if unaligned(x, w):
        return _DOT["unaligned"]
    return _DOT["large" if w.shape[0] >= 64 * 264 else "small"]


@triton.jit
def _multiply_add(
    x,
    w,
    b,
    out,
    tokens,
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


@triton.jit
def _dot(
    x,
    w,
    b,
    out,
    tokens,
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
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = tl.minimum(row, width - 1).to(tl.int64)
    token = tl.arange(0, TOKENS)
    read = tl.minimum(token, tokens - 1)  # tokens past the edge repeat the last one
    column = tl.arange(0, COLS)
    x_at = x + read.to(tl.int64)[:, None] * stride_x + column[None, :]
    w_at = w + inside[None, :] * stride_w + column[:, None]
    acc = tl.zeros([TOKENS, ROWS], dtype=tl.float32)
    for done in range(0, depth, COLS):
        if EVEN_K:
            value = tl.load(x_at + done)
            weight = tl.load(w_at + done)
        else:
            value = tl.load(x_at + done, mask=(column < depth - done)[None, :], other=0.0)
            weight = tl.load(w_at + done, mask=(column < depth - done)[:, None], other=0.0)
        acc = dot(value, in_kind(weight, value.dtype), acc)
    if HAS_BIAS:
        acc += tl.load(b + row, mask=row < width, other=0.0).to(tl.float32)[None, :]
    at = out + token.to(tl.int64)[:, None] * stride_out + row[None, :]
    mask = (token < tokens)[:, None] & (row < width)[None, :]
    tl.store(at, rounded(acc, out.dtype.element_ty), mask=mask)


def _cases() -> list[CompileCase]:
    made: list[CompileCase] = []
    for kernel, table, token_tiles in (
        (_multiply_add, _MULTIPLY_ADD, (1, 2)),
        (_dot, _DOT, (16, 32)),
    ):
        for name, c in table.items():
            kind = "fp32" if name == "float32" else "bf16"
            size = "i32" if name == "unaligned" else "i32:16"
            types = {n: f"*{kind}:16" for n in ("x", "w", "b", "out")} | {"tokens": "i32"}
            types |= {n: size for n in ("width", "depth", "stride_x", "stride_w", "stride_out")}
            for tokens in token_tiles:
                for even in (True, False) if name != "unaligned" else (False,):
                    constants = {
                        "HAS_BIAS": not even,
                        "EVEN_K": even,
                        "TOKENS": tokens,
                        "ROWS": c.rows,
                        "COLS": c.cols,
                    }
                    absent = {"b": None} if even else {}
                    if kernel is _multiply_add:
                        constants["UNROLL"] = c.unroll
                    made.append(
                        CompileCase(
                            kernel,
                            f"linear.{kernel.fn.__name__[1:]} {name} T={tokens}"
                            f"{' even' if even else ''}",
                            {n: t for n, t in types.items() if n not in absent},
                            {**constants, **absent},
                            c.warps,
                            c.stages,
                        )
                    )
    return made


COMPILE_CASES = _cases()

__all__ = ["FEW_TOKENS", "LinearConfig", "linear", "linear_config"]
