"""The steps of a phase on a device: one for each instruction, made once for each size of call.

Steps of a call depend on its sizes alone: they read ids and the batch from fixed addresses.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ktgraph.ir.interp import evaluate_attr
from ktgraph.ir.types import TensorType
from ktgraph.ops.registry import kernels_for, op_def
from ktgraph.runtime.errors import ExecutionError
from ktgraph.runtime.gpu.device import Fetch, Fork, KernelCall, Step
from ktgraph.runtime.gpu.inputs import Sizes
from ktgraph.runtime.gpu.parts import AWAIT, POST, Part, Parts
from ktgraph.runtime.gpu.streaming import WeightStream
from ktgraph.runtime.kernels_gpu import CROSSINGS, STREAM_WEIGHTS
from ktgraph.runtime.operands import Instruction, OperandRef, StateUse, TensorRef, WeightUse
from ktgraph.runtime.plan import PhasePlan, kernel_of, op_line
from ktgraph.runtime.router_counts import is_route
from ktgraph.runtime.side_stream import side_steps
from ktgraph.runtime.steps import StepArrays

if TYPE_CHECKING:
    from ktgraph.runtime.gpu.executor import GpuExecutor

Batches = Mapping[int, Any]  # the batch of each window, as the ops of one device take it

SAMPLE = "sample.tokens"
_KEPT = 64  # sizes of calls whose steps are kept


@dataclass
class Made:
    """The steps of one part at one size; `graph` replays them.

    items: the instruction that each step is; None for uploads and the handling of buffers.
    beside: what runs on another stream, by the flat position of its op.
    """

    steps: list[Step] = field(default_factory=list[Step])
    items: list[Instruction | None] = field(default_factory=list[Instruction | None])
    beside: dict[int, Fetch | Fork] = field(default_factory=dict[int, Fetch | Fork])
    runs: int = 0
    graph: Step | None = None

    def add(self, steps: Sequence[Step], item: Instruction | None = None) -> None:
        self.steps += steps
        self.items += [item] * len(steps)


class PhaseSteps:
    """Makes the steps of one phase, and keeps those of the sizes that were called last."""

    def __init__(
        self, executor: GpuExecutor, phase: PhasePlan, parts: Parts, first_box: int
    ) -> None:
        self.executor = executor
        self.device = executor.device
        self.phase = phase
        self.parts = parts
        self.first_box = first_box
        self.results = self._result_refs()
        self._sides = side_steps(phase.flat, phase.layouts, executor.plan.home)
        # a captured copy would not see that experts moved
        residency = None if self.is_decode else executor.residency
        self._stream = WeightStream(
            self.device, phase, executor.weights, executor.buffers, residency
        )
        self._made: OrderedDict[tuple[Sizes, int, int, str, bool], list[Made]] = OrderedDict()

    @property
    def is_decode(self) -> bool:
        """One new token a sequence: few sizes, called again and again, so worth a graph."""
        return self.phase.max_q == 1

    def forget(self) -> None:
        """Make the steps of every size anew when they are next called."""
        self._made.clear()

    def _result_refs(self) -> list[TensorRef]:
        """The logits, or every tensor that a plain module returns."""
        return [
            TensorRef(slot.type.dtype, self.phase.layouts.view(slot))
            for slot in self.phase.flat.returns
            if isinstance(slot.type, TensorType)
        ]

    def _bounds(self, step: StepArrays) -> tuple[int, int]:
        """Most new tokens and rows of a sequence: of any call when it may be captured."""
        if self.is_decode:
            return 1, self.executor.shape.sequence_rows
        new = int(np.diff(step.seq_start[: step.sequences + 1]).max())
        longest = int(step.kv_len[: step.sequences].max())
        return new, -(-longest // 256) * 256

    def of(self, step: StepArrays, most: str = "", has_seen: bool = False) -> list[Made]:
        """The steps of a call; `most`: it ends with the choice of tokens."""
        sizes = Sizes(step.tokens, step.rows, step.sequences)
        max_new, max_kv = self._bounds(step)
        key = (sizes, max_new, max_kv, most, has_seen)
        if key not in self._made:
            batches = self.executor.inputs.batches(
                sizes, self.executor.shape.page_size, max_new, max_kv
            )
            made = [self._made_part(p, sizes, batches) for p in self.parts.order]
            if most:
                made[-1].add([self._sampling(sizes, most, has_seen)])
            self._made[key] = made
            self.device.catch_up()  # with weights that were made ready for these steps
            if len(self._made) > _KEPT:
                self._made.popitem(last=False)
        self._made.move_to_end(key)
        return self._made[key]

    def _made_part(self, part: Part, sizes: Sizes, batches: Batches) -> Made:
        made = Made()
        if part.kind != "gpu":
            return made
        if part is self.parts.order[0]:
            made.add([*self.executor.uploads(self.phase, sizes), *self._stream.begin()])
        forks = {side: Fork() for side in self._sides if part.holds(side)}
        begins = {s.after: f for s, f in forks.items()}
        asides = {s.step: f for s, f in forks.items()}
        ends = {s.before: f for s, f in forks.items()}
        made.beside |= asides
        for item in part.items:
            if item.step in ends:
                made.add([self.device.join(ends.pop(item.step))])
            if item.kernel == STREAM_WEIGHTS:  # its readers wait for it
                made.beside[item.step] = self._stream.fetch(item)
                made.add([_nothing], item)
                continue
            step = self._step(item, sizes, batches)
            if item.step in asides:
                step = self.device.aside(asides[item.step], step)
            made.add(self._stream.before(item))
            made.add([step], item)
            made.add(self._stream.after(item))
            made.add(self._counting(item, sizes))
            if item.step in begins:
                made.add([self.device.fork(begins.pop(item.step))])
        return made

    def _sampling(self, sizes: Sizes, most: str, has_seen: bool) -> Step:
        """Chooses the token of every row of logits and leaves it where the next call's ids are.

        In a step of one token a sequence, that token was seen too: the host may not know it yet.
        """
        inputs, rows = self.executor.inputs, sizes.rows
        (logits, *_) = self.results_at(sizes.tokens, rows)
        seen = self.executor.seen.there[:rows] if has_seen else None
        last = inputs.ids[:rows] if has_seen and sizes.tokens == rows else None
        kernel = kernels_for(SAMPLE, "cuda")[0]
        operands, out = [logits, inputs.how[:rows], seen, last], (inputs.ids[:rows],)
        call = KernelCall(op_def(SAMPLE), kernel, operands, out, {"most": most})
        return self.device.kernel(call)

    def _counting(self, item: Instruction, sizes: Sizes) -> list[Step]:
        """The step behind a router that counts its choices, while they are counted."""
        counts = self.executor.counts
        if counts is None or not is_route(self.phase, item):
            return []
        step = self.phase.step(item)
        ref = item.operands[len(step.operands)]
        assert isinstance(ref, TensorRef)
        bound = {"T": sizes.tokens, "O": sizes.rows}
        return [counts.adder(step, self.executor.tensor(self.phase, ref, bound))]

    def _step(self, item: Instruction, sizes: Sizes, batches: Batches) -> Step:
        bound = {"T": sizes.tokens, "O": sizes.rows}
        count = len(self.phase.step(item).operands)
        given = [self.value(o, bound, batches) for o in item.operands[:count]]
        results = [self.value(o, bound, batches) for o in item.operands[count:]]
        if item.kernel == POST:
            return self._named(item, self.device.post(given, results, self._box(item)))
        if item.kernel == AWAIT and item.step in self.parts.box_of:
            return self._named(item, self.device.receive(given, results, self._box(item)))
        if item.kernel in CROSSINGS.values():
            return _together([self.device.copy(s, t) for s, t in zip(given, results, strict=True)])
        return self._named(item, self.device.kernel(self.kernel_call(item, bound, given, results)))

    def _box(self, item: Instruction) -> Any:
        return self.executor.mailboxes.boxes[self.first_box + self.parts.box_of[item.step]]

    def kernel_call(
        self, item: Instruction, sizes: dict[str, int], given: list[Any], results: list[Any]
    ) -> KernelCall:
        step = self.phase.step(item)
        definition = op_def(step.op.name)
        full = definition.signature.full_attrs(step.op.attrs)
        bindings = {**step.bindings, **sizes}
        attrs = {k: evaluate_attr(v, bindings) for k, v in full.items()}
        out = tuple(r if isinstance(r, torch.Tensor) else None for r in results)
        kernel = kernel_of(step.op, item.kernel, item.device)
        absent = [None] * (len(definition.signature.params) - len(given))
        return KernelCall(definition, kernel, [*given, *absent], out, attrs)

    def _named(self, item: Instruction, step: Step) -> Step:
        """The step, whose errors name the op."""

        def run() -> object:
            try:
                return step()
            except Exception as error:
                line = op_line(self.phase, item)
                raise ExecutionError(f"{type(error).__name__}: {error}\n  in: {line}") from error

        return run

    def value(self, ref: OperandRef, sizes: dict[str, int], batches: Batches) -> Any:
        if ref is None:
            return None
        if isinstance(ref, TensorRef):
            if not self.phase.layouts.is_value(ref.view.root):
                return self._stream.value(ref.view.root)
            return self.executor.tensor(self.phase, ref, sizes)
        if isinstance(ref, WeightUse):
            return self.executor.weights.on_gpu(ref, self.device.weight)
        if isinstance(ref, StateUse):
            return self.executor.binding.state(self.phase, ref)
        return batches[ref.window]

    def results_at(self, tokens: int, rows: int) -> list[torch.Tensor]:
        bound = {"T": tokens, "O": rows}
        return [self.executor.tensor(self.phase, r, bound) for r in self.results]


def _nothing() -> None:
    """A step of something that happens on another stream."""


def _together(steps: Sequence[Step]) -> Step:
    def run() -> None:
        for step in steps:
            step()

    return run


__all__ = ["Batches", "Made", "PhaseSteps"]
