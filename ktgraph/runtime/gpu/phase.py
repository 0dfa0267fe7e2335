"""One phase on a GPU and the CPU: its native plans, and calls of the steps of each size.

A decode call is run step by step the first time, then captured into one CUDA graph, hand-overs to
the CPU included, and replayed from then on.  So is a prefill that is all the GPU's, whose kernels
may end sooner than the host can launch them; one that waits for the CPU or for weights gains
nothing.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from ktgraph.ops.sample import MOST_TOKENS
from ktgraph.runtime.cache import InPlaceState
from ktgraph.runtime.errors import ExecutionError
from ktgraph.runtime.executor import TraceEvent
from ktgraph.runtime.gpu.device import Span, Step
from ktgraph.runtime.gpu.parts import Part, Parts
from ktgraph.runtime.gpu.phase_steps import Batches, Made, PhaseSteps
from ktgraph.runtime.gpu.watch import Watch
from ktgraph.runtime.operands import Instruction, OperandRef, WeightUse
from ktgraph.runtime.plan import PhasePlan, batch_windows, op_line, takes_batch
from ktgraph.runtime.steps import StepArrays

if TYPE_CHECKING:
    from ktgraph.runtime.gpu.executor import GpuExecutor

PATIENCE = 60.0  # seconds until a step that does not end is given up


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
        self._steps = PhaseSteps(executor, phase, parts, first_box)
        most = phase.arena.sizes
        self._answers = [
            self.device.host(max(r.numel() * r.element_size(), 1))
            for r in self._steps.results_at(most.tokens, most.rows)
        ]

    def forget_steps(self) -> None:
        """Make the steps of every size anew when they are next called."""
        self._steps.forget()

    @property
    def _is_worth_a_graph(self) -> bool:
        waits = bool(self.parts.boxes) or bool(self.phase.layouts.streamed)
        return self._steps.is_decode or (self.parts.can_capture and not waits)

    @property
    def samples(self) -> bool:
        """Whether the GPU can choose tokens at the end of a call: it has logits to draw from."""
        if not takes_batch(self.phase):
            return False
        home = self.executor.plan.home
        (logits, *_) = self._steps.results
        is_here = logits.view.root.type.device in (None, home)
        vocabulary = logits.view.dims[-1].at(self.executor.plan.module.dims)
        return is_here and self.parts.order[-1].kind == "gpu" and vocabulary <= MOST_TOKENS

    # -- one call ---------------------------------------------------------------------------------
    def start(self, step: StepArrays, uploads: list[Step], most: str, has_seen: bool) -> None:
        """Start a call whose tokens are left in place of its ids; waits only where the host works.

        most, has_seen: what the most demanding row needs, and whether one has a repetition penalty.
        """
        made = self._steps.of(step, most, has_seen)
        self.device.run(uploads)
        self._run_parts(made, step)

    def land(self, end: Any) -> None:
        """Wait for a mark behind a started call; raises ExecutionError where it failed."""
        self._finish(end)

    def run(self, step: StepArrays, upload: Step) -> list[torch.Tensor]:
        """Run a call; the results, in host memory that the next call writes over."""
        made = self._steps.of(step)
        self.device.run([upload])
        if self.executor.trace is None:
            self._run_parts(made, step)
        else:
            self._run_timed(made, step, self.executor.trace)
        results = self._steps.results_at(step.tokens, step.rows)
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
        results = [self._steps.value(o, bound, batches) for o in item.operands[count:]]
        call = self._steps.kernel_call(item, bound, given, results)
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
        found = self._steps.value(ref, sizes, batches)
        if isinstance(found, InPlaceState):
            return replace(found, parts=tuple(p.cpu() for p in found.parts))
        return found.cpu() if isinstance(found, torch.Tensor) else found


__all__ = ["PATIENCE", "BoundPhase"]
