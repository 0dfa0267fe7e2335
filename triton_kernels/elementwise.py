# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
"""Elementwise ops: tensor.add, add3, mul, scale, cast, reshape (as a copy), concat, and nn.act.

Tiling: operands are broadcast to the result's shape (stride 0 where one repeats) and neighbouring
axes that lie alike in all operands are joined, which leaves one axis for dense operands and at most
three for views.  A program covers a tile of 1024 elements: ROWS of the leading axes times COLS of
the last one.  Arithmetic in f32, rounded where torch rounds.
Floor: bytes of operands and result over memory bandwidth.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ktgraph.ir.dims import Dim
from ktgraph.ir.graph import Module, Op
from ktgraph.ops.registry import Refusal, no
from ktgraph.triton_kernels.activations import ACTIVATIONS, activate
from ktgraph.triton_kernels.compile import CompileCase
from ktgraph.triton_kernels.dependent import dependent_launch, enter
from ktgraph.triton_kernels.registry import cuda_kernel
from ktgraph.triton_kernels.rounding import rounded, through
from ktgraph.triton_kernels.rows import Rows, tile_rows

_TILE, _WARPS = 1024, 4


@triton.jit
def _convert(values, dtype: tl.constexpr):
    """tensor.cast: floats to nearest even, floats to integers towards zero."""
    if values.dtype == dtype:
        return values
    if values.dtype.is_floating() and dtype.is_floating():
        return rounded(values.to(tl.float32), dtype)
    if values.dtype.is_floating():
        return values.to(tl.float32).to(dtype)
    if dtype.is_floating():
        return rounded(values.to(tl.float32), dtype)
    return values.to(dtype)


@triton.jit
def _tile_of(operand, outer, inner, col, outer_stride, inner_stride, col_stride, inside):
    at = outer * outer_stride + inner * inner_stride
    return tl.load(operand + at[:, None] + col[None, :] * col_stride, mask=inside)


@triton.jit
def _map(
    x,
    y,
    z,
    out,
    rows,
    inners,
    cols,
    by,
    x_outer,
    x_inner,
    x_col,
    y_outer,
    y_inner,
    y_col,
    z_outer,
    z_inner,
    z_col,
    out_outer,
    out_inner,
    out_col,
    OP: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    enter()
    blocks = tl.cdiv(cols, COLS)  # all programs on one grid axis: the others hold only 65535
    row = (tl.program_id(0) // blocks) * ROWS + tl.arange(0, ROWS)
    col = (tl.program_id(0) % blocks).to(tl.int64) * COLS + tl.arange(0, COLS)
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    outer, inner = (row // inners).to(tl.int64), (row % inners).to(tl.int64)
    dtype = out.dtype.element_ty
    a = _tile_of(x, outer, inner, col, x_outer, x_inner, x_col, inside)
    if OP == "copy":
        result = _convert(a, dtype)
    else:
        a = a.to(tl.float32)
        if y is not None:
            b = _tile_of(y, outer, inner, col, y_outer, y_inner, y_col, inside).to(tl.float32)
        if OP == "add":
            a += b
        elif OP == "add3":
            c = _tile_of(z, outer, inner, col, z_outer, z_inner, z_col, inside).to(tl.float32)
            a = through(a + b, dtype) + c
        elif OP == "mul":
            a *= b
        elif OP == "scale":
            a *= by
        else:
            a = activate(a, OP)
        result = rounded(a, dtype)
    at = outer * out_outer + inner * out_inner
    tl.store(out + at[:, None] + col[None, :] * out_col, result, mask=inside)


def _join_axes(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """(size, stride of each operand) of the fewest axes that address all operands."""
    axes: list[tuple[int, ...]] = []
    for position, size in enumerate(shape):
        here = tuple(s[position] for s in strides)
        if size == 1:
            continue
        if axes and all(a == size * b for a, b in zip(axes[-1][1:], here, strict=True)):
            axes[-1] = (axes[-1][0] * size, *here)
        else:
            axes.append((size, *here))
    return axes


def _launch(op: str, operands: Sequence[torch.Tensor], out: torch.Tensor, by: float = 0.0) -> None:
    """out = op(operands), each broadcast to the shape of `out`."""
    if not out.numel():
        return
    spread = [x.expand(out.shape) for x in operands]
    axes = _join_axes(out.shape, [x.stride() for x in (*spread, out)])
    if len(axes) > 3:
        raise ValueError(f"{op}: operands of shape {tuple(out.shape)} need {len(axes)} strides")
    empty = (1, *[0] * (len(spread) + 1))
    outer, inner, last = [empty] * (3 - len(axes)) + axes
    given = [*spread, *[None] * (3 - len(spread))]
    strides = [v for i in range(1, len(outer) - 1) for v in (outer[i], inner[i], last[i])]
    strides += [0] * (9 - len(strides))
    rows, cols = outer[0] * inner[0], last[0]
    width = min(_TILE, triton.next_power_of_2(cols))
    tile = tile_rows(rows, width, _TILE)
    _map[(triton.cdiv(rows, tile) * triton.cdiv(cols, width),)](
        *given,
        out,
        rows,
        inner[0],
        cols,
        by,
        *strides,
        outer[-1],
        inner[-1],
        last[-1],
        OP=op,
        ROWS=tile,
        COLS=width,
        num_warps=_WARPS,
        **dependent_launch(),
    )


@cuda_kernel("tensor.add", name="triton.add", nmse=1e-5)
def add(x: torch.Tensor, y: torch.Tensor, *, out) -> None:
    _launch("add", (x, y), out[0])


@cuda_kernel("tensor.add3", name="triton.add3", nmse=1e-5)
def add3(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, *, out) -> None:
    _launch("add3", (x, y, z), out[0])


@cuda_kernel("tensor.mul", name="triton.mul", nmse=1e-5)
def mul(x: torch.Tensor, y: torch.Tensor, *, out) -> None:
    _launch("mul", (x, y), out[0])


@cuda_kernel("tensor.scale", name="triton.scale", nmse=1e-5)
def scale(x: torch.Tensor, *, out, by: float) -> None:
    _launch("scale", (x,), out[0], by)


@cuda_kernel("nn.act", name="triton.act", nmse=1e-5)
def act(x: torch.Tensor, *, out, act: str) -> None:
    if act not in ACTIVATIONS:
        raise ValueError(f"act {act!r}: known are {', '.join(ACTIVATIONS)}")
    _launch(act, (x,), out[0])


@cuda_kernel("tensor.cast", name="triton.copy", nmse=0.0)
def cast(x: torch.Tensor, *, out, dtype: str) -> None:
    _launch("copy", (x,), out[0])


@cuda_kernel("tensor.reshape", name="triton.copy", nmse=0.0)
def reshape(x: torch.Tensor, *, out, shape: Sequence[int]) -> None:
    """A copy of a view that no strides can reshape, into dense memory."""
    _launch("copy", (x,), out[0].view(x.shape))


# -- concat ---------------------------------------------------------------------------------------
@triton.jit
def _copy_tile(source, out, rows, inners, cols, outer_stride, inner_stride, out_stride, row, col):
    outer, inner = (row // inners).to(tl.int64), (row % inners).to(tl.int64)
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    at = outer * outer_stride + inner * inner_stride
    values = tl.load(source + at[:, None] + col[None, :], mask=inside)
    tl.store(out + row.to(tl.int64)[:, None] * out_stride + col[None, :], values, mask=inside)


@triton.jit
def _concat(
    x,
    y,
    out,
    rows,
    x_inners,
    x_cols,
    x_outer,
    x_inner,
    y_inners,
    y_cols,
    y_outer,
    y_inner,
    out_stride,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Two pieces side by side: the second grid axis walks the blocks of x, then those of y."""
    enter()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block, x_blocks = tl.program_id(1), tl.cdiv(x_cols, COLS)
    if block < x_blocks:
        col = block * COLS + tl.arange(0, COLS)
        _copy_tile(x, out, rows, x_inners, x_cols, x_outer, x_inner, out_stride, row, col)
    else:
        col = (block - x_blocks) * COLS + tl.arange(0, COLS)
        _copy_tile(y, out + x_cols, rows, y_inners, y_cols, y_outer, y_inner, out_stride, row, col)


def _pair(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor, width: int) -> None:
    """out[:, :x's columns] = x, then y; `out` is the whole result from the first column of x on."""
    left, right = Rows.of(x), Rows.of(y)
    cols = (x.shape[-1], y.shape[-1])
    tile_cols = min(_TILE, triton.next_power_of_2(max(cols)))
    tile = tile_rows(left.count, tile_cols, _TILE)
    blocks = sum(triton.cdiv(c, tile_cols) for c in cols)
    _concat[(triton.cdiv(left.count, tile), blocks)](
        x,
        y,
        out,
        left.count,
        left.inner,
        cols[0],
        left.outer_stride,
        left.inner_stride,
        right.inner,
        cols[1],
        right.outer_stride,
        right.inner_stride,
        width,
        ROWS=tile,
        COLS=tile_cols,
        num_warps=_WARPS,
        **dependent_launch(),
    )


def _last_axis(op: Op, module: Module) -> bool | Refusal:
    axis = op.attrs.get("axis")
    if axis is None or axis in (Dim.of(-1), Dim.of(op.results[0].tensor.rank - 1)):
        return True
    return no("it joins along the last axis only", op)


@cuda_kernel("tensor.concat", name="triton.concat", nmse=0.0, supports=_last_axis)
def concat(*xs: torch.Tensor, out, axis: int) -> None:
    """Two pieces a launch."""
    whole = out[0]
    assert whole.is_contiguous()
    assert axis in (-1, whole.dim() - 1)
    if not whole.numel():
        return
    start = 0
    for i in range(0, len(xs) - 1, 2):
        x, y = xs[i : i + 2]
        _pair(x, y, whole[..., start:], whole.shape[-1])
        start += x.shape[-1] + y.shape[-1]
    if len(xs) % 2:
        _launch("copy", (xs[-1],), whole[..., start:])


# -- compile cases --------------------------------------------------------------------------------
def _case(op: str, operands: int, dtype: str, rows: int, cols: int) -> CompileCase:
    names = ("x", "y", "z")[:operands]
    width = min(_TILE, triton.next_power_of_2(cols))
    strides = {f"{n}_{axis}": "i32:16" for n in (*names, "out") for axis in ("outer", "inner")}
    absent = [n for n in ("x", "y", "z") if n not in names]
    return CompileCase(
        _map,
        f"{op} {dtype} rows={rows} cols={cols}",
        {n: f"*{dtype}:16" for n in (*names, "out")}
        | {"rows": "i32", "cols": "i32:16", "by": "fp32"}
        | strides,
        {"OP": op, "ROWS": tile_rows(rows, width, _TILE), "COLS": width, "inners": 1}
        | {f"{n}_col": 1 for n in (*names, "out")}
        | {n: None for n in absent}
        | {f"{n}_{axis}": 0 for n in absent for axis in ("outer", "inner", "col")},
        num_warps=_WARPS,
    )


COMPILE_CASES = [
    *(
        _case(op, operands, dtype, rows, cols)
        for op, operands in (("add", 2), ("add3", 3), ("mul", 2), ("copy", 1), ("gelu", 1))
        for dtype, rows, cols in (("bf16", 1, 8192), ("bf16", 8192, 192), ("fp32", 1, 8192))
    ),
    CompileCase(
        _concat,
        "concat bf16",
        {"x": "*bf16:16", "y": "*bf16:16", "out": "*bf16:16", "rows": "i32"}
        | {n: "i32:16" for n in ("x_cols", "y_cols", "x_outer", "y_outer", "out_stride")}
        | {n: "i32:16" for n in ("x_inner", "y_inner", "x_inners", "y_inners")},
        {"ROWS": 8, "COLS": 128},
        num_warps=_WARPS,
    ),
]
