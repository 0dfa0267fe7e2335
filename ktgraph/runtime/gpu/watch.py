"""Events of a measured step: the GPU's spans, the CPU's answers, and what the host ran in between.

All of them are spans of one clock, time.perf_counter.  Where the device has a model in place of a
speed of its own, its share is as long as the model says, the CPU's as long as it took, and both
begin as early as their operands allow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ktgraph.runtime.executor import TraceEvent
from ktgraph.runtime.gpu.device import Model, Span
from ktgraph.runtime.gpu.parts import AWAIT, Parts
from ktgraph.runtime.kernels_gpu import STREAM_WEIGHTS
from ktgraph.runtime.operands import Instruction
from ktgraph.runtime.plan import PhasePlan, op_line
from ktgraph.runtime.steps import StepArrays

CPU = "cpu"
_SIDE = " side"


@dataclass(frozen=True)
class _Work:
    """Instructions that one span covers: more than one only in a mailbox."""

    items: Sequence[Instruction]
    lane: str
    begin: float
    end: float


class Watch:
    """Collects the work of one run of a phase."""

    def __init__(self, phase: PhasePlan, parts: Parts, first_box: int) -> None:
        self.phase = phase
        self.parts = parts
        self.first_box = first_box
        self._works: list[_Work] = []

    def gpu(
        self,
        items: Sequence[Instruction | None],
        spans: Sequence[Span],
        beside: Mapping[int, Span],
    ) -> None:
        """Steps of the GPU; what runs beside its main stream has a lane of its own."""
        for item, span in zip(items, spans, strict=True):
            if item is None:
                continue
            if item.step not in beside:
                self._works.append(_Work([item], item.device, *span))
                continue
            is_copy = item.kernel == STREAM_WEIGHTS
            lane = f"{CPU} -> {item.device}" if is_copy else item.device + _SIDE
            self._works.append(_Work([item], lane, *beside[item.step]))

    def host(self, items: Sequence[Instruction], begin: float, seconds: Sequence[float]) -> None:
        """Instructions that the host ran one after the other."""
        for item, spent in zip(items, seconds, strict=True):
            self._works.append(_Work([item], CPU, begin, begin + spent))
            begin += spent

    def answers(self, spans: Mapping[int, Span]) -> None:
        """When each mailbox was answered.  What waits for an answer begins once it is there."""
        for number, items in enumerate(self.parts.boxes):
            self._works.append(_Work(items, CPU, *spans[self.first_box + number]))
        self._works = [self._without_waiting(w, spans) for w in self._works]

    def _without_waiting(self, work: _Work, spans: Mapping[int, Span]) -> _Work:
        item = work.items[0]
        if item.kernel != AWAIT or item.step not in self.parts.box_of:
            return work
        answered = spans[self.first_box + self.parts.box_of[item.step]][1]
        begin = min(max(work.begin, answered), work.end)
        return _Work(work.items, work.lane, begin, work.end)

    def events(
        self, step: StepArrays, model: Model | None, before: Sequence[TraceEvent]
    ) -> list[TraceEvent]:
        """In order of their begin, behind the events of earlier calls."""
        works = self._works if model is None else self._modelled(step, model)
        first = min((w.begin for w in works), default=0.0)
        shift = max((e.end for e in before), default=0.0) - first
        return [self._event(w, shift) for w in sorted(works, key=lambda w: w.begin)]

    def _event(self, work: _Work, shift: float) -> TraceEvent:
        kernels = " + ".join(i.kernel for i in work.items)
        line = op_line(self.phase, work.items[0])
        seconds = work.end - work.begin
        return TraceEvent(
            kernels, line, self.phase.name, work.begin + shift, seconds, lane=work.lane
        )

    def _modelled(self, step: StepArrays, model: Model) -> list[_Work]:
        measured: dict[int, float] = {}
        inside: list[float] = []  # where in its op's span each of the CPU's works begins
        for work in self._works:
            number = work.items[0].step
            inside.append(measured.get(number, 0.0))
            if work.lane == CPU:
                measured[number] = inside[-1] + work.end - work.begin
        new, past = _rows(step)
        spans = model(self.phase.name, new, past, measured)
        found: list[_Work] = []
        for work, at in zip(self._works, inside, strict=True):
            begin, end = spans[work.items[0].step]
            if work.lane == CPU:
                begin, end = begin + at, begin + at + work.end - work.begin
            lane = work.lane.removesuffix(_SIDE)  # the model's devices have one stream
            found.append(_Work(work.items, lane, begin, end))
        return found


def _rows(step: StepArrays) -> tuple[list[int], list[int]]:
    """New tokens and cached rows of each sequence of a call."""
    count = step.sequences
    starts: list[int] = step.seq_start[: count + 1].tolist()
    new = [end - start for start, end in pairwise(starts)]
    rows: list[int] = step.kv_len[:count].tolist()
    return new, [r - n for r, n in zip(rows, new, strict=True)]


__all__ = ["Watch"]
