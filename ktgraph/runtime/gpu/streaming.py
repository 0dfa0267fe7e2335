"""Weights that cross the link for each call: two buffers, the next copy behind this layer's work.

Copy k goes to buffer k % 2.  The first two start with the phase; copy k+2 starts as soon as the ops
that read copy k have ended.  Its first reader waits for it, wherever the copy stands in the order
of ops.  Experts that have slots on the GPU come from there and do not cross.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ktgraph.placement.graph import STREAM_BUFFERS
from ktgraph.runtime.flat import Slot
from ktgraph.runtime.gpu.device import Fetch, GpuDevice, Step
from ktgraph.runtime.gpu.residency import Residency
from ktgraph.runtime.kernels_gpu import STREAM_WEIGHTS
from ktgraph.runtime.operands import Instruction, WeightUse
from ktgraph.runtime.packed import LoadedWeights, use_nbytes
from ktgraph.runtime.plan import PhasePlan, Plan

Parts = Callable[[], "list[tuple[torch.Tensor, torch.Tensor]]"]

BUFFERS = STREAM_BUFFERS
_ALIGN = 256  # bytes


def streamed(phase: PhasePlan) -> list[Instruction]:
    """The copies of weights of a phase, in the order in which they are read."""
    found = [i for i in phase.instructions if i.kernel == STREAM_WEIGHTS]
    return sorted(found, key=lambda i: readers(phase, i)[0])


def readers(phase: PhasePlan, item: Instruction) -> list[int]:
    """Flat positions of the ops that read what a copy brings."""
    names = {r.name for r in phase.step(item).results}
    return [n for n, op in enumerate(phase.flat.ops) if names & {s.name for s in op.slots}]


def _uses(item: Instruction) -> list[WeightUse]:
    return [o for o in item.operands if isinstance(o, WeightUse)]


def copy_nbytes(item: Instruction) -> int:
    """Bytes of a buffer that holds what one copy brings."""
    return sum(-(-use_nbytes(u) // _ALIGN) * _ALIGN for u in _uses(item))


def buffer_nbytes(plan: Plan) -> int:
    """Bytes of one buffer: the largest copy of any phase; 0 when nothing is streamed."""
    return max((copy_nbytes(i) for p in plan.phases for i in streamed(p)), default=0)


class WeightStream:
    """The copies of one phase over the executor's buffers."""

    def __init__(
        self,
        device: GpuDevice,
        phase: PhasePlan,
        weights: LoadedWeights,
        buffers: Sequence[torch.Tensor],
        residency: Residency | None = None,
    ) -> None:
        self.device = device
        self.residency = residency
        self._values: dict[str, Any] = {}  # by slot: what kernels take
        self._starting: dict[int, list[Fetch]] = {}  # first reader -> its copies
        self._ending: dict[int, list[int]] = {}  # last reader -> numbers of copies
        self._order: list[Fetch] = []
        self._fetches: dict[int, Fetch] = {}  # by the flat position of the copy
        for number, item in enumerate(streamed(phase)):
            self._add(phase, item, weights, buffers[number % BUFFERS])
            reading = readers(phase, item)
            self._starting.setdefault(reading[0], []).append(self._order[number])
            self._ending.setdefault(reading[-1], []).append(number)

    def _add(
        self, phase: PhasePlan, item: Instruction, weights: LoadedWeights, buffer: torch.Tensor
    ) -> None:
        parts: list[Parts] = []
        targets: list[torch.Tensor] = []
        results = phase.step(item).results
        start = 0
        for use, slot in zip(_uses(item), results, strict=True):
            source = weights.tensors[use.key]
            target = buffer[start : start + source.nbytes].view(source.dtype).view(source.shape)
            start += -(-source.nbytes // _ALIGN) * _ALIGN
            parts.append(self._parts(use, source, target))
            targets.append(target)
            is_packed = use.form == "tile"
            self._values[slot.name] = self.device.weight(target, use) if is_packed else target
        self._order.append(Fetch(lambda: [pair for part in parts for pair in part()], targets))
        self._fetches[item.step] = self._order[-1]

    def _parts(self, use: WeightUse, source: torch.Tensor, target: torch.Tensor) -> Parts:
        """What fills the buffer of one weight, asked for when the copy starts."""
        stack = None if self.residency is None else self.residency.stack_of(use)
        if stack is None:
            return lambda: [(source, target)]
        return stack.parts(source, target)

    def value(self, slot: Slot) -> Any:
        """What kernels take for a streamed weight."""
        return self._values[slot.name]

    def begin(self) -> list[Step]:
        """Steps at the start of the phase; nothing uses the buffers then."""
        return [self.device.fetch(f, None) for f in self._order[:BUFFERS]]

    def before(self, item: Instruction) -> list[Step]:
        """Steps in front of an op, which wait for the weights that it is the first to read."""
        return [self.device.fetched(f) for f in self._starting.get(item.step, [])]

    def fetch(self, item: Instruction) -> Fetch:
        """The copy that an instruction is."""
        return self._fetches[item.step]

    def after(self, item: Instruction) -> list[Step]:
        """Steps behind an op: buffers that it was the last to read are filled again."""
        found: list[Step] = []
        for number in self._ending.get(item.step, []):
            done = self._order[number]
            found.append(self.device.release(done))
            if number + BUFFERS < len(self._order):
                found.append(self.device.fetch(self._order[number + BUFFERS], done))
        return found


__all__ = ["BUFFERS", "WeightStream", "buffer_nbytes", "copy_nbytes", "readers", "streamed"]
