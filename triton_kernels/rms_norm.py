# pyright: basic, reportArgumentType=false, reportCallIssue=false
"""nn.rms_norm and nn.add_rms_norm.

    h = s / sqrt(mean(s^2) + eps) in f32, s = x (+ y);  out = w * h, h rounded before (or after,
    late_cast) the product.  Zhang and Sennrich, arXiv 1910.07467.

Tiling: a program holds ROWS whole rows in registers, so each value is read once; one row a program
while there are few rows.  w is loaded before the sum over the row is needed.
Floor: 2 * T * D * bytes (4 * T * D with the sum) over memory bandwidth; 4 FLOPs a value.
"""

import torch
import triton
import triton.language as tl

from ktgraph.triton_kernels.compile import CompileCase
from ktgraph.triton_kernels.dependent import dependent_launch, enter
from ktgraph.triton_kernels.registry import cuda_kernel
from ktgraph.triton_kernels.rounding import rounded, through
from ktgraph.triton_kernels.rows import Rows, tile_rows


@triton.jit
def _rms_norm(
    x,
    y,
    w,
    total_out,
    out,
    count,
    cols,
    eps,
    x_inner,
    x_outer_stride,
    x_inner_stride,
    y_inner,
    y_outer_stride,
    y_inner_stride,
    LATE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    enter()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)
    inside = (row < count)[:, None] & (col < cols)[None, :]
    dtype = x.dtype.element_ty
    x_at = (row // x_inner).to(tl.int64) * x_outer_stride + (row % x_inner) * x_inner_stride
    s = tl.load(x + x_at[:, None] + col[None, :], mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(w + col, mask=col < cols, other=0.0).to(tl.float32)[None, :]
    at = row.to(tl.int64)[:, None] * cols + col[None, :]
    if y is not None:
        y_at = (row // y_inner).to(tl.int64) * y_outer_stride + (row % y_inner) * y_inner_stride
        s += tl.load(y + y_at[:, None] + col[None, :], mask=inside, other=0.0).to(tl.float32)
        s = through(s, dtype)
        tl.store(total_out + at, rounded(s, dtype), mask=inside)
    h = s * tl.rsqrt(tl.sum(s * s, 1) / cols + eps)[:, None]
    if not LATE:
        h = through(h, dtype)
        weight = through(weight, dtype)
    tl.store(out + at, rounded(h * weight, dtype), mask=inside)


def _config(count: int, width: int) -> dict[str, int]:
    """Rows of a program and its warps: 16 values a thread at most 16 warps."""
    rows = tile_rows(count, width, 2048)
    return {"ROWS": rows, "num_warps": min(16, max(1, rows * width // 512))}


def _launch(x, y, w, total_out, out, eps: float, late_cast: bool) -> None:
    cols = x.shape[-1]
    given, added = Rows.of(x), Rows.of(x if y is None else y)
    if not given.count:
        return
    assert out.is_contiguous()
    assert total_out is None or total_out.is_contiguous()
    width = triton.next_power_of_2(cols)
    config = _config(given.count, width)
    _rms_norm[(triton.cdiv(given.count, config["ROWS"]),)](
        x,
        y,
        w,
        total_out,
        out,
        given.count,
        cols,
        eps,
        given.inner,
        given.outer_stride,
        given.inner_stride,
        added.inner,
        added.outer_stride,
        added.inner_stride,
        LATE=late_cast,
        COLS=width,
        **config,
        **dependent_launch(),
    )


@cuda_kernel("nn.rms_norm", name="triton.rms_norm", nmse=1e-5)
def rms_norm(x: torch.Tensor, w: torch.Tensor, *, out, eps: float, late_cast: bool) -> None:
    _launch(x, None, w, None, out[0], eps, late_cast)


@cuda_kernel("nn.add_rms_norm", name="triton.add_rms_norm", nmse=1e-5)
def add_rms_norm(
    x: torch.Tensor, y: torch.Tensor, w: torch.Tensor, *, out, eps: float, late_cast: bool
) -> None:
    _launch(x, y, w, out[0], out[1], eps, late_cast)


def _case(count: int, cols: int, dtype: str, added: bool) -> CompileCase:
    config = _config(count, triton.next_power_of_2(cols))
    operands = ("x", "y", "w", "total_out", "out") if added else ("x", "w", "out")
    strides = ("x_outer_stride", "x_inner_stride", "y_outer_stride", "y_inner_stride")
    return CompileCase(
        _rms_norm,
        f"{'add_' if added else ''}rms_norm {dtype} rows={count} D={cols}",
        {n: f"*{dtype}:16" for n in operands}
        | {"count": "i32", "cols": "i32:16", "eps": "fp32"}
        | {n: "i32:16" for n in strides},
        {"LATE": False, "ROWS": config["ROWS"], "COLS": triton.next_power_of_2(cols)}
        | {"x_inner": 1, "y_inner": 1}
        | ({} if added else {"y": None, "total_out": None}),
        num_warps=config["num_warps"],
    )


COMPILE_CASES = [
    _case(count, cols, dtype, added)
    for dtype in ("bf16", "fp32")
    for count, cols, added in (
        (1, 2048, True),
        (1, 7168, True),
        (2048, 7168, True),
        (2048, 512, False),
        (65536, 128, False),
    )
]
