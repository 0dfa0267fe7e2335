"""Running a plan: native plans bound to memory, Python kernels in between, measured timelines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from ktgraph.ir.dims import Dim
from ktgraph.ir.interp import evaluate_attr
from ktgraph.ir.types import TensorType
from ktgraph.ops.registry import op_def
from ktgraph.ops.tensor import torch_dtype
from ktgraph.runtime.batch import Batch
from ktgraph.runtime.cache import CacheShape, InPlaceState
from ktgraph.runtime.errors import ExecutionError
from ktgraph.runtime.flat import Slot, View
from ktgraph.runtime.native_binding import NativeBinding, start_engine
from ktgraph.runtime.operands import (
    BatchUse,
    Instruction,
    OperandRef,
    StateUse,
    TensorRef,
    WeightUse,
)
from ktgraph.runtime.packed import LoadedWeights
from ktgraph.runtime.plan import (
    PhasePlan,
    Plan,
    argument_slots,
    batch_windows,
    ids_slot,
    kernel_of,
    op_line,
)
from ktgraph.runtime.router_counts import RouterCounts, is_route
from ktgraph.runtime.steps import StepArrays


@dataclass
class CallSizes:
    """The sizes and the batch of one call."""

    tokens: int
    rows: int
    native: Mapping[int, Any]  # the engine's Batch of each window; empty without native code
    batch: Callable[[int], Batch]  # the torch form, made only when a Python kernel wants it


@dataclass(frozen=True)
class TraceEvent:
    """One instruction of a measured run, in seconds from its start."""

    kernel: str
    op: str  # the op's line in the IR
    phase: str
    start: float
    seconds: float
    lane: str = "cpu"  # a device, or a direction of a link

    @property
    def end(self) -> float:
        return self.start + self.seconds


Segment = Callable[[CallSizes], None]


class Executor:
    """A plan bound to its weights, cache and threads."""

    def __init__(
        self,
        plan: Plan,
        weights: LoadedWeights,
        states: Sequence[InPlaceState],
        shape: CacheShape,
        threads: int = 0,
    ) -> None:
        self.plan = plan
        self.weights = weights
        self.states = list(states)
        self.shape = shape
        self.arena = torch.empty(plan.arena_nbytes("cpu") + 64, dtype=torch.uint8)
        self.trace: list[TraceEvent] | None = None  # a list here makes runs timed
        needs_native = any(i.is_native for p in plan.phases for i in p.instructions)
        self.engine: Any = start_engine(threads) if needs_native else None
        self.binding = NativeBinding(self.engine, self.arena, weights, self.states, shape)
        self._phases = {p.name: _BoundPhase(self, p, p.segments) for p in plan.phases}
        self._ports: dict[str, _Port] = {}  # of phases of a causal language model
        windows = (0, *(w for w, _ in shape.windows))
        self._batches = {w: _native_batch() for w in windows if needs_native}

    @property
    def threads(self) -> int:
        return int(self.engine.threads) if self.engine is not None else 1

    def call(self, phase: str, ids: list[int], step: StepArrays) -> torch.Tensor:
        """Run one phase on a call; f32[rows, VOC] in memory of its own.

        Raises ExecutionError when an op fails.
        """
        if phase not in self._ports:
            self._ports[phase] = _Port(self, self.plan.phase(phase))
        port = self._ports[phase]
        port.ids[: step.tokens] = ids
        self._run_step(phase, step)
        return logits_as_f32(port.logits[: step.rows])

    def _run_step(self, phase: str, step: StepArrays) -> None:
        for window, batch in self._batches.items():
            step.give_to(batch, window)
        torch_batch = partial(step.as_batch, self.shape.page_size)
        self.run(phase, CallSizes(step.tokens, step.rows, self._batches, torch_batch))

    def call_tensors(
        self, phase: str, inputs: Sequence[torch.Tensor], step: StepArrays
    ) -> list[torch.Tensor]:
        """Run one phase of a plain module on its arguments; results in memory of their own.

        Raises ExecutionError when an op fails.
        """
        plan = self.plan.phase(phase)
        for slot, value in zip(argument_slots(plan)[0], inputs, strict=True):
            self.window(phase, slot, step.tokens, step.rows).copy_(value)
        self._run_step(phase, step)
        return [
            self.window(phase, slot, step.tokens, step.rows).clone() for slot in plan.flat.returns
        ]

    def count_experts(self, on: bool) -> RouterCounts | None:
        """Count which experts are chosen in the calls to come, or no longer; calls are slower."""
        counts = RouterCounts(self.plan, torch.device("cpu")) if on else None
        self._phases = {
            p.name: _BoundPhase(self, p, p.segments)
            if counts is None
            else _CountingPhase(self, p, counts)
            for p in self.plan.phases
        }
        return counts

    def close(self) -> None:
        """Nothing is held but memory and idle threads."""

    def run(self, phase: str, call: CallSizes) -> None:
        """Run one phase on what lies in its argument buffers."""
        bound = self._phases[phase]
        if self.trace is not None:
            bound.run_timed(call, self.trace)
            return
        for segment in bound.segments:
            segment(call)

    def segments(self, phase: str) -> int:
        """Calls that one run of the phase makes: native ones, and Python kernels."""
        return len(self._phases[phase].segments)

    def native_plans(self, phase: str) -> list[Any]:
        """The engine's plans of a phase, in order."""
        return self._phases[phase].native_plans

    def window(self, phase: str, slot: Slot, tokens: int, rows: int) -> torch.Tensor:
        """A tensor over a slot's bytes, for arguments and results."""
        plan = self.plan.phase(phase)
        assert isinstance(slot.type, TensorType)
        ref = TensorRef(slot.type.dtype, plan.layouts.view(slot))
        return self.tensor(plan, ref, {"T": tokens, "O": rows})

    def tensor(self, phase: PhasePlan, ref: TensorRef, sizes: dict[str, int]) -> torch.Tensor:
        """A view of the arena at the sizes of a call."""
        view: View = ref.view
        dtype = torch_dtype(ref.dtype)
        start = phase.arena.offset(view.root.name)
        storage = self.arena[start:].view(dtype)
        at = storage.storage_offset() + view.offset.at(sizes)
        return storage.as_strided(_at(view.dims, sizes), _at(view.strides, sizes), at)


def _at(dims: Sequence[Dim], sizes: dict[str, int]) -> list[int]:
    return [d.at(sizes) for d in dims]


class _Port:
    """Where a phase's token ids go in and its logits come out."""

    def __init__(self, executor: Executor, phase: PhasePlan) -> None:
        sizes = phase.arena.sizes
        self.ids = executor.window(phase.name, ids_slot(phase), sizes.tokens, sizes.rows).numpy()
        slot = next(s for s in phase.flat.returns if isinstance(s.type, TensorType))
        self.logits = executor.window(phase.name, slot, sizes.tokens, sizes.rows)


def logits_as_f32(logits: torch.Tensor) -> torch.Tensor:
    """Logits as f32 in memory of their own, by one thread.

    torch would copy 32,768 numbers or more on OpenMP threads, which then spin for milliseconds on
    the CPUs of the engine's threads: every decode step would wait for the scheduler's tick.
    """
    if logits.dtype == torch.float32:
        return torch.as_tensor(logits.numpy().copy())
    if logits.dtype == torch.float16:
        return torch.as_tensor(logits.numpy().astype(np.float32))
    bits = logits.view(torch.uint16).numpy().astype(np.uint32) << 16
    return torch.as_tensor(bits.view(np.float32))


def _native_batch() -> Any:
    from ktgraph.cpu_kernels import load_native

    return load_native().Batch()


class _BoundPhase:
    """Segments of one phase, ready to be called."""

    def __init__(
        self, executor: Executor, phase: PhasePlan, parts: Sequence[tuple[Instruction, ...]]
    ) -> None:
        self.executor = executor
        self.phase = phase
        self.parts = parts
        self._native: dict[int, Any] = {}  # the engine's plans by segment number
        self.segments = [self._bind(n, part) for n, part in enumerate(self.parts)]

    def _bind(self, number: int, part: tuple[Instruction, ...]) -> Segment:
        if not part[0].is_native:
            return self._python_call(part[0])
        plan = self.executor.binding.plan(self.phase, part)
        self._native[number] = plan
        start = plan.run
        window = _window(part)

        def native(call: CallSizes) -> None:
            start(call.tokens, call.rows, call.native[window])

        return native

    @property
    def native_plans(self) -> list[Any]:
        return list(self._native.values())

    def _python_call(self, item: Instruction) -> Segment:
        """The op's reference, or a launcher with the reference's signature."""
        step = self.phase.step(item)
        launch = kernel_of(step.op, item.kernel, "cpu").launch
        assert launch is not None
        full = op_def(step.op.name).signature.full_attrs(step.op.attrs)
        count = len(step.operands)

        def run(call: CallSizes) -> None:
            sizes = {"T": call.tokens, "O": call.rows}
            bindings = {**step.bindings, **sizes}
            operands = [self._value(o, sizes, call) for o in item.operands[:count]]
            attrs = {k: evaluate_attr(v, bindings) for k, v in full.items()}
            try:
                found = launch(*operands, **attrs)
            except Exception as error:
                line = op_line(self.phase, item)
                raise ExecutionError(f"{type(error).__name__}: {error}\n  in: {line}") from error
            results = cast("tuple[Any, ...]", found if isinstance(found, tuple) else (found,))
            for ref, value in zip(item.operands[count:], results, strict=True):
                if isinstance(ref, TensorRef):
                    self.executor.tensor(self.phase, ref, sizes).copy_(value)

        return run

    def _value(self, ref: OperandRef, sizes: dict[str, int], call: CallSizes) -> Any:
        if ref is None:
            return None
        if isinstance(ref, TensorRef):
            return self.executor.tensor(self.phase, ref, sizes)
        if isinstance(ref, WeightUse):
            return self.executor.weights.value(ref)
        if isinstance(ref, StateUse):
            return self.executor.binding.state(self.phase, ref)
        assert isinstance(ref, BatchUse)
        return call.batch(ref.window)

    def run_timed(self, call: CallSizes, trace: list[TraceEvent]) -> None:
        """Run, and append one event for each instruction."""
        begin = trace[-1].end if trace else 0.0
        for number, part in enumerate(self.parts):
            seconds = self._timed(number, call)
            for item, spent in zip(part, seconds, strict=True):
                line = op_line(self.phase, item)
                trace.append(TraceEvent(item.kernel, line, self.phase.name, begin, spent))
                begin += spent

    def _timed(self, number: int, call: CallSizes) -> list[float]:
        if number in self._native:
            batch = call.native[_window(self.parts[number])]
            found: list[float] = self._native[number].run_timed(call.tokens, call.rows, batch)
            return found
        start = time.perf_counter()
        self.segments[number](call)
        return [time.perf_counter() - start]


def _window(part: Sequence[Instruction]) -> int:
    """The window of the one batch that a native segment may read."""
    return max(batch_windows(part), default=0)


class _CountingPhase(_BoundPhase):
    """A phase cut behind every router, whose ids are counted before anything writes over them."""

    def __init__(self, executor: Executor, phase: PhasePlan, counts: RouterCounts) -> None:
        parts = [piece for part in phase.segments for piece in _behind_routers(phase, part)]
        super().__init__(executor, phase, parts)
        for number, part in enumerate(parts):
            if is_route(phase, part[-1]):
                self.segments[number] = self._counting(self.segments[number], part[-1], counts)

    def _counting(self, segment: Segment, item: Instruction, counts: RouterCounts) -> Segment:
        step = self.phase.step(item)
        slot = step.results[0]

        def run(call: CallSizes) -> None:
            segment(call)
            ids = self.executor.window(self.phase.name, slot, call.tokens, call.rows)
            counts.adder(step, ids)()

        return run


def _behind_routers(
    phase: PhasePlan, part: Sequence[Instruction]
) -> Iterator[tuple[Instruction, ...]]:
    piece: list[Instruction] = []
    for item in part:
        piece.append(item)
        if is_route(phase, item):
            yield tuple(piece)
            piece = []
    if piece:
        yield tuple(piece)


def chrome_trace(events: Sequence[TraceEvent]) -> dict[str, Any]:
    """Events in the Chrome trace format (times in microseconds): load it in a trace viewer."""
    rows = [
        {
            "name": e.kernel,
            "cat": _category(e.kernel),
            "ph": "X",
            "ts": e.start * 1e6,
            "dur": e.seconds * 1e6,
            "pid": 0,
            "tid": e.lane,
            "args": {"op": e.op, "phase": e.phase},
        }
        for e in events
    ]
    return {"displayTimeUnit": "ms", "traceEvents": rows}


def _category(kernel: str) -> str:
    kinds = {"torch": "reference", "triton": "gpu", "cuda": "copy"}
    return kinds.get(kernel.partition(".")[0], "native")


__all__ = [
    "CallSizes",
    "ExecutionError",
    "Executor",
    "TraceEvent",
    "chrome_trace",
    "logits_as_f32",
]
