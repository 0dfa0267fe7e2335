# pyright: basic, reportCallIssue=false, reportOperatorIssue=false
"""nn.batched_linear with dense weights: out[t, h] = w[h] @ x[t, h], one linear per head.

Absorbed MLA uses it on both sides of attention.  w[H, N, K] may be a view of kv_b in either
orientation: its last axis need not be the contiguous one.

T <= 16: a program owns ROWS rows of one head's w and walks K with tl.dot (the tokens padded to 16):
H * N / ROWS programs, all of the matrices' bytes in flight at once.  On an H200 0.9 to 1.05 of
cuBLAS's time.
T > 16:  torch.bmm over views (cuBLAS).

Floor for few tokens: 2*H*N*K bytes (bf16) at memory bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ktgraph.triton_kernels.compile import CompileCase
from ktgraph.triton_kernels.dense import dense_weights, in_kind
from ktgraph.triton_kernels.dependent import dependent_launch, enter
from ktgraph.triton_kernels.dots import dot
from ktgraph.triton_kernels.registry import cuda_kernel
from ktgraph.triton_kernels.rounding import rounded

FEW_TOKENS = 16  # the tile of tl.dot


@dataclass(frozen=True)
class BatchedConfig:
    """Rows of w of a program, columns of a step, stages of the pipeline."""

    rows: int
    cols: int
    warps: int
    stages: int


_HALF = {"few": BatchedConfig(16, 128, 4, 4), "many": BatchedConfig(64, 64, 4, 4)}
_FLOAT32 = {"few": BatchedConfig(16, 64, 4, 2), "many": BatchedConfig(32, 64, 4, 2)}


@cuda_kernel(
    "nn.batched_linear", name="triton.batched_linear", nmse=1e-5, supports=dense_weights(1)
)
def batched_linear(
    x: torch.Tensor,
    w: torch.Tensor,
    *,
    out: tuple[torch.Tensor],
    config: BatchedConfig | None = None,
) -> None:
    """`config` overrides the table's choice for up to 16 tokens (for benchmarks)."""
    assert x.stride(-1) == out[0].stride(-1) == 1
    tokens, heads = x.shape[:2]
    if tokens == 0:
        return
    if tokens > FEW_TOKENS:
        weight = w.to(x.dtype).transpose(1, 2)
        torch.bmm(x.transpose(0, 1), weight, out=out[0].transpose(0, 1))
        return
    c = config or batched_config(x, w)
    grid = (triton.cdiv(w.shape[1], c.rows), heads)
    _batched_linear[grid](
        x,
        w,
        out[0],
        tokens,
        w.shape[1],
        w.shape[2],
        *x.stride()[:2],
        *w.stride(),
        *out[0].stride()[:2],
        EVEN_K=w.shape[2] % c.cols == 0,
        TOKENS=FEW_TOKENS,
        ROWS=c.rows,
        COLS=c.cols,
        num_warps=c.warps,
        num_stages=c.stages,
        **dependent_launch(),
    )


def batched_config(x: torch.Tensor, w: torch.Tensor) -> BatchedConfig:
    """Larger tiles where there are rows enough for every multiprocessor."""
    table = _FLOAT32 if x.dtype == torch.float32 else _HALF
    return table["many" if w.shape[0] * w.shape[1] >= 64 * 132 else "few"]


@triton.jit
def _batched_linear(
    x,
    w,
    out,
    tokens,
    width,
    depth,
    stride_x_token,
    stride_x_head,
    stride_w_head,
    stride_w_row,
    stride_w_column,
    stride_out_token,
    stride_out_head,
    EVEN_K: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    enter()
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.arange(0, TOKENS)
    column = tl.arange(0, COLS)
    x_at = x + head * stride_x_head + token.to(tl.int64)[:, None] * stride_x_token + column[None, :]
    w_at = (
        w + head * stride_w_head + row[None, :] * stride_w_row + column[:, None] * stride_w_column
    )
    is_token = (token < tokens)[:, None]
    is_row = (row < width)[None, :]
    acc = tl.zeros([TOKENS, ROWS], dtype=tl.float32)
    for done in range(0, depth, COLS):
        if EVEN_K:
            value = tl.load(x_at + done, mask=is_token, other=0.0)
            weight = tl.load(w_at + done * stride_w_column, mask=is_row, other=0.0)
        else:
            left = column < depth - done
            value = tl.load(x_at + done, mask=is_token & left[None, :], other=0.0)
            weight = tl.load(w_at + done * stride_w_column, mask=is_row & left[:, None], other=0.0)
        acc = dot(value, in_kind(weight, value.dtype), acc)
    at = out + head * stride_out_head + token.to(tl.int64)[:, None] * stride_out_token
    tl.store(at + row[None, :], rounded(acc, out.dtype.element_ty), mask=is_token & is_row)


def _cases() -> list[CompileCase]:
    made: list[CompileCase] = []
    for kind, table in (("bf16", _HALF), ("fp32", _FLOAT32)):
        for size, c in table.items():
            for even in (True, False):
                for contiguous in ("column", "row"):
                    made.append(_case(kind, size, c, even, contiguous))
    return made


def _case(kind: str, size: str, c: BatchedConfig, even: bool, contiguous: str) -> CompileCase:
    strides = ("x_token", "x_head", "w_head", "w_row", "w_column", "out_token", "out_head")
    types = {n: f"*{kind}:16" for n in ("x", "w", "out")}
    types |= {n: "i32:16" for n in ("width", "depth")}
    types |= {f"stride_{n}": "i32:16" for n in strides if n != f"w_{contiguous}"}
    constants = {f"stride_w_{contiguous}": 1, "EVEN_K": even, "TOKENS": FEW_TOKENS}
    return CompileCase(
        _batched_linear,
        f"batched_linear {size} {kind}{' even' if even else ''}, w contiguous by {contiguous}",
        {**types, "tokens": "i32"},
        {**constants, "ROWS": c.rows, "COLS": c.cols},
        c.warps,
        c.stages,
    )


COMPILE_CASES = _cases()

__all__ = ["BatchedConfig", "batched_config", "batched_linear"]
