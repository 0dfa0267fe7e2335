"""What instructions refer to: views of the arena, weights, cache states and the batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ktgraph.ir.dims import Dim
from ktgraph.ir.graph import Module, WeightRef
from ktgraph.ir.interp import evaluate_attr
from ktgraph.ir.types import DTYPES, BatchType, TensorType
from ktgraph.ops.registry import op_def
from ktgraph.runtime.cache import window_of
from ktgraph.runtime.flat import FlatOp, FlatWeight, Layouts, Slot, View
from ktgraph.runtime.many_rows import tile_rows
from ktgraph.weights.encodings import Tile

# tile: packed bytes; stored: dense, as its encoding says; f32: dense f32; value: dense in the
# compute dtype, for ops that run on their torch reference.
WeightForm = Literal["tile", "stored", "f32", "value"]

TOKENS, ROWS = -1, -2  # first axes that a run resolves, as the native engine writes them


@dataclass(frozen=True)
class WeightUse:
    """One weight in the form that an instruction reads."""

    ref: WeightRef
    index: int | None
    form: WeightForm
    type: TensorType
    device: str = "cpu"  # where the instruction that reads it runs
    many_rows: int = 0  # of a packed one (ktgraph/runtime/many_rows.py)

    @property
    def key(self) -> str:
        """``layers[3].q_proj:tile``: unique within a plan; ``…:stored@cuda:0`` off the CPU."""
        name = self.ref.name
        if self.index is not None:
            name = name.replace("[]", f"[{self.index}]", 1)
        return f"{name}:{self.form}" + (f"@{self.device}" if self.device != "cpu" else "")

    @property
    def tile(self) -> Tile:
        found = Tile.of(self.type.encoding)
        assert found is not None
        return found


@dataclass(frozen=True)
class TensorRef:
    """A strided view of a storage; sizes may hold T and O."""

    dtype: str
    view: View

    @property
    def shape(self) -> list[int] | None:
        """Sizes with -1 for T and -2 for O; None when another axis is known only at run time."""
        first, *rest = self.view.dims or (Dim.of(1),)
        if any(not d.is_const for d in rest):
            return None
        heads = {Dim.of("T"): TOKENS, Dim.of("O"): ROWS}
        if first not in heads and not first.is_const:
            return None
        return [heads[first] if first in heads else first.const(), *(d.const() for d in rest)]

    @property
    def strides(self) -> list[int] | None:
        """Strides in elements; None when one is known only at run time."""
        found = self.view.strides or (Dim.of(1),)
        return [s.const() for s in found] if all(s.is_const for s in found) else None

    @property
    def offset(self) -> int | None:
        """Bytes from the start of the storage; None when known only at run time."""
        at = self.view.offset
        return at.const() * DTYPES[self.dtype] if at.is_const else None


@dataclass(frozen=True)
class StateUse:
    """A cache: the function argument it came in by."""

    argument: int
    slot: Slot


@dataclass(frozen=True)
class BatchUse:
    """The batch of the call; `window`: with the tables of the caches of that window."""

    window: int = 0


OperandRef = TensorRef | WeightUse | StateUse | BatchUse | None


@dataclass(frozen=True)
class Instruction:
    """A kernel call.  `step` is the op of the flat order that it does, or does a part of.

    `attrs` are what the native kernel gets; a fallback reads the op's own when it runs.  Of GPU
    and Python kernels, `operands` are the op's operands, then its results.
    """

    kernel: str
    operands: tuple[OperandRef, ...]
    attrs: Mapping[str, Any]
    step: int
    is_native: bool
    device: str = "cpu"

    @property
    def is_fallback(self) -> bool:
        """Whether it runs an op's torch reference."""
        return self.kernel == "torch.reference"

    @property
    def on_gpu(self) -> bool:
        """Whether it takes its turn on a GPU's stream."""
        return self.device != "cpu"


class Operands:
    """Reads one flat op's operands, results and attributes for an emitter."""

    def __init__(self, module: Module, layouts: Layouts, step: FlatOp, device: str = "cpu") -> None:
        self.module = module
        self.layouts = layouts
        self.step = step
        self.device = device
        self._attrs = op_def(step.op.name).signature.full_attrs(step.op.attrs)

    def __getitem__(self, position: int) -> OperandRef:
        """An operand that is a value: a tensor view, the state or the batch."""
        found = self.step.operand(position)
        if found is None:
            return None
        if isinstance(found, FlatWeight):
            return self.weight(position, "f32")
        return self._slot(found)

    def result(self, position: int) -> OperandRef:
        return self._slot(self.step.results[position])

    def _slot(self, slot: Slot) -> OperandRef:
        if isinstance(slot.type, TensorType):
            return TensorRef(slot.type.dtype, self.layouts.view(slot))
        if slot.name in self.layouts.states:
            return StateUse(self.layouts.states[slot.name], slot)
        assert isinstance(slot.type, BatchType)
        return BatchUse(window_of(slot.type, self.module.dims))

    def weight(self, position: int, form: WeightForm) -> OperandRef:
        """A weight in a form; an operand that is a value is given as it is."""
        found = self.step.operand(position)
        if not isinstance(found, FlatWeight):
            return self[position]
        type = self.module.weight_of(found.ref).type
        tile = Tile.of(type.encoding) if form == "tile" and self.device == "cpu" else None
        many_rows = tile_rows(self.module, tile)
        type = type.subst(dict(self.module.dims))
        return WeightUse(found.ref, found.index, form, type, self.device, many_rows)

    def pick(self, *names: str, **more: Any) -> dict[str, Any]:
        """Attributes by name, and others."""
        found = {n: evaluate_attr(self._attrs[n], self.step.bindings) for n in names}
        return {**found, **more}


__all__ = [
    "BatchUse",
    "Instruction",
    "OperandRef",
    "Operands",
    "StateUse",
    "TensorRef",
    "WeightForm",
    "WeightUse",
]
