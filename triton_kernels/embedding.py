# pyright: basic, reportArgumentType=false, reportCallIssue=false
"""nn.embedding and logits.gather: out[r] = table[ids[r]], in the dtype of out.

Tiling: a program copies up to 1024 columns of one row; columns and rows are the grid.
Floor: 2 * rows * D * bytes over memory bandwidth.  Ids must be rows of the table: a launch cannot
look at them on the host, and reads wherever they point.
"""

import torch
import triton
import triton.language as tl

from ktgraph.triton_kernels.batch import DeviceBatch
from ktgraph.triton_kernels.compile import CompileCase
from ktgraph.triton_kernels.dependent import dependent_launch, enter
from ktgraph.triton_kernels.registry import cuda_kernel
from ktgraph.triton_kernels.rows import Rows

_COLS, _WARPS = 1024, 4


@triton.jit
def _gather_rows(table, ids, out, cols, inner, outer_stride, inner_stride, COLS: tl.constexpr):
    enter()
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    source = tl.load(ids + row)
    at = (source // inner).to(tl.int64) * outer_stride + (source % inner) * inner_stride
    values = tl.load(table + at + col, mask=col < cols)
    tl.store(out + row * cols + col, values.to(out.dtype.element_ty), mask=col < cols)


def _gather(table: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> None:
    if not ids.numel():
        return
    assert ids.is_contiguous()
    cols = table.shape[-1]
    assert out.is_contiguous()
    source = Rows.of(table)
    width = min(_COLS, triton.next_power_of_2(cols))
    _gather_rows[(ids.numel(), triton.cdiv(cols, width))](
        table,
        ids,
        out,
        cols,
        source.inner,
        source.outer_stride,
        source.inner_stride,
        COLS=width,
        num_warps=_WARPS,
        **dependent_launch(),
    )


@cuda_kernel("nn.embedding", name="triton.embedding", nmse=0.0)
def embedding(ids: torch.Tensor, table: torch.Tensor, *, out) -> None:
    _gather(table, ids, out[0])


@cuda_kernel("logits.gather", name="triton.gather_rows", nmse=0.0)
def gather(x: torch.Tensor, batch: DeviceBatch, *, out) -> None:
    _gather(x, batch.out_rows, out[0])


COMPILE_CASES = [
    CompileCase(
        _gather_rows,
        f"gather_rows {dtype}",
        {"table": f"*{dtype}:16", "ids": "*i32:16", "out": f"*{dtype}:16", "cols": "i32:16"}
        | {"outer_stride": "i32:16", "inner_stride": "i32:16"},
        {"inner": 1, "COLS": _COLS},
        num_warps=_WARPS,
    )
    for dtype in ("bf16", "fp32")
]
