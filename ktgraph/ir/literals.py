"""Literals of a module in print order: the one walk that witnesses and `name-dims` share.

A literal is a bare integer of a dim in a type or attribute.  A dim without names is one literal; a
dim with names (``2*b*s``) has one per term, its coefficient, 1 included (another trace may have 3
there).  Ranges of weights and repeats, `layer` attributes and layer counts of states are not sizes
and are left out.  Order: weights (type, recipe attributes), then functions (argument types,
attributes, ops: attributes, body, result types).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ktgraph.ir.dims import Dim
from ktgraph.ir.graph import Attr, Block, Function, Module, Op, Value, Weight
from ktgraph.ir.printer import print_op, print_weight
from ktgraph.ir.types import StateType, TensorType, Type

Where = Callable[[], str]  # the line a dim stands in, spelled only when asked for
DimMap = Callable[[Dim, Where], Dim]
_NOT_SIZES = frozenset({"layer", "index", "lo", "hi"})


def literals(module: Module) -> list[int]:
    """Every literal of the module; a frontend stores this list of another trace as a witness."""
    found: list[int] = []

    def record(dim: Dim, where: Where) -> Dim:
        found.extend(dim_literals(dim))
        return dim

    map_dims(module, record)
    return found


def literal_lines(module: Module) -> list[str]:
    """For each literal the weight, function or op line it stands in (for reports)."""
    found: list[str] = []

    def record(dim: Dim, where: Where) -> Dim:
        found.extend([where()] * len(dim_literals(dim)))
        return dim

    map_dims(module, record)
    return found


def set_literals(module: Module, values: Sequence[int | Dim]) -> None:
    """Replace every literal, in the order of `literals`, by a number or a dim, in place.

    Raises ValueError when the count differs.
    """
    count = len(literals(module))
    if len(values) != count:
        raise ValueError(
            f"@{module.name} has {count} literals, {len(values)} values given: "
            "the list comes from a module of another structure"
        )
    rest = iter(values)
    map_dims(module, lambda dim, where: _with_literals(dim, rest))


def dim_literals(dim: Dim) -> list[int]:
    """The literals of one dim: its coefficients in normal form, [0] for the dim 0."""
    return [coeff for _, coeff in dim.terms] or [0]


def _with_literals(dim: Dim, values: Iterator[int | Dim]) -> Dim:
    total = Dim.of(0)
    for mono in [mono for mono, _ in dim.terms] or [()]:
        total = total + Dim({mono: 1}) * Dim.of(next(values))
    return total


def map_dims(module: Module, change: DimMap) -> None:
    """Pass every dim through `change`, in the order of `literals`, in place."""
    for weight in module.weights.values():
        _map_weight(weight, change)
    for func in module.functions.values():
        _map_function(func, change)


def _map_weight(weight: Weight, change: DimMap) -> None:
    def where() -> str:
        return print_weight(weight)

    weight.type = _map_tensor(weight.type, change, where)
    if weight.recipe is not None:
        attrs = tuple((k, _map_attr(v, change, where)) for k, v in weight.recipe.attrs)
        weight.recipe = replace(weight.recipe, attrs=attrs)


def _map_function(func: Function, change: DimMap) -> None:
    def where() -> str:
        return f"func @{func.name}"

    for arg in func.args:
        arg.type = _map_type(arg.type, change, where)
    func.attrs = {k: _map_attr(v, change, where) for k, v in func.attrs.items()}
    _map_block(func.body, change)


def _map_block(block: Block, change: DimMap) -> None:
    for op in block.ops:
        _map_op(op, change)


def _map_op(op: Op, change: DimMap) -> None:
    def where() -> str:
        return print_op(op).split("\n")[0]

    op.attrs = {
        k: v if k in _NOT_SIZES else _map_attr(v, change, where) for k, v in op.attrs.items()
    }
    if op.body is not None:
        _map_block(op.body, change)
    for result in op.results:
        result.type = _map_type(result.type, change, where)
    if op.body is not None:
        _copy_types(op.results, op.body.args)


def _copy_types(results: Sequence[Value], args: Sequence[Value]) -> None:
    """A repeat's arguments are printed without types: they have those of its results."""
    for result, arg in zip(results, args, strict=True):
        arg.type = result.type


def _map_type(type: Type, change: DimMap, where: Where) -> Type:
    if isinstance(type, TensorType):
        return _map_tensor(type, change, where)
    window = None if type.window is None else change(type.window, where)
    if isinstance(type, StateType):
        parts = tuple(_map_tensor(p, change, where) for p in type.parts)
        return replace(type, parts=parts, window=window)
    return replace(type, window=window)


def _map_tensor(type: TensorType, change: DimMap, where: Where) -> TensorType:
    return replace(type, dims=tuple(change(d, where) for d in type.dims))


def _map_attr(value: Attr, change: DimMap, where: Where) -> Attr:
    if isinstance(value, Dim):
        return change(value, where)
    if isinstance(value, tuple):
        return tuple(_map_attr(v, change, where) for v in value)
    return value


__all__ = ["dim_literals", "literal_lines", "literals", "map_dims", "set_literals"]
