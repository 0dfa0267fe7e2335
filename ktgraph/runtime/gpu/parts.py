"""Cutting a phase by who starts its instructions: the GPU's stream, a mailbox, or the host.

What the CPU computes from an `xfer.post` alone is started by the post's mailbox, beside the GPU.
Other instructions of the CPU are run by the host between two runs of the GPU, after the mailboxes
whose results they read have answered.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from ktgraph.ir.types import TensorType
from ktgraph.runtime.arena import PlanError
from ktgraph.runtime.flat import Slot
from ktgraph.runtime.kernels_gpu import CROSSINGS
from ktgraph.runtime.operands import Instruction
from ktgraph.runtime.plan import PhasePlan, batch_windows, op_line
from ktgraph.runtime.side_stream import Side

Kind = Literal["gpu", "native", "python"]

POST, AWAIT = CROSSINGS["xfer.post"], CROSSINGS["xfer.await"]


@dataclass
class Part:
    """Consecutive instructions of one kind: `gpu` may be captured, `native` is one engine plan.

    A native part reads the batch of one window.

    awaits: mailboxes that the host waits for before it runs the part.
    """

    kind: Kind
    items: list[Instruction] = field(default_factory=list[Instruction])
    awaits: list[int] = field(default_factory=list[int])

    def holds(self, side: Side) -> bool:
        """Whether all that a side op is behind, itself, and in front of is here: it goes aside."""
        return {side.after, side.step, side.before} <= {i.step for i in self.items}


@dataclass
class Parts:
    """A phase, cut.  `boxes[n]` is what mailbox n computes; `box_of` maps a step to its box."""

    order: list[Part]
    boxes: list[list[Instruction]]
    box_of: dict[int, int]

    @property
    def can_capture(self) -> bool:
        """Whether the whole phase is one run of the GPU."""
        return [p.kind for p in self.order] == ["gpu"]


def cut(phase: PhasePlan) -> Parts:
    """Cut a phase; raises PlanError for a mailbox whose work is not native.

    Also for an op that the host runs on weights which were streamed to the GPU.
    """
    return _Cutting(phase).run()


class _Cutting:
    """One pass over the instructions, in order."""

    def __init__(self, phase: PhasePlan) -> None:
        self.phase = phase
        self.found = Parts([Part("gpu")], [], {})  # the first part brings the inputs there
        self.holder: dict[str, int] = {}  # storage on the CPU -> the mailbox that fills it
        self.posted: set[str] = set()  # of these, what is filled before the request
        self.answered: set[int] = set()  # mailboxes that somebody has waited for

    def run(self) -> Parts:
        for item in self.phase.instructions:
            if item.kernel == POST:
                self._post(item)
            elif item.kernel == AWAIT:
                self._await(item)
            elif item.on_gpu and not item.is_fallback:
                self._append("gpu", item)
            else:
                self._on_host(item)
        return self.found

    def _post(self, item: Instruction) -> None:
        number = len(self.found.boxes)
        self.found.boxes.append([])
        self.found.box_of[item.step] = number
        made = self._roots(self.phase.step(item).results)
        self.holder |= dict.fromkeys(made, number)
        self.posted |= set(made)
        self._append("gpu", item)

    def _await(self, item: Instruction) -> None:
        """A copy, where the host has waited for the mailbox already."""
        boxes = self._boxes(item) - self.answered
        if len(boxes) > 1:
            line = op_line(self.phase, item)
            raise PlanError(f"an xfer.await takes the answer of one mailbox\n  in: {line}")
        if boxes:
            self.found.box_of[item.step] = max(boxes)
            self.answered |= boxes
        self._append("gpu", item)

    def _on_host(self, item: Instruction) -> None:
        """In a mailbox when it reads nothing of the host's but what the mailbox holds."""
        _check_no_streamed(self.phase, item)
        read = self._roots(s for s in self.phase.step(item).slots if s.type.device == "cpu")
        boxes = self._boxes(item)
        number = max(boxes, default=-1)
        inside = boxes and number not in self.answered
        if inside and not item.on_gpu and all(self._is_there(r, number) for r in read):
            _check_native(self.phase, item)
            self.found.boxes[number].append(item)
            self.holder |= dict.fromkeys(self._roots(self.phase.step(item).results), number)
            return
        self._append("native" if item.is_native else "python", item, boxes - self.answered)
        self.answered |= boxes

    def _is_there(self, root: str, number: int) -> bool:
        """Whether mailbox `number` may read it: posted before, or made by the mailbox itself."""
        return root in self.posted or self.holder.get(root) == number

    def _append(self, kind: Kind, item: Instruction, awaits: Iterable[int] = ()) -> None:
        order, boxes = self.found.order, sorted(awaits)
        is_other = not order or order[-1].kind != kind or kind == "python" or bool(boxes)
        if is_other or (kind == "native" and len(batch_windows([*order[-1].items, item])) > 1):
            order.append(Part(kind, awaits=boxes))
        order[-1].items.append(item)

    def _boxes(self, item: Instruction) -> set[int]:
        read = self._roots(self.phase.step(item).slots)
        return {self.holder[r] for r in read if r in self.holder}

    def _roots(self, slots: Iterable[Slot]) -> list[str]:
        tensors = [s for s in slots if isinstance(s.type, TensorType)]
        return [self.phase.layouts.view(s).root.name for s in tensors]


def _check_no_streamed(phase: PhasePlan, item: Instruction) -> None:
    if any(s.name in phase.layouts.streamed for s in phase.step(item).slots):
        raise PlanError(
            f"{item.kernel} runs on the host, and its weights are streamed to the GPU: no GPU "
            "kernel takes them as they are stored. Place the op on the CPU, or change the "
            f"quantization policy\n  in: {op_line(phase, item)}"
        )


def _check_native(phase: PhasePlan, item: Instruction) -> None:
    if not item.is_native:
        raise PlanError(
            f"{item.kernel} cannot run beside the GPU: what the CPU computes between a post and "
            "its await must be a native kernel. Place the op on the GPU, or change the "
            f"quantization policy\n  in: {op_line(phase, item)}"
        )


__all__ = ["AWAIT", "POST", "Part", "Parts", "cut"]
