"""tensor.*: shape ops and elementwise arithmetic.  `...` is any number of axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ktgraph.ir.dims import Dim, product
from ktgraph.ir.graph import Attr
from ktgraph.ir.types import TensorType, Type
from ktgraph.ops.registry import op
from ktgraph.ops.signature import SignatureError


def _tensor(types: Sequence[Type | None], position: int = 0) -> TensorType:
    found = types[position]
    assert isinstance(found, TensorType)
    return found


def _dims(value: Attr) -> tuple[Dim, ...]:
    assert isinstance(value, tuple)
    return tuple(d for d in value if isinstance(d, Dim))


def _axis(attrs: Mapping[str, Attr], rank: int) -> int:
    value = attrs["axis"]
    assert isinstance(value, Dim)
    axis = value.const()
    if not -rank <= axis < rank:
        raise SignatureError(f"axis {axis} is outside a tensor of {rank} axes")
    return axis % rank


def _reshape_types(types: Sequence[Type | None], attrs: Mapping[str, Attr]) -> list[Type]:
    given, shape = _tensor(types), _dims(attrs["shape"])
    if product(given.dims) != product(shape):
        shown = ", ".join(map(str, shape))
        raise SignatureError(f"reshape of {given} to [{shown}] changes the number of elements")
    return [TensorType(given.dtype, shape)]


@op("tensor.reshape(x: any[...]; shape: ints) -> any[...]", infer=_reshape_types, view=True)
def reshape(x: torch.Tensor, *, shape: list[int]) -> torch.Tensor:
    """The same elements, row-major, under another shape."""
    return x.reshape(shape)


def _permute_types(types: Sequence[Type | None], attrs: Mapping[str, Attr]) -> list[Type]:
    given, order = _tensor(types), [d.const() for d in _dims(attrs["order"])]
    if sorted(order) != list(range(given.rank)):
        raise SignatureError(f"order {order} is no permutation of {given.rank} axes")
    return [TensorType(given.dtype, tuple(given.dims[i] for i in order))]


@op("tensor.permute(x: any[...]; order: ints) -> any[...]", infer=_permute_types, view=True)
def permute(x: torch.Tensor, *, order: list[int]) -> torch.Tensor:
    """Axes in another order."""
    return x.permute(order)


def _split_types(types: Sequence[Type | None], attrs: Mapping[str, Attr]) -> list[Type]:
    given, sizes = _tensor(types), _dims(attrs["sizes"])
    axis = _axis(attrs, given.rank)
    total = Dim.of(0)
    for size in sizes:
        total = total + size
    if total != given.dims[axis]:
        raise SignatureError(f"sizes sum to {total}, axis {axis} of {given} is {given.dims[axis]}")
    shapes = [(*given.dims[:axis], size, *given.dims[axis + 1 :]) for size in sizes]
    return [TensorType(given.dtype, shape) for shape in shapes]


@op(
    "tensor.split(x: any[...]; sizes: ints, axis: int = -1) -> any[...]",
    infer=_split_types,
    view=True,
)
def split(x: torch.Tensor, *, sizes: list[int], axis: int) -> tuple[torch.Tensor, ...]:
    """Consecutive pieces along an axis, one result per size."""
    return torch.split(x, sizes, dim=axis)


def _without(dims: tuple[Dim, ...], axis: int) -> tuple[Dim, ...]:
    return dims[:axis] + dims[axis + 1 :]


def _concat_types(types: Sequence[Type | None], attrs: Mapping[str, Attr]) -> list[Type]:
    first = _tensor(types)
    axis = _axis(attrs, first.rank)
    total = Dim.of(0)
    for position in range(len(types)):
        part = _tensor(types, position)
        if _without(part.dims, axis) != _without(first.dims, axis):
            raise SignatureError(f"cannot concatenate {part} with {first} along axis {axis}")
        total = total + part.dims[axis]
    dims = (*first.dims[:axis], total, *first.dims[axis + 1 :])
    return [TensorType(first.dtype, dims)]


@op("tensor.concat(xs: any[...]*; axis: int = -1) -> any[...]", infer=_concat_types)
def concat(*xs: torch.Tensor, axis: int) -> torch.Tensor:
    """Pieces joined along an axis."""
    return torch.cat(xs, dim=axis)


def _expand_types(types: Sequence[Type | None], attrs: Mapping[str, Attr]) -> list[Type]:
    given, shape = _tensor(types), _dims(attrs["shape"])
    fits = len(shape) == given.rank and all(
        a == b or a == 1 for a, b in zip(given.dims, shape, strict=True)
    )
    if not fits:
        raise SignatureError(f"{given} does not expand to [{', '.join(map(str, shape))}]")
    return [TensorType(given.dtype, shape)]


@op("tensor.expand(x: any[...]; shape: ints) -> any[...]", infer=_expand_types, view=True)
def expand(x: torch.Tensor, *, shape: list[int]) -> torch.Tensor:
    """Axes of size 1 repeated to `shape` (same number of axes)."""
    return x.expand(shape)


def _slice_types(types: Sequence[Type | None], attrs: Mapping[str, Attr]) -> list[Type]:
    given = _tensor(types)
    axis = _axis(attrs, given.rank)
    start, size = attrs["start"], attrs["size"]
    assert isinstance(start, Dim)
    assert isinstance(size, Dim)
    return [TensorType(given.dtype, (*given.dims[:axis], size, *given.dims[axis + 1 :]))]


@op(
    "tensor.slice(x: any[...]; start: int, size: int, axis: int = -1) -> any[...]",
    infer=_slice_types,
    view=True,
)
def slice_(x: torch.Tensor, *, start: int, size: int, axis: int) -> torch.Tensor:
    """`size` entries of an axis from `start`."""
    return x.narrow(axis, start, size)


def _cast_types(types: Sequence[Type | None], attrs: Mapping[str, Attr]) -> list[Type]:
    return [TensorType(str(attrs["dtype"]), _tensor(types).dims)]


@op("tensor.cast(x: any[...]; dtype: str) -> any[...]", infer=_cast_types)
def cast(x: torch.Tensor, *, dtype: str) -> torch.Tensor:
    """Another dtype, rounding to nearest even.  In a float64 run, float casts keep float64."""
    wanted = torch_dtype(dtype)
    if x.dtype == torch.float64 and wanted.is_floating_point:
        return x
    return x.to(wanted)


def _broadcast_types(types: Sequence[Type | None], attrs: Mapping[str, Attr]) -> list[Type]:
    a, b = _tensor(types, 0), _tensor(types, 1)
    longer, shorter = (a, b) if a.rank >= b.rank else (b, a)
    pad = (Dim.of(1),) * (longer.rank - shorter.rank)
    dims: list[Dim] = []
    for x, y in zip(longer.dims, pad + shorter.dims, strict=True):
        if x != y and 1 not in (x, y):
            raise SignatureError(f"{a} and {b} do not broadcast")
        dims.append(y if x == 1 else x)
    return [TensorType(a.dtype, tuple(dims))]


@op(
    "tensor.add(x: f[...x], y: f[...y]) -> f[...]",
    infer=_broadcast_types,
    cases=[{"T": 1, "D": 33}, {"T": 7, "D": 256}],
)
def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x + y, broadcasting."""
    return x + y


@op("tensor.add3(x: f[...], y: f[...], z: f[...]) -> f[...]")
def add3(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """(x + y) + z"""
    return x + y + z


@op("tensor.mul(x: f[...x], y: f[...y]) -> f[...]", infer=_broadcast_types)
def mul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x * y, broadcasting."""
    return x * y


@op("tensor.scale(x: f[...]; by: float) -> f[...]")
def scale(x: torch.Tensor, *, by: float) -> torch.Tensor:
    """x * by"""
    return x * by


_DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
}


def torch_dtype(dtype: str) -> torch.dtype:
    """The torch dtype of an IR dtype."""
    return _DTYPES[dtype]


def dtype_name(dtype: torch.dtype) -> str:
    """The IR name of a torch dtype; raises ValueError for one the IR lacks."""
    for name, known in _DTYPES.items():
        if known == dtype:
            return name
    raise ValueError(f"dtype {dtype} has no IR name (known: {', '.join(_DTYPES)})")
