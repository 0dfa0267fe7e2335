"""A static check of a phase on a GPU: what touches the same bytes happens in an order.

The main lane is the GPU's stream with the host's parts in it, for which the stream is empty; the
side stream runs from a fork to a join; a lane for each mailbox runs from its post to whoever waits
for its answer; a lane of copies fills the buffers of streamed weights.  Two accesses to overlapping
bytes, at the largest sizes, of which one writes must be connected by a path.  The check knows
nothing of how the arena was planned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations

from ktgraph.ir.graph import Module
from ktgraph.ir.types import StateType, TensorType
from ktgraph.runtime.arena import slot_nbytes
from ktgraph.runtime.flat import FlatOp, Slot
from ktgraph.runtime.gpu.parts import Part, Parts
from ktgraph.runtime.gpu.streaming import BUFFERS, readers, streamed
from ktgraph.runtime.kernels_gpu import STREAM_WEIGHTS
from ktgraph.runtime.operands import Instruction
from ktgraph.runtime.plan import PhasePlan, op_line
from ktgraph.runtime.side_stream import side_steps


@dataclass(frozen=True)
class _Access:
    """Bytes that a node touches; `space` is an arena, a buffer of streamed weights or a cache."""

    space: str
    start: int
    end: int
    writes: bool

    def conflicts(self, other: _Access) -> bool:
        overlap = self.start < other.end and other.start < self.end
        return self.space == other.space and overlap and (self.writes or other.writes)


@dataclass
class _Node:
    """A piece of work; `before` is the set of nodes that have ended when it starts, as bits."""

    text: str
    accesses: list[_Access]
    before: int = 0


@dataclass
class _Lanes:
    """Nodes in an order that all edges follow."""

    nodes: list[_Node] = field(default_factory=list[_Node])
    main: int = 0  # what the next op of the main lane comes behind

    def add(self, text: str, accesses: list[_Access], after: int) -> int:
        """A node behind a set of others; returns the set of what is done once it has ended."""
        self.nodes.append(_Node(text, accesses, after))
        return after | 1 << (len(self.nodes) - 1)


def faults(module: Module, phase: PhasePlan, parts: Parts) -> list[str]:
    """Pairs of ops that may touch the same bytes at the same time, and waits that never end."""
    run = _Ordering(module, phase, parts)
    run.add_all()
    return [*run.found, *_unordered(run.lanes.nodes)]


class _Ordering:
    """One pass over the instructions, in order."""

    def __init__(self, module: Module, phase: PhasePlan, parts: Parts) -> None:
        self.phase = phase
        self.parts = parts
        self.home = module.home or "cpu"
        self.sizes = phase.arena.sizes.bindings(module)
        self.lanes = _Lanes()
        self.found: list[str] = []
        self.boxes: dict[int, int] = {}  # mailbox -> what its answer comes behind
        self.waited: set[int] = set()
        self.copies = streamed(phase)
        self.readers = [readers(phase, i) for i in self.copies]
        self.copied: dict[int, int] = {}  # number of a copy -> what it comes behind
        sides = side_steps(phase.flat, phase.layouts, self.home)
        sides = [s for s in sides if any(part.holds(s) for part in parts.order)]
        self.aside = {s.step: s.after for s in sides}
        self.joins = {s.before: s.step for s in sides}
        self.forks: dict[int, int] = {s.after: 0 for s in sides}  # what each comes behind
        self.ended: dict[int, int] = {}  # side op -> what is done once it has ended
        self.buffer = {
            r.name: n % BUFFERS for n, i in enumerate(self.copies) for r in phase.step(i).results
        }

    def add_all(self) -> None:
        inside = {id(i): n for n, items in enumerate(self.parts.boxes) for i in items}
        starts = {id(p.items[0]): p for p in self.parts.order if p.items}
        for number in range(min(BUFFERS, len(self.copies))):
            self._copy(number, 0)
        for item in self.phase.instructions:
            if id(item) in inside:
                self._in_box(item, inside[id(item)])
            elif item.kernel != STREAM_WEIGHTS:
                self._on_main(item, starts.get(id(item)))
        self._end()

    def _on_main(self, item: Instruction, part: Part | None) -> None:
        for box in part.awaits if part is not None else ():
            self._wait(box, item)
        self._wait_for_copies(item)
        number = self.parts.box_of.get(item.step)
        is_post = number is not None and number not in self.boxes
        if number is not None and not is_post:
            self._wait(number, item)
        if item.step in self.aside:
            after = self.forks[self.aside[item.step]]
            self.ended[item.step] = self.lanes.add(self._line(item), self._accesses(item), after)
            return
        if item.step in self.joins:
            self.lanes.main |= self.ended[self.joins[item.step]]
        self.lanes.main = self.lanes.add(self._line(item), self._accesses(item), self.lanes.main)
        if item.step in self.forks:
            self.forks[item.step] = self.lanes.main
        if number is not None and is_post:
            self.boxes[number] = self.lanes.main
        self._restart_copies(item)

    def _in_box(self, item: Instruction, number: int) -> None:
        if number not in self.boxes:
            self.found.append(f"mailbox {number} computes before its post:\n  {self._line(item)}")
        after = self.boxes.get(number, 0)
        self.boxes[number] = self.lanes.add(self._line(item), self._accesses(item), after)

    def _wait(self, number: int, item: Instruction) -> None:
        if number in self.waited:
            line = self._line(item)
            self.found.append(f"the answer of mailbox {number} was taken before:\n  {line}")
        self.waited.add(number)
        self.lanes.main |= self.boxes.get(number, 0)

    # -- streamed weights -------------------------------------------------------------------------
    def _copy(self, number: int, after: int) -> None:
        item = self.copies[number]
        write = _Access(f"buffer {number % BUFFERS}", 0, 1, True)
        behind = after | self.copied.get(number - 1, 0)
        self.copied[number] = self.lanes.add(self._line(item), [write], behind)

    def _wait_for_copies(self, item: Instruction) -> None:
        for number, positions in enumerate(self.readers):
            if positions[0] != item.step:
                continue
            if number not in self.copied:
                line = self._line(item)
                self.found.append(f"the copy of its weights waits for a later op:\n  {line}")
            self.lanes.main |= self.copied.get(number, 0)

    def _restart_copies(self, item: Instruction) -> None:
        for number, positions in enumerate(self.readers):
            if positions[-1] == item.step and number + BUFFERS < len(self.copies):
                self._copy(number + BUFFERS, self.lanes.main)

    # -- what is touched --------------------------------------------------------------------------
    def _end(self) -> None:
        """The host reads what the phase returns, and every mailbox is at rest then."""
        returned = [a for s in self.phase.flat.returns for a in self._touch(s, False)]
        self.lanes.add(f"the end of @{self.phase.name}", returned, self.lanes.main)
        for number in sorted(self.boxes.keys() - self.waited):
            self.found.append(f"@{self.phase.name}: nothing waits for mailbox {number}")

    def _accesses(self, item: Instruction) -> list[_Access]:
        step = self.phase.step(item)
        return [*self._reads(step), *(a for r in step.results for a in self._touch(r, True))]

    def _reads(self, step: FlatOp) -> Iterator[_Access]:
        for slot in step.slots:
            yield from self._touch(slot, False)

    def _touch(self, slot: Slot, writes: bool) -> Iterator[_Access]:
        layouts = self.phase.layouts
        if isinstance(slot.type, StateType):
            yield _Access(f"state {layouts.states[slot.name]}", 0, 1, writes)
        if not isinstance(slot.type, TensorType):
            return
        root = layouts.view(slot).root
        if root.name in self.buffer:
            yield _Access(f"buffer {self.buffer[root.name]}", 0, 1, writes)
        elif root not in self.phase.flat.args:  # those lie in memory of their own
            start = self.phase.arena.offset(root.name)
            end = start + slot_nbytes(root, self.sizes)
            yield _Access(root.type.device or self.home, start, end, writes)

    def _line(self, item: Instruction) -> str:
        return op_line(self.phase, item)


def _unordered(nodes: list[_Node]) -> Iterator[str]:
    """Nodes stand in an order that edges follow, so only the later one can be behind."""
    for (first, one), (_, two) in combinations(enumerate(nodes), 2):
        if two.before >> first & 1:
            continue
        for a in one.accesses:
            if any(a.conflicts(b) for b in two.accesses):
                yield (
                    f"two ops may touch the same bytes of {a.space} ({a.start}..{a.end}) at the "
                    f"same time:\n  {one.text}\n  {two.text}"
                )
                break


__all__ = ["faults"]
