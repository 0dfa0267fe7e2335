"""Where values lie in the arena: offsets from liveness over the flat order of ops.

Storages that are never live together share bytes; an elementwise op writes over its dying operand.
Each device has an arena of its own.  What the host computes for the GPU lives from the post on and
until its answer is taken home: in between the GPU does not wait for the host.
The plan is written as function attributes, so a dump shows it and `read_arena` reads it back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ktgraph.errors import KtgraphError
from ktgraph.ir.dims import Dim, product
from ktgraph.ir.graph import Attr, Function, Module
from ktgraph.ir.types import DTYPES, TensorType, Type
from ktgraph.pass_api import CompileOptions
from ktgraph.runtime.flat import FlatFunction, FlatOp, Layouts, Slot, flatten
from ktgraph.runtime.side_stream import side_steps

ALIGN = 64  # bytes
_LOGIT_ROWS = 128  # most rows of logits in one call of a prefill function

# Elementwise ops whose kernels read an element, or a whole row, before they write it.
IN_PLACE = frozenset(
    {"tensor.add", "tensor.add3", "tensor.mul", "tensor.scale", "nn.act", "nn.rms_norm"}
)


class PlanError(KtgraphError, ValueError):
    """A function that cannot be planned as it is; the message says which pass is missing."""


@dataclass(frozen=True)
class PhaseSizes:
    """The largest call a function must serve."""

    tokens: int
    rows: int  # rows of logits
    batch: int  # sequences

    def bindings(self, module: Module) -> dict[str, int]:
        """Dims, and every sym at its largest."""
        upper = {name: hi for name, (_, hi) in module.syms.items()}
        largest = {"T": self.tokens, "O": self.rows, "B": self.batch, "Q": self.tokens}
        return {**upper, **largest, **module.dims}


def phase_sizes(func: Function, options: CompileOptions) -> PhaseSizes:
    """Largest sizes of a phase: `max_q` tokens of each of max_batch sequences, or max_tokens."""
    bound = max_q(func)
    tokens = max(options.max_tokens, options.max_batch)
    if bound is not None and bound * options.max_batch < tokens:
        tokens = bound * options.max_batch
    rows = min(tokens, max(options.max_batch, _LOGIT_ROWS))
    return PhaseSizes(tokens, rows, options.max_batch)


def max_q(func: Function) -> int | None:
    """Most new tokens of one sequence that the function is for; None: no bound."""
    bound = func.attrs.get("max_q")
    return bound.const() if isinstance(bound, Dim) and bound.is_const else None


@dataclass(frozen=True)
class Place:
    """Bytes of one storage, and when it is live: from op `first` to op `last`, both included."""

    slot: str
    offset: int
    nbytes: int
    first: int
    last: int
    device: str = ""

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True)
class Arena:
    """Every storage's place; `owner` maps a root slot to the slot whose storage it writes over.

    nbytes: of the home device's arena; away: of the arenas on other devices.
    """

    sizes: PhaseSizes
    nbytes: int
    places: Mapping[str, Place]
    owner: Mapping[str, str] = field(default_factory=dict[str, str])
    away: Mapping[str, int] = field(default_factory=dict[str, int])

    def offset(self, root: str) -> int:
        """Byte offset of a root slot, in the arena of its device."""
        return self.places[self.owner.get(root, root)].offset


def plan_arena(module: Module, func: Function, sizes: PhaseSizes) -> Arena:
    """Place every storage of a function."""
    flat = flatten(module, func)
    layouts = Layouts(flat)
    home = module.home or "cpu"
    lives = _Lives(flat, layouts, home)
    bindings = sizes.bindings(module)
    wanted: dict[str, list[Place]] = {home: []}
    for name, span in lives.span.items():
        slot = lives.slots[name]
        device = slot.type.device or home
        place = Place(name, 0, slot_nbytes(slot, bindings), *span, device)
        wanted.setdefault(device, []).append(place)
    places = {device: _pack(items) for device, items in wanted.items()}
    totals = {device: max((p.end for p in made), default=0) for device, made in places.items()}
    placed = {p.slot: p for made in places.values() for p in made}
    return Arena(sizes, totals.pop(home), placed, lives.owner, totals)


def slot_nbytes(slot: Slot, bindings: Mapping[str, int]) -> int:
    """Bytes of a storage at the sizes given."""
    assert isinstance(slot.type, TensorType)
    count = DTYPES[slot.type.dtype]
    for dim in slot.type.dims:
        count *= dim.at(bindings)
    return -(-max(count, 1) // ALIGN) * ALIGN


class _Lives:
    """First and last op of every storage: arguments from op -1, returned values to the end."""

    def __init__(self, flat: FlatFunction, layouts: Layouts, home: str) -> None:
        self.layouts = layouts
        self.home = home
        self.sides = side_steps(flat, layouts, home)
        self.slots: dict[str, Slot] = {}
        self.span: dict[str, tuple[int, int]] = {}
        self.owner: dict[str, str] = {}
        self._fixed: set[str] = set()  # storages that nothing may write over
        last = self._last_uses(flat)
        for arg in flat.args:
            self._begin(arg, -1, last)
            self._fixed.add(arg.name)
        for position, step in enumerate(flat.ops):
            if position not in layouts.aliases:
                self._step(position, step, last)

    def _last_uses(self, flat: FlatFunction) -> dict[str, int]:
        last: dict[str, int] = {}
        for position, step in enumerate(flat.ops):
            for slot in (*step.slots, *step.results):
                if isinstance(slot.type, TensorType):
                    last[self.layouts.view(slot).root.name] = position
        for slot in flat.returns:
            if isinstance(slot.type, TensorType):
                last[self.layouts.view(slot).root.name] = len(flat.ops)
        self._keep_until_answered(flat, last)
        self._keep_beside(last)
        return last

    def _keep_beside(self, last: dict[str, int]) -> None:
        """What is used while an op runs on the side stream lives until that op has ended."""
        for side in self.sides:
            for name, end in last.items():
                if side.after <= end < side.before:
                    last[name] = side.before

    def _keep_until_answered(self, flat: FlatFunction, last: dict[str, int]) -> None:
        """What an op away from home reads lives as long as what it makes."""
        for step in reversed(flat.ops):
            made = [r for r in step.results if self.layouts.is_value(r)]
            if not any(self._is_away(r.type) for r in made):
                continue
            end = max(last.get(self.layouts.view(r).root.name, -1) for r in made)
            for slot in step.slots:
                if self._is_away(slot.type) and self.layouts.is_value(slot):
                    root = self.layouts.view(slot).root.name
                    last[root] = max(last[root], end)

    def _is_away(self, type: Type) -> bool:
        return (type.device or self.home) != self.home

    def _begin(self, slot: Slot, position: int, last: Mapping[str, int]) -> None:
        if self.layouts.is_value(slot):
            self.slots[slot.name] = slot
            self.span[slot.name] = (position, last.get(slot.name, position))

    def _step(self, position: int, step: FlatOp, last: Mapping[str, int]) -> None:
        beside = next((s for s in self.sides if s.step == position), None)
        if beside is not None:
            for result in step.results:
                self._begin(result, beside.after, last)  # it may start as early as that
            return
        over = self._overwritten(position, step, last)
        for result in step.results:
            if over is not None:
                self.owner[result.name] = over
                self.span[over] = (self.span[over][0], last.get(result.name, position))
                return
            self._begin(result, self._posted(step, position, result), last)

    def _posted(self, step: FlatOp, position: int, result: Slot) -> int:
        """An op away from home may start as soon as its operands are there."""
        if not self._is_away(result.type):
            return position
        storages = [self._storage(s) for s in step.slots if self.layouts.is_value(s)]
        return min([position, *(self.span[s][0] for s in storages if self._is_away_storage(s))])

    def _storage(self, slot: Slot) -> str:
        root = self.layouts.view(slot).root.name
        return self.owner.get(root, root)

    def _is_away_storage(self, name: str) -> bool:
        return self._is_away(self.slots[name].type)

    def _overwritten(self, position: int, step: FlatOp, last: Mapping[str, int]) -> str | None:
        """The storage of a dying operand with the result's type, for an op that works in place."""
        if step.op.name not in IN_PLACE or len(step.results) != 1:
            return None
        for slot in step.slots:
            if slot.type != step.results[0].type:
                continue
            view = self.layouts.view(slot)
            storage = self._storage(slot)
            dies = last[view.root.name] == position and storage not in self._fixed
            if dies and view.is_whole and _elements(view.root) == _elements(slot):
                return storage
        return None


def _elements(slot: Slot) -> Dim:
    assert isinstance(slot.type, TensorType)
    return product(slot.type.dims)


def _pack(wanted: Sequence[Place]) -> list[Place]:
    """Largest first, each at the lowest offset that is free over its whole life."""
    placed: list[Place] = []
    for item in sorted(wanted, key=lambda p: (-p.nbytes, p.first)):
        busy = sorted(
            (p.offset, p.end) for p in placed if p.first <= item.last and item.first <= p.last
        )
        offset = 0
        for start, end in busy:
            if start - offset >= item.nbytes:
                break
            offset = max(offset, end)
        placed.append(Place(item.slot, offset, item.nbytes, item.first, item.last))
    return sorted(placed, key=lambda p: p.first)


# -- text: function attributes --------------------------------------------------------------------
def arena_attrs(arena: Arena) -> dict[str, object]:
    """The attributes that record an arena: sizes, and ``name:offset:bytes`` of each storage.

    Equal places of a repeat's iterations are one entry: ``h[1..26]``, every second ``y[1..25/2]``.
    A value that is written over another is ``name=other``.
    """
    groups: dict[tuple[str, int, int], list[str]] = {}
    for place in arena.places.values():
        stem, inner = _stem(place.slot)
        groups.setdefault((stem, place.offset, place.nbytes), []).append(inner)
    entries = [
        f"{name}:{offset}:{nbytes}"
        for (stem, offset, nbytes), members in groups.items()
        for name in _ranges(stem, members)
    ]
    sizes = arena.sizes
    return {
        "max_tokens": sizes.tokens,
        "max_rows": sizes.rows,
        "max_batch": sizes.batch,
        "arena_bytes": arena.nbytes,
        **({"away_bytes": tuple(f"{d}={n}" for d, n in arena.away.items())} if arena.away else {}),
        "buffers": tuple(entries),
        "in_place": tuple(_owner_entries(arena.owner)),
    }


def _owner_entries(owner: Mapping[str, str]) -> list[str]:
    """``z[1..26]=x``: the written-over storage of the same iteration is given by its stem."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, other in owner.items():
        (stem, inner), (target, there) = _stem(name), _stem(other)
        shown = target if there == inner else other
        groups.setdefault((stem, shown), []).append(inner)
    return [
        f"{name}={target}"
        for (stem, target), members in groups.items()
        for name in _ranges(stem, members)
    ]


def _stem(name: str) -> tuple[str, str]:
    """``h[3]`` is ``h`` and ``3``; nested repeats keep their outer indices in the stem."""
    if not name.endswith("]"):
        return name, ""
    stem, _, inner = name[:-1].rpartition("[")
    return stem, inner


def _ranges(stem: str, members: Sequence[str]) -> list[str]:
    if members == [""]:
        return [stem]
    numbers = sorted(int(m) for m in members)
    if len(numbers) == 1:
        return [f"{stem}[{numbers[0]}]"]
    steps = {b - a for a, b in pairwise(numbers)}
    if len(steps) > 1:
        return [f"{stem}[{n}]" for n in numbers]
    step = steps.pop()
    return [f"{stem}[{numbers[0]}..{numbers[-1]}{f'/{step}' if step > 1 else ''}]"]


def read_arena(func: Function) -> Arena:
    """The arena that `plan-memory` recorded; raises PlanError when it has not run."""
    if "arena_bytes" not in func.attrs:
        raise PlanError(f"@{func.name} has no arena_bytes: run the pass plan-memory")
    sizes = PhaseSizes(*(_integer(func, k) for k in ("max_tokens", "max_rows", "max_batch")))
    places: dict[str, Place] = {}
    for entry in _texts(func, "buffers"):
        name, offset, nbytes = entry.rsplit(":", 2)
        for slot in _expand(name):
            places[slot] = Place(slot, int(offset), int(nbytes), 0, 0)
    owner: dict[str, str] = {}
    for entry in _texts(func, "in_place"):
        name, _, target = entry.partition("=")
        for slot in _expand(name):
            owner[slot] = _target(slot, target, places)
    away: dict[str, int] = {}
    for entry in _texts(func, "away_bytes") if "away_bytes" in func.attrs else ():
        device, _, nbytes = entry.rpartition("=")
        away[device] = int(nbytes)
    return Arena(sizes, _integer(func, "arena_bytes"), places, owner, away)


def _target(slot: str, target: str, places: Mapping[str, Place]) -> str:
    _, inner = _stem(slot)
    same = f"{target}[{inner}]"
    return same if inner and same in places else target


def _expand(name: str) -> Iterator[str]:
    stem, inner = _stem(name)
    span, _, step = inner.partition("/")
    lo, dots, hi = span.partition("..")
    if not dots:
        yield name
        return
    for i in range(int(lo), int(hi) + 1, int(step or 1)):
        yield f"{stem}[{i}]"


def _integer(func: Function, key: str) -> int:
    value = func.attrs.get(key)
    if not isinstance(value, Dim):
        raise PlanError(f"@{func.name}: attribute {key} is {value!r}: run the pass plan-memory")
    return value.const()


def _texts(func: Function, key: str) -> list[str]:
    value: Attr | None = func.attrs.get(key)
    if not isinstance(value, tuple):
        raise PlanError(f"@{func.name}: attribute {key} is missing: run the pass plan-memory")
    return [str(v) for v in value]


__all__ = [
    "ALIGN",
    "IN_PLACE",
    "Arena",
    "PhaseSizes",
    "Place",
    "PlanError",
    "arena_attrs",
    "max_q",
    "phase_sizes",
    "plan_arena",
    "read_arena",
]
