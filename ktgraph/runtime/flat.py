"""A function as the flat list of ops that run: repeats unrolled, every value a slot of its own.

Slots are named after IR values (`h`, in a repeat `h[3]`).  `Layouts` says for each slot in whose
storage it lies and with which strides: view ops cost nothing where strides can express them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ktgraph.ir.dims import Dim
from ktgraph.ir.graph import Block, Function, Module, Op, Operand, Value, WeightRef
from ktgraph.ir.types import StateType, TensorType, Type
from ktgraph.ops.registry import op_def

Dims = tuple[Dim, ...]


@dataclass(frozen=True)
class Slot:
    """One value of one iteration; its type holds only syms, named dims are numbers."""

    name: str
    type: Type


@dataclass(frozen=True)
class FlatWeight:
    """A weight, and which member of a family."""

    ref: WeightRef
    index: int | None


@dataclass(frozen=True)
class FlatOp:
    """An op of one iteration; `bindings` are dims and repeat indices, for attributes."""

    op: Op
    bindings: Mapping[str, int]
    operands: tuple[Slot | FlatWeight | None, ...]
    results: tuple[Slot, ...]

    def operand(self, position: int) -> Slot | FlatWeight | None:
        """The operand, None where it is absent."""
        return self.operands[position] if position < len(self.operands) else None

    @property
    def slots(self) -> list[Slot]:
        return [o for o in self.operands if isinstance(o, Slot)]


@dataclass(frozen=True)
class FlatFunction:
    name: str
    args: tuple[Slot, ...]
    ops: tuple[FlatOp, ...]
    returns: tuple[Slot, ...]


def flatten(module: Module, func: Function) -> FlatFunction:
    """Unroll the repeats of a function, in order of execution."""
    run = _Flattening(module)
    env = {arg: run.slot(arg, "") for arg in func.args}
    args = tuple(env.values())
    run.block(func.body, env, dict(module.dims), "")
    return FlatFunction(func.name, args, tuple(run.ops), tuple(env[v] for v in func.body.returns))


class _Flattening:
    def __init__(self, module: Module) -> None:
        self.dims = dict(module.dims)
        self.ops: list[FlatOp] = []

    def slot(self, value: Value, suffix: str) -> Slot:
        return Slot(value.name + suffix, value.type.subst(self.dims))

    def block(
        self, block: Block, env: dict[Value, Slot], bindings: dict[str, int], suffix: str
    ) -> None:
        for op in block.ops:
            if op.body is not None:
                self._repeat(op, op.body, env, bindings, suffix)
                continue
            results = tuple(self.slot(r, suffix) for r in op.results)
            operands = tuple(_operand(o, env, bindings) for o in op.operands)
            self.ops.append(FlatOp(op, bindings, operands, results))
            env.update(zip(op.results, results, strict=True))

    def _repeat(
        self,
        op: Op,
        body: Block,
        env: dict[Value, Slot],
        bindings: dict[str, int],
        suffix: str,
    ) -> None:
        carried = [env[v] for v in op.values]
        for i in range(op.int_attr("lo"), op.int_attr("hi") + 1):
            inner = {**env, **dict(zip(body.args, carried, strict=True))}
            self.block(body, inner, {**bindings, str(op.attrs["index"]): i}, f"{suffix}[{i}]")
            carried = [inner[v] for v in body.returns]
        env.update(zip(op.results, carried, strict=True))


def _operand(
    operand: Operand, env: Mapping[Value, Slot], bindings: Mapping[str, int]
) -> Slot | FlatWeight | None:
    if isinstance(operand, Value):
        return env[operand]
    if operand is None:
        return None
    return FlatWeight(operand, None if operand.index is None else operand.index.at(bindings))


# -- layouts --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class View:
    """Where a slot's elements lie: in the storage of `root`, at `offset`, with `strides`.

    Offset and strides are in elements.
    """

    root: Slot
    offset: Dim
    dims: Dims
    strides: Dims

    @property
    def is_whole(self) -> bool:
        """Whether the view is the root's dense storage itself."""
        return self.offset == 0 and self.strides == dense_strides(self.dims)


def dense_strides(dims: Sequence[Dim]) -> Dims:
    """Row-major strides."""
    strides: list[Dim] = []
    step = Dim.of(1)
    for dim in reversed(dims):
        strides.append(step)
        step = step * dim
    return tuple(reversed(strides))


class Layouts:
    """Views of every tensor slot, and which function argument each state slot continues."""

    def __init__(self, flat: FlatFunction) -> None:
        self.flat = flat
        self.views: dict[str, View] = {}
        self.states: dict[str, int] = {}  # slot name -> argument position
        self.aliases: set[int] = set()  # positions in flat.ops of ops that are only views
        self.streamed: set[str] = set()  # slots that are weights on the GPU for one call
        for position, arg in enumerate(flat.args):
            if isinstance(arg.type, StateType):
                self.states[arg.name] = position
            self._own(arg)
        for position, step in enumerate(flat.ops):
            self._step(position, step)

    def view(self, slot: Slot) -> View:
        return self.views[slot.name]

    def is_value(self, slot: Slot) -> bool:
        """Whether it lies in an arena: tensors do; streamed weights have buffers of their own."""
        return isinstance(slot.type, TensorType) and slot.name not in self.streamed

    def is_view(self, op: Op) -> bool:
        """Whether the op is only a view in every iteration."""
        found = [i in self.aliases for i, f in enumerate(self.flat.ops) if f.op is op]
        return bool(found) and all(found)

    def _own(self, slot: Slot) -> None:
        if isinstance(slot.type, TensorType):
            dims = slot.type.dims
            self.views[slot.name] = View(slot, Dim.of(0), dims, dense_strides(dims))

    def _step(self, position: int, step: FlatOp) -> None:
        views = self._views_of(step)
        if views is not None:
            self.aliases.add(position)
            self.views.update(zip((r.name for r in step.results), views, strict=True))
            return
        if step.op.name == "xfer.copy" and step.op.weights:
            self.streamed |= {r.name for r in step.results}
        for result in step.results:
            if isinstance(result.type, StateType):
                self.states[result.name] = self._continued(step)
            self._own(result)

    def _continued(self, step: FlatOp) -> int:
        state = next(s for s in step.slots if isinstance(s.type, StateType))
        return self.states[state.name]

    def _views_of(self, step: FlatOp) -> list[View] | None:
        if not op_def(step.op.name).is_view or not step.slots:  # of a weight it is a copy
            return None
        given = self.view(step.slots[0])
        rule = _RULES.get(step.op.name)
        return None if rule is None else rule(given, step)


def _axis(step: FlatOp, rank: int) -> int:
    value = step.op.attrs.get("axis")
    return (value.const() if isinstance(value, Dim) else -1) % rank


def _result_dims(step: FlatOp) -> list[Dims]:
    return [r.type.dims for r in step.results if isinstance(r.type, TensorType)]


def _split_view(given: View, step: FlatOp) -> list[View]:
    axis = _axis(step, len(given.dims))
    views: list[View] = []
    start = Dim.of(0)
    for dims in _result_dims(step):
        offset = given.offset + start * given.strides[axis]
        views.append(replace(given, offset=offset, dims=dims))
        start = start + dims[axis]
    return views


def _slice_view(given: View, step: FlatOp) -> list[View]:
    axis, start = _axis(step, len(given.dims)), step.op.attrs["start"]
    assert isinstance(start, Dim)
    bound: dict[str, Dim | int | str] = dict(step.bindings)
    offset = given.offset + start.subst(bound) * given.strides[axis]
    return [replace(given, offset=offset, dims=_result_dims(step)[0])]


def _permute_view(given: View, step: FlatOp) -> list[View]:
    order = step.op.attrs["order"]
    assert isinstance(order, tuple)
    places = [d.const() for d in order if isinstance(d, Dim)]
    strides = tuple(given.strides[p] for p in places)
    return [replace(given, dims=_result_dims(step)[0], strides=strides)]


def _expand_view(given: View, step: FlatOp) -> list[View]:
    dims = _result_dims(step)[0]
    pairs = zip(given.dims, dims, given.strides, strict=True)
    strides = tuple(s if a == b else Dim.of(0) for a, b, s in pairs)
    return [replace(given, dims=dims, strides=strides)]


def _reshape_view(given: View, step: FlatOp) -> list[View] | None:
    dims = _result_dims(step)[0]
    strides = reshaped_strides(given, dims)
    return None if strides is None else [replace(given, dims=dims, strides=strides)]


def reshaped_strides(given: View, dims: Dims) -> Dims | None:
    """Strides under which the same storage has the shape `dims`, None when a copy is needed."""
    groups = _contiguous_groups(given)
    strides: list[Dim] = []
    at = len(dims)
    for size, step in reversed(groups):
        left: Dim | None = size
        while left is not None and left != 1:
            at -= 1
            if at < 0:
                return None
            strides.append(step)
            step, left = step * dims[at], left.divide(dims[at])
        if left is None:
            return None
    while at > 0:  # what remains are axes of size 1
        at -= 1
        if dims[at] != 1:
            return None
        strides.append(strides[-1] * dims[at + 1] if strides else Dim.of(1))
    return tuple(reversed(strides))


def _contiguous_groups(given: View) -> list[tuple[Dim, Dim]]:
    """Axes merged where one lies densely behind the other: (size, stride), sizes of 1 left out."""
    groups: list[tuple[Dim, Dim]] = []
    for dim, stride in zip(given.dims, given.strides, strict=True):
        if dim == 1:
            continue
        if groups and groups[-1][1] == dim * stride:
            groups[-1] = (groups[-1][0] * dim, stride)
        else:
            groups.append((dim, stride))
    return groups


_RULES = {
    "tensor.split": _split_view,
    "tensor.slice": _slice_view,
    "tensor.permute": _permute_view,
    "tensor.expand": _expand_view,
    "tensor.reshape": _reshape_view,
}

__all__ = [
    "Dims",
    "FlatFunction",
    "FlatOp",
    "FlatWeight",
    "Layouts",
    "Slot",
    "View",
    "dense_strides",
    "flatten",
    "reshaped_strides",
]
