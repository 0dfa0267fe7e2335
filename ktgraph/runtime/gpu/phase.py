"""One phase on a GPU and the CPU: its native plans, and the steps of each size that was called.

The steps of a call depend on its sizes alone; they are made once for each size.  A decode call is
run step by step the first time, then captured into one CUDA graph, hand-overs to the CPU included,
and replayed from then on.  So is a prefill that is all the GPU's, whose kernels may end sooner than
the host can launch them; one that waits for the CPU or for weights gains nothing.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from ktgraph.ir.interp import evaluate_attr
from ktgraph.ir.types import TensorType
from ktgraph.ops.registry import kernels_for, op_def
from ktgraph.ops.sample import MOST_TOKENS
from ktgraph.runtime.cache import InPlaceState
from ktgraph.runtime.errors import ExecutionError
from ktgraph.runtime.executor import TraceEvent
from ktgraph.runtime.gpu.device import Fetch, Fork, KernelCall, Span, Step
from ktgraph.runtime.gpu.inputs import Sizes
from ktgraph.runtime.gpu.parts import AWAIT, POST, Part, Parts
from ktgraph.runtime.gpu.streaming import WeightStream
from ktgraph.runtime.gpu.watch import Watch
from ktgraph.runtime.kernels_gpu import CROSSINGS, STREAM_WEIGHTS
from ktgraph.runtime.operands import Instruction, OperandRef, StateUse, TensorRef, WeightUse
from ktgraph.runtime.plan import PhasePlan, batch_windows, kernel_of, op_line, takes_batch
from ktgraph.runtime.router_counts import is_route
from ktgraph.runtime.side_stream import side_steps
from ktgraph.runtime.steps import StepArrays

if TYPE_CHECKING:
    from ktgraph.runtime.gpu.executor import GpuExecutor

Batches = Mapping[int, Any]  # the batch of each window, as the ops of one device take it

SAMPLE = "sample.tokens"
_KEPT = 64  # sizes of calls whose steps are kept
PATIENCE = 60.0  # seconds until a step that does not end is given up


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


class BoundPhase:
    """One phase: its native plans, and the steps of each size that was called."""

    def __init__(
        self, executor: GpuExecutor, phase: PhasePlan, parts: Parts, first_box: int
    ) -> None:
        self.executor = executor
        self.device = executor.device
        self.phase = phase
        self.parts = parts
        self.first_box = first_box
        self._plans: dict[int, Any] = {}  # native parts by their place
        native = executor.binding
        self._answering = [native.plan(phase, items) for items in parts.boxes]
        for number, plan in enumerate(self._answering):
            executor.mailboxes.answer(first_box + number, plan)
        for place, part in enumerate(parts.order):
            if part.kind == "native":
                self._plans[place] = native.plan(phase, part.items)
        self._results = self._result_refs()
        self._sides = side_steps(phase.flat, phase.layouts, executor.plan.home)
        # a captured copy would not see that experts moved
        residency = None if self._is_decode else executor.residency
        self._stream = WeightStream(
            self.device, phase, executor.weights, executor.buffers, residency
        )
        self._made: OrderedDict[tuple[Sizes, int, int, str, bool], list[Made]] = OrderedDict()
        most = phase.arena.sizes
        self._answers = [
            self.device.host(max(r.numel() * r.element_size(), 1))
            for r in self._results_at(most.tokens, most.rows)
        ]

    def _result_refs(self) -> list[TensorRef]:
        """The logits, or every tensor that a plain module returns."""
        return [
            TensorRef(slot.type.dtype, self.phase.layouts.view(slot))
            for slot in self.phase.flat.returns
            if isinstance(slot.type, TensorType)
        ]

    def forget_steps(self) -> None:
        """Make the steps of every size anew when they are next called."""
        self._made.clear()

    @property
    def _is_decode(self) -> bool:
        """One new token a sequence: few sizes, called again and again, so worth a graph."""
        return self.phase.max_q == 1

    @property
    def _is_worth_a_graph(self) -> bool:
        waits = bool(self.parts.boxes) or bool(self.phase.layouts.streamed)
        return self._is_decode or (self.parts.can_capture and not waits)

    @property
    def samples(self) -> bool:
        """Whether the GPU can choose tokens at the end of a call: it has logits to draw from."""
        if not takes_batch(self.phase):
            return False
        home = self.executor.plan.home
        (logits, *_) = self._results
        is_here = logits.view.root.type.device in (None, home)
        vocabulary = logits.view.dims[-1].at(self.executor.plan.module.dims)
        return is_here and self.parts.order[-1].kind == "gpu" and vocabulary <= MOST_TOKENS

    # -- one call ---------------------------------------------------------------------------------
    def start(self, step: StepArrays, uploads: list[Step], most: str, has_seen: bool) -> None:
        """Start a call whose tokens are left in place of its ids; waits only where the host works.

        most, has_seen: what the most demanding row needs, and whether one has a repetition penalty.
        """
        made = self._steps(step, most, has_seen)
        self.device.run(uploads)
        self._run_parts(made, step)

    def land(self, end: Any) -> None:
        """Wait for a mark behind a started call; raises ExecutionError where it failed."""
        self._finish(end)

    def run(self, step: StepArrays, upload: Step) -> list[torch.Tensor]:
        """Run a call; the results, in host memory that the next call writes over."""
        made = self._steps(step)
        self.device.run([upload])
        if self.executor.trace is None:
            self._run_parts(made, step)
        else:
            self._run_timed(made, step, self.executor.trace)
        results = self._results_at(step.tokens, step.rows)
        answers = [
            held[: r.numel() * r.element_size()].view(r.dtype).view(r.shape)
            for held, r in zip(self._answers, results, strict=True)
        ]
        self.device.run([self.device.copy(r, a) for r, a in zip(results, answers, strict=True)])
        self._finish()
        return answers

    def _run_parts(self, made: list[Made], step: StepArrays) -> None:
        for place, part in enumerate(self.parts.order):
            if part.kind == "gpu":
                self._start(made[place], part)
                continue
            self._finish()
            self._wait_for_boxes(part)
            if part.kind == "native":
                self._plans[place].run(step.tokens, step.rows, self._native_batch(part, step))
            else:
                self._run_on_host(part.items[0], step)

    def _run_timed(self, made: list[Made], step: StepArrays, trace: list[TraceEvent]) -> None:
        """Run step by step, and append one event for each instruction.

        What never ran at this size runs once before: its kernels are compiled then.
        """
        if any(m.steps and m.runs == 0 for m in made):
            self._run_parts(made, step)
            self._finish()
        self.executor.mailboxes.spans()  # those of earlier runs
        watch = Watch(self.phase, self.parts, self.first_box)
        for place, part in enumerate(self.parts.order):
            if part.kind == "gpu":
                watch.gpu(made[place].items, *self._timed_steps(made[place]))
                continue
            self._wait_for_boxes(part)
            begin = time.perf_counter()
            watch.host(part.items, begin, self._timed_on_host(place, part, step))
        watch.answers(self.executor.mailboxes.spans())
        trace += watch.events(step, self.device.model, trace)

    def _timed_steps(self, made: Made) -> tuple[list[Span], dict[int, Span]]:
        """Spans of the steps, and of what ran beside them."""
        read = self.device.timed(made.steps)
        self._finish()
        beside = {step: self.device.span(work) for step, work in made.beside.items()}
        return read(), beside

    def _timed_on_host(self, place: int, part: Part, step: StepArrays) -> list[float]:
        """Seconds of every instruction."""
        if part.kind == "native":
            plan = self._plans[place]
            return plan.run_timed(step.tokens, step.rows, self._native_batch(part, step))
        begin = time.perf_counter()
        self._run_on_host(part.items[0], step)
        return [time.perf_counter() - begin]

    def _bounds(self, step: StepArrays) -> tuple[int, int]:
        """Most new tokens and rows of a sequence: of any call when it may be captured."""
        if self._is_decode:
            return 1, self.executor.shape.sequence_rows
        new = int(np.diff(step.seq_start[: step.sequences + 1]).max())
        longest = int(step.kv_len[: step.sequences].max())
        return new, -(-longest // 256) * 256

    def _steps(self, step: StepArrays, most: str = "", has_seen: bool = False) -> list[Made]:
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
        (logits, *_) = self._results_at(sizes.tokens, rows)
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

    def _start(self, made: Made, part: Part) -> None:
        """Run a part's steps; from the second call of a size on, as one graph where that pays."""
        may_capture = self.executor.capture and self._is_worth_a_graph
        if made.graph is None and may_capture and made.runs > 0:
            made.graph = self.device.capture(made.steps)
        self.device.run(made.steps if made.graph is None else [made.graph])
        made.runs += 1  # whole: what is captured must have compiled its kernels and made its zeros

    def _finish(self, mark: Any = None) -> None:
        """Wait for the GPU; a failure of the CPU's work, or a GPU that hangs, is one error."""
        given = () if mark is None else (mark,)
        try:
            ended = self.device.finish(self._check, PATIENCE, *given)
        except ExecutionError:
            raise
        except RuntimeError as error:
            raise ExecutionError(f"the GPU's share of @{self.phase.name}: {error}") from error
        if not ended:
            raise ExecutionError(
                f"@{self.phase.name} did not end within {PATIENCE:.0f} s: the GPU waits for an "
                "answer of the CPU that does not come"
            )
        self._check()  # a failed answer lets the stream go on: what it made then is void

    def _wait_for_boxes(self, part: Part) -> None:
        for number in part.awaits:
            self._wait_for_box(self.first_box + number)

    def _check(self) -> None:
        """Raises ExecutionError with the first failure of the CPU's work."""
        try:
            self.executor.mailboxes.check()
        except RuntimeError as error:
            raise ExecutionError(f"the CPU's share of @{self.phase.name}: {error}") from error

    def _wait_for_box(self, number: int) -> None:
        """The host itself takes an answer, where it and not the GPU reads the result."""
        end = time.perf_counter() + PATIENCE
        while not self.executor.mailboxes.take(number):
            self._check()
            if time.perf_counter() > end:
                raise ExecutionError(f"@{self.phase.name}: the CPU's work did not end in time")
        self._check()

    def _results_at(self, tokens: int, rows: int) -> list[torch.Tensor]:
        bound = {"T": tokens, "O": rows}
        return [self.executor.tensor(self.phase, r, bound) for r in self._results]

    # -- steps -----------------------------------------------------------------------------------
    def _step(self, item: Instruction, sizes: Sizes, batches: Batches) -> Step:
        bound = {"T": sizes.tokens, "O": sizes.rows}
        count = len(self.phase.step(item).operands)
        given = [self._value(o, bound, batches) for o in item.operands[:count]]
        results = [self._value(o, bound, batches) for o in item.operands[count:]]
        if item.kernel == POST:
            return self._named(item, self.device.post(given, results, self._box(item)))
        if item.kernel == AWAIT and item.step in self.parts.box_of:
            return self._named(item, self.device.receive(given, results, self._box(item)))
        if item.kernel in CROSSINGS.values():
            return _together([self.device.copy(s, t) for s, t in zip(given, results, strict=True)])
        return self._named(item, self.device.kernel(self._kernel_call(item, bound, given, results)))

    def _box(self, item: Instruction) -> Any:
        return self.executor.mailboxes.boxes[self.first_box + self.parts.box_of[item.step]]

    def _kernel_call(
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

    def _value(self, ref: OperandRef, sizes: dict[str, int], batches: Batches) -> Any:
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

    # -- on the host -----------------------------------------------------------------------------
    def _native_batch(self, part: Part, step: StepArrays) -> Any:
        """The engine's batch, of the one window that the part reads."""
        from ktgraph.cpu_kernels import load_native

        batch = load_native().Batch()
        step.give_to(batch, max(batch_windows(part.items), default=0))
        return batch

    def _run_on_host(self, item: Instruction, step: StepArrays) -> None:
        """An op's torch function on copies of its operands; the GPU is idle meanwhile."""
        flat = self.phase.step(item)
        bound = {"T": step.tokens, "O": step.rows}
        size = self.executor.shape.page_size
        batches = {w: step.as_batch(size, w) for w in step.windows}
        count = len(flat.operands)
        given = [self._host_value(o, bound, batches) for o in item.operands[:count]]
        results = [self._value(o, bound, batches) for o in item.operands[count:]]
        call = self._kernel_call(item, bound, given, results)
        assert call.kernel.launch is not None
        try:
            found = call.kernel.launch(*given, **call.attrs)
        except Exception as error:
            line = op_line(self.phase, item)
            raise ExecutionError(f"{type(error).__name__}: {error}\n  in: {line}") from error
        values = cast("tuple[Any, ...]", found if isinstance(found, tuple) else (found,))
        for target, value in zip(results, values, strict=True):
            if isinstance(target, torch.Tensor):
                target.copy_(value)
            else:
                for kept, new in zip(target.parts, value.parts, strict=True):
                    kept.copy_(new)
        self.device.catch_up()  # a result that is not dense is written by a kernel of torch

    def _host_value(self, ref: OperandRef, sizes: dict[str, int], batches: Batches) -> Any:
        if isinstance(ref, WeightUse):
            return self.executor.weights.value(ref)
        found = self._value(ref, sizes, batches)
        if isinstance(found, InPlaceState):
            return replace(found, parts=tuple(p.cpu() for p in found.parts))
        return found.cpu() if isinstance(found, torch.Tensor) else found


def _nothing() -> None:
    """A step of something that happens on another stream."""


def _together(steps: Sequence[Step]) -> Step:
    def run() -> None:
        for step in steps:
            step()

    return run


__all__ = ["PATIENCE", "BoundPhase"]
