"""Which experts of a layer have slots on the GPU, and how that is changed while calls go on.

A change copies experts' bytes into slots and writes the layer's table, both at addresses that
captured graphs have, so nothing is captured again.  The GPU masks the ids that it hands over by the
same table, so an expert is computed on one side.  Packed experts are copied as the host has them,
dense ones are unpacked for it.

A change takes two calls: experts that leave are struck from the table before the first, the copies
run on their own stream behind it, and before the second, behind the copies, the new ones are
entered.  So the same calls give the same results, however fast the link is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import cast

import torch

from ktgraph.cpu_kernels import load_native
from ktgraph.errors import UnsupportedInputError, is_whole
from ktgraph.ops.tensor import torch_dtype
from ktgraph.runtime.gpu.device import Fetch, GpuDevice, Step
from ktgraph.runtime.hot_slots import (
    HotLayer,
    HotStack,
    has_same_bytes,
    hot_layers,
)
from ktgraph.runtime.native import dense_dtype
from ktgraph.runtime.operands import WeightUse
from ktgraph.runtime.packed import LoadedWeights, use_nbytes
from ktgraph.runtime.plan import Plan

Pairs = list[tuple[torch.Tensor, torch.Tensor]]  # sources and targets of copies


@dataclass
class Change:
    """A change of one layer's slots; `experts` of every slot, meanwhile and then.

    calls: that have ended since it began.
    """

    layer: HotLayer
    meanwhile: list[int]
    then: list[int]
    copy: Fetch
    calls: int = 0


class Residency:
    """The hot experts of an executor's plan."""

    def __init__(self, plan: Plan, device: GpuDevice, weights: LoadedWeights) -> None:
        self.device = device
        self.weights = weights
        self.layers = hot_layers(plan)
        self.changes: list[Change] = []  # under way
        for layer in self.layers.values():
            held = weights.tensors[layer.table.key].cpu().tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
            table = cast("list[int]", held)
            slots = layer.stacks[0].slots.type.dims[0].const()
            layer.experts = [table.index(s) if s in table else -1 for s in range(slots)]
            self._fill([s for s in layer.stacks if s.is_filled], layer.experts)
        # what each layer comes to once every change has run
        self._planned = {n: list(x.experts) for n, x in self.layers.items()}

    def _fill(self, stacks: Sequence[HotStack], experts: Sequence[int]) -> None:
        """Make slots and copy the experts there; slots of none stay as the memory was."""
        for stack in stacks:
            self.weights.tensors[stack.slots.key] = _room(self.device, stack.slots)
            self.device.catch_up()  # with who had that memory before
            for slot, expert in enumerate(experts):
                if expert >= 0:  # one at a time: dense ones are unpacked for it
                    self.device.run([self.device.copy(*self._pair(stack, expert, slot))])
                    self.device.finish(lambda: None, float("inf"))

    def resident(self) -> dict[int, list[int]]:
        """The hot experts of each layer, in order of their slots, once every change has run."""
        return {n: [e for e in experts if e >= 0] for n, experts in self._planned.items()}

    # -- changes ----------------------------------------------------------------------------------
    def change(self, number: int, experts: Sequence[int]) -> None:
        """Begin to give a layer's slots to these experts; those that have one keep it.

        Between two calls, as `check` allows.  A failure inside loses nothing: `restart` goes on.
        """
        layer = self.layers[number]
        before, wanted = self._planned[number], list(dict.fromkeys(experts))
        then = [e if e in wanted else -1 for e in before]
        moves: list[tuple[int, int]] = []
        for expert in (e for e in wanted if e not in then):
            slot = then.index(-1)
            then[slot] = expert
            moves.append((expert, slot))
        meanwhile = [e if e == old else -1 for e, old in zip(then, before, strict=True)]
        self._end([c for c in self.changes if c.layer is layer])
        # In this order, whatever interrupts it: a slot is never said to hold what it does not.
        self._planned[number] = meanwhile
        self.changes.append(Change(layer, meanwhile, then, self._copies(layer, moves)))
        self._planned[number] = then
        self.device.run(self._beginning(self.changes[-1]))

    def check_movable(self, numbers: Iterable[int]) -> None:
        """Raise UnsupportedInputError where experts of a layer cannot be copied into its slots."""
        for stack in (s for n in numbers for s in self.layers[n].stacks):
            _check_same_numbers(stack)

    def due(self) -> list[Step]:
        """Steps in front of a call, which enter experts whose copies had a call to run behind."""
        return [s for c in self.changes if c.calls for s in self._ending(c)]

    def called(self) -> None:
        """Note that a call has ended, with what was due in front of it."""
        self.changes = [c for c in self.changes if not c.calls]
        for change in self.changes:
            change.calls += 1

    def settle(self) -> None:
        """Let every change run to its end; does not wait."""
        self._end(list(self.changes))

    def restart(self) -> None:
        """After a failure, when nothing is under way on the GPU: begin unfinished changes again."""
        for change in self.changes:
            self.device.run(self._beginning(change))

    def _end(self, changes: Sequence[Change]) -> None:
        for change in changes:
            self.device.run(self._ending(change))
            self.changes.remove(change)

    def _beginning(self, change: Change) -> list[Step]:
        """The slots to be filled have no expert until their bytes are there."""
        fetch = self.device.fetch(change.copy, None)
        return [self._write(change.layer, change.meanwhile), fetch]

    def _ending(self, change: Change) -> list[Step]:
        return [self.device.fetched(change.copy), self._write(change.layer, change.then)]

    def _copies(self, layer: HotLayer, moves: Sequence[tuple[int, int]]) -> Fetch:
        targets = [
            _rows(self.weights.tensors[stack.slots.key], stack.slots)[slot]
            for stack in layer.stacks
            for _, slot in moves
        ]
        return Fetch(lambda: [self._pair(s, *m) for s in layer.stacks for m in moves], targets)

    def _write(self, layer: HotLayer, experts: Sequence[int]) -> Step:
        table = torch.full((layer.of,), -1, dtype=torch.int32)
        for slot, expert in enumerate(experts):
            if expert >= 0:
                table[expert] = slot
        write = self.device.copy(table, self.weights.tensors[layer.table.key])

        def step() -> None:
            write()
            layer.experts = list(experts)

        return step

    def _pair(self, stack: HotStack, expert: int, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """An expert's bytes on the host, and its slot."""
        slots, whole = (self.weights.tensors[u.key] for u in (stack.slots, stack.source))
        target = _rows(slots, stack.slots)[slot]
        if stack.slots.form == "tile":
            return _rows(whole, stack.source)[expert], target
        if stack.source.form != "tile":
            return whole[expert].to(slots.dtype), target
        return _unpacked(whole, stack.source, expert).to(slots.dtype), target

    # -- streamed layers --------------------------------------------------------------------------
    def stack_of(self, use: WeightUse) -> ResidentStack | None:
        """The slots that hold the very bytes of some experts of a streamed weight."""
        for layer in self.layers.values():
            for stack in layer.stacks:
                if stack.source.key == use.key and has_same_bytes(stack.slots, use):
                    slots = self.weights.tensors[stack.slots.key]
                    return ResidentStack(layer, slots, use.type.dims[0].const())
        return None

    def check(self, number: int, experts: Sequence[int]) -> None:
        """Raise UnsupportedInputError where a layer's slots cannot be given to these experts."""
        if number not in self.layers:
            known = ", ".join(map(str, self.layers)) or "none"
            raise UnsupportedInputError(
                f"layer {number!r} has no slots for hot experts (layers that have: {known}). "
                "Placement rules give them: device: hot"
            )
        layer = self.layers[number]
        for expert in experts:
            if not is_whole(expert) or not 0 <= expert < layer.of:
                raise UnsupportedInputError(
                    f"layer {number}: {expert!r} is no expert: expected 0..{layer.of - 1}"
                )
        if len(set(experts)) != len(experts):
            twice = next(e for e in experts if list(experts).count(e) > 1)
            raise UnsupportedInputError(f"layer {number}: expert {twice} is given twice")
        if len(experts) > len(layer.experts):
            raise UnsupportedInputError(
                f"layer {number}: {len(experts)} experts for {len(layer.experts)} slots"
            )
        if not set(experts) <= set(self._planned[number]):
            self.check_movable([number])


@dataclass(frozen=True)
class ResidentStack:
    """Experts of a layer that lie in slots, for copies of the whole stack to the GPU."""

    layer: HotLayer
    slots: torch.Tensor
    experts: int

    def parts(self, source: torch.Tensor, target: torch.Tensor) -> Callable[[], Pairs]:
        """Pairs that fill the target with the source: resident experts from their slots."""
        here, there = source.view(self.experts, -1), target.view(self.experts, -1)
        slots = self.slots.view(len(self.layer.experts), -1)

        def pairs() -> Pairs:
            slot_of = {e: s for s, e in enumerate(self.layer.experts) if e >= 0}
            found = [(slots[s], there[e]) for e, s in slot_of.items()]
            for start, end in _gaps(sorted(slot_of), self.experts):
                found.append((here[start:end], there[start:end]))
            return found

        return pairs


def _gaps(taken: Sequence[int], count: int) -> Iterator[tuple[int, int]]:
    """The runs of 0..count-1 between the numbers taken, which ascend."""
    for before, after in pairwise([-1, *taken, count]):
        if after > before + 1:
            yield before + 1, after


def _room(device: GpuDevice, slots: WeightUse) -> torch.Tensor:
    """Memory of the GPU for slots."""
    room = device.empty(use_nbytes(slots))
    if slots.form == "tile":
        return room
    return room.view(torch_dtype(dense_dtype(slots))).view([d.const() for d in slots.type.dims])


def _rows(held: torch.Tensor, use: WeightUse) -> torch.Tensor:
    """A stack by expert or slot: packed bytes [E, bytes], dense ones as they are."""
    return held.view(use.type.dims[0].const(), -1) if use.form == "tile" else held


def _check_same_numbers(stack: HotStack) -> None:
    if not stack.is_filled:
        raise UnsupportedInputError(
            f"@{stack.slots.ref.name} and @{stack.source.ref.name} are stored differently, so "
            "experts cannot move between them: give both the same encoding, by a policy that "
            "names it or by one rule"
        )


def _unpacked(packed: torch.Tensor, use: WeightUse, expert: int) -> torch.Tensor:
    tile, shape = use.tile, [d.const() for d in use.type.dims]
    return torch.as_tensor(
        load_native().unpack(
            packed.data_ptr(), expert, tile.format, shape[-2], shape[-1], tile.group,
            prod(shape[:-2]), tile.gate_up,
        )
    )  # fmt: skip


__all__ = ["Change", "Residency"]
