"""Instruction operands as objects of the native engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ktgraph.cpu_kernels import NativeMissingError, load_native
from ktgraph.ir.types import StateType
from ktgraph.runtime.kernels_cpu import engine_kernel
from ktgraph.runtime.operands import (
    Instruction,
    OperandRef,
    StateUse,
    TensorRef,
    WeightUse,
)


class NativeOperandError(ValueError):
    """A view that the native engine cannot express."""


@dataclass(frozen=True)
class Addresses:
    """Where things lie: bases of storages by root slot, and objects for weights and states."""

    storage: Callable[[str], int]
    weight: Callable[[WeightUse], Any]
    state: Callable[[StateUse], Any]


def native_operand(ref: OperandRef, at: Addresses) -> Any:
    """The native object; raises NativeOperandError, or ValueError from the engine."""
    if ref is None:
        return None
    if isinstance(ref, TensorRef):
        return _tensor(ref, at.storage(ref.view.root.name))
    if isinstance(ref, WeightUse):
        return at.weight(ref)
    return at.state(ref) if isinstance(ref, StateUse) else load_native().BATCH


def _tensor(ref: TensorRef, base: int) -> Any:
    shape, strides, offset = ref.shape, ref.strides, ref.offset
    if shape is None or strides is None or offset is None:
        shown = ", ".join(map(str, ref.view.dims))
        raise NativeOperandError(f"[{shown}]: only the first axis may be known at run time only")
    return load_native().Tensor(base + offset, ref.dtype, shape, strides)


def native_weight(use: WeightUse, data: int, nbytes: int) -> Any:
    """A packed weight at an address."""
    tile, shape = use.tile, [d.const() for d in use.type.dims]
    count = prod(shape[:-2])
    return load_native().Weight(
        tile.format, shape[-2], shape[-1], count, tile.group, tile.gate_up, data, nbytes, tile.rows,
        use.many_rows,
    )  # fmt: skip


def packed_nbytes(use: WeightUse) -> int:
    """Bytes of a packed weight, from its type alone."""
    tile, shape = use.tile, [d.const() for d in use.type.dims]
    found: int = load_native().packed_nbytes(
        tile.format, shape[-2], shape[-1], tile.group, prod(shape[:-2]), tile.gate_up
    )
    return found


def dense_dtype(use: WeightUse) -> str:
    """The dtype in which a dense weight is kept."""
    if use.form == "f32":
        return "f32"
    if use.form == "stored" and use.type.encoding is not None:
        return use.type.encoding.name
    return use.type.dtype


def native_dense(use: WeightUse, data: int) -> Any:
    """A dense weight at an address."""
    shape = [d.const() for d in use.type.dims]
    return load_native().Tensor(data, dense_dtype(use), shape)


def native_state(
    type: StateType, pages: int, page_size: int, layers: int, parts: Sequence[int]
) -> Any:
    """A paged cache whose parts lie at the addresses given."""
    dtypes = {p.dtype for p in type.parts}
    if len(dtypes) != 1:
        raise NativeOperandError(f"{type}: the parts differ in dtype")
    rows = [prod(d.const() for d in p.dims[1:]) for p in type.parts]
    return load_native().State(dtypes.pop(), layers, pages, page_size, rows, list(parts))


def engine_level() -> str:
    """The instruction set whose kernels the engine runs; empty where no engine is built."""
    try:
        return str(load_native().isa_info()["chosen"])
    except NativeMissingError:
        return ""


# -- a trial run of Plan.add: what the engine would say, and what it would take -------------------
@dataclass(frozen=True)
class CallBounds:
    """The largest call of a phase; kv: rows of its longest sequence."""

    tokens: int
    rows: int
    sequences: int
    new: int
    kv: int


class Trial:
    """Adds instructions to a plan that never runs, over addresses that nothing reads."""

    def __init__(self) -> None:
        self._engine = load_native().Engine(1)

    def scratch(
        self,
        items: Sequence[Instruction],
        sizes: Mapping[str, int],
        most: CallBounds,
        threads: int,
    ) -> int:
        """Bytes of scratch that any call within the bounds takes.

        A smaller call may need more: with few queries, attention divides the keys among threads
        and keeps their partial results.  How many queries count is a sum of a term in T and the
        number of sequences, so every T and then every number of sequences covers every sum.
        """
        plan = self._plan(items, sizes)
        calls = [(t, 1) for t in range(1, most.tokens + 1)]
        calls += [(most.tokens, q) for q in range(2, most.sequences + 1)]
        found = [
            plan.scratch(t, min(t, most.rows), q, min(t, most.new), most.kv, threads)
            for t, q in calls
        ]
        return max(shared for shared, _ in found) + threads * max(local for _, local in found)

    def refusal(self, items: Sequence[Instruction], sizes: Mapping[str, int]) -> str:
        """Why the engine would not take these instructions; an empty string when it would."""
        try:
            self._plan(items, sizes)
        except (NativeOperandError, ValueError, TypeError) as error:
            return str(error).split(". Signature:")[0]
        return ""

    def _plan(self, items: Sequence[Instruction], sizes: Mapping[str, int]) -> Any:
        at = Addresses(lambda root: 0, _trial_weight, lambda use: _trial_state(use, sizes))
        plan = load_native().Plan(self._engine)
        for item in items:
            operands = [native_operand(o, at) for o in item.operands]
            plan.add(engine_kernel(item.kernel), operands, dict(item.attrs))
        return plan


def _trial_weight(use: WeightUse) -> Any:
    if use.form == "tile":
        return native_weight(use, 0, packed_nbytes(use))
    return native_dense(use, 0)


def _trial_state(use: StateUse, sizes: Mapping[str, int]) -> Any:
    type = use.slot.type
    assert isinstance(type, StateType)
    return native_state(type, 1, 1, type.layers.at(sizes), [0] * len(type.parts))


__all__ = [
    "Addresses",
    "CallBounds",
    "NativeOperandError",
    "Trial",
    "dense_dtype",
    "engine_level",
    "native_dense",
    "native_operand",
    "native_state",
    "native_weight",
    "packed_nbytes",
]
