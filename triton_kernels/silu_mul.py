# pyright: basic, reportArgumentType=false, reportCallIssue=false
"""`gated_mul`: out[T, F] = act(gate) * up of x13[T, 2F] = [gate | up], between an MLP's products.

Formula: `ktgraph.ops.nn.gated`, with its rounding points; "swiglu_clamped" is gpt-oss's form.
Tiling: a program covers up to 1024 columns of one row.
Floor: 3 * T * F * bytes over memory bandwidth.
"""

import torch
import triton
import triton.language as tl

from ktgraph.triton_kernels.activations import GATED, gated
from ktgraph.triton_kernels.compile import CompileCase
from ktgraph.triton_kernels.dependent import dependent_launch, enter
from ktgraph.triton_kernels.rounding import rounded

_COLS, _WARPS = 1024, 4


@triton.jit
def _gated_mul(
    x13, out, width, row_stride, out_stride, alpha, limit, ACT: tl.constexpr, COLS: tl.constexpr
):
    enter()
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = col < width
    at = x13 + row * row_stride + col
    gate = tl.load(at, mask=inside).to(tl.float32)
    up = tl.load(at + width, mask=inside).to(tl.float32)
    y = gated(gate, up, alpha, limit, ACT, x13.dtype.element_ty)
    tl.store(out + row * out_stride + col, rounded(y, out.dtype.element_ty), mask=inside)


def gated_mul(
    x13: torch.Tensor,
    out: torch.Tensor,
    *,
    act: str = "silu",
    alpha: float = 1.702,
    limit: float = 7.0,
) -> None:
    """Gate columns of x13 first; both [T, .] with dense last axes."""
    if act not in GATED:
        raise ValueError(f"act {act!r}: known are {', '.join(GATED)}")
    rows, width = out.shape
    assert x13.shape == (rows, 2 * width)
    assert x13.stride(1) == 1
    assert out.stride(1) == 1
    if not out.numel():
        return
    cols = min(_COLS, triton.next_power_of_2(width))
    _gated_mul[(rows, triton.cdiv(width, cols))](
        x13,
        out,
        width,
        x13.stride(0),
        out.stride(0),
        alpha,
        limit,
        ACT=act,
        COLS=cols,
        num_warps=_WARPS,
        **dependent_launch(),
    )


COMPILE_CASES = [
    CompileCase(
        _gated_mul,
        f"gated_mul {act} {dtype}",
        {"x13": f"*{dtype}:16", "out": f"*{dtype}:16", "alpha": "fp32", "limit": "fp32"}
        | {n: "i32:16" for n in ("width", "row_stride", "out_stride")},
        {"ACT": act, "COLS": _COLS},
        num_warps=_WARPS,
    )
    for act in ("silu", "gelu", "swiglu_clamped")
    for dtype in ("bf16", "fp32")
]

__all__ = ["COMPILE_CASES", "gated_mul"]
