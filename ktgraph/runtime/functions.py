"""`FunctionRunner`: the functions of a module that take and give plain tensors, by name.

A flat function (axis T) takes any number of rows, more than one call holds in several calls; any
other is planned for the sizes of one call.  The functions share an engine and an arena: one runs at
a time.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock, get_ident

import numpy as np
import torch
from torch import Tensor

from ktgraph.ir.graph import Module
from ktgraph.ir.types import TensorType, Type
from ktgraph.runtime.arena import PlanError
from ktgraph.runtime.cache import CacheShape
from ktgraph.runtime.executor import Executor, TraceEvent
from ktgraph.runtime.gpu.device import GpuDevice
from ktgraph.runtime.gpu.executor import GpuExecutor
from ktgraph.runtime.memory import check_memory, memory_need
from ktgraph.runtime.packed import LoadedWeights
from ktgraph.runtime.plan import PhasePlan, Plan, argument_slots
from ktgraph.runtime.runner import RunnerBusyError, available_memory
from ktgraph.runtime.steps import StepArrays

_PAGE = 32  # rows; attention over the tokens of a call addresses them in pages


def function_plan(module: Module, threads: int) -> Plan:
    """The plan of a lowered module whose functions take plain tensors.

    Raises PlanError for one that takes a cache, and MemoryBudgetError, before anything is loaded.
    """
    plan = Plan.build(module)
    for phase in plan.phases:
        _, states, batches = argument_slots(phase)
        if states or batches:
            raise PlanError(f"@{phase.name} takes a cache or a batch, not plain tensors alone")
    check_memory(memory_need(plan, _shape_of(plan), threads), available_memory(plan))
    return plan


def _shape_of(plan: Plan) -> CacheShape:
    """Pages for the tokens of the largest call."""
    pages = -(-max(p.arena.sizes.tokens for p in plan.phases) // _PAGE)
    return CacheShape(_PAGE, pages, pages * _PAGE)


@dataclass(frozen=True)
class FunctionForm:
    """What a function takes and gives.  most: tokens of its largest call."""

    args: tuple[Type, ...]
    returns: tuple[Type, ...]
    most: int

    @staticmethod
    def of(phase: PhasePlan) -> FunctionForm:
        args = tuple(s.type for s in argument_slots(phase)[0])
        returns = tuple(s.type for s in phase.flat.returns)
        return FunctionForm(args, returns, phase.arena.sizes.tokens)

    @property
    def is_flat(self) -> bool:
        return any(map(_is_flat, self.args))

    def rows(self, inputs: Sequence[Tensor]) -> int:
        """Rows of the flat arguments."""
        return next(len(x) for x, t in zip(inputs, self.args, strict=True) if _is_flat(t))


class FunctionRunner:
    """A plan of `function_plan` bound to its weights, on the CPU or a GPU and the CPU."""

    def __init__(
        self, plan: Plan, weights: LoadedWeights, threads: int, device: GpuDevice | None = None
    ) -> None:
        self.plan = plan
        self.forms = {p.name: FunctionForm.of(p) for p in plan.phases}
        held, shape = weights.with_views(plan.views), _shape_of(plan)
        self.executor = (
            Executor(plan, held, [], shape, threads)
            if device is None
            else GpuExecutor(plan, device, held, [], shape, threads)
        )
        self._step = StepArrays(max(f.most for f in self.forms.values()), 1, 1, shape.pages)
        self._lock = Lock()
        self._caller: int | None = None  # the thread that runs a function

    def __call__(self, name: str, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run a function; its results in order, of memory of their own, on the CPU.

        A call from another thread waits.  Raises ExecutionError when an op fails, RunnerBusyError
        for a call below one that runs.
        """
        form = self.forms[name]
        if form.is_flat and form.rows(inputs) == 0:
            one = [
                x.new_zeros(1, *x.shape[1:]) if _is_flat(t) else x for x, t in _typed(form, inputs)
            ]
            return [
                y[:0] if _is_flat(t) else y
                for y, t in zip(self(name, one), form.returns, strict=True)
            ]
        with self._alone(name):
            parts = [self._call(name, piece, n) for piece, n in _pieces(form, inputs)]
        if len(parts) == 1:
            return parts[0]
        return [
            torch.cat(found) if _is_flat(type) else found[0]
            for type, found in zip(form.returns, zip(*parts, strict=True), strict=True)
        ]

    def measure(self, name: str, inputs: Sequence[Tensor]) -> list[TraceEvent]:
        """A call, measured: one event for each instruction."""
        events: list[TraceEvent] = []
        self.executor.trace = events
        try:
            self(name, inputs)
        finally:
            self.executor.trace = None
        return events

    @contextmanager
    def _alone(self, name: str) -> Generator[None]:
        if self._caller == get_ident():
            raise RunnerBusyError(
                f"@{name} is called below a call that runs on the same engine: a compiled function "
                "cannot call itself. Compile it a second time"
            )
        with self._lock:
            self._caller = get_ident()
            try:
                yield
            finally:
                self._caller = None

    def _call(self, name: str, inputs: Sequence[Tensor], tokens: int) -> list[Tensor]:
        self._step.begin()
        self._step.add(0, tokens, np.arange(self._step.table().shape[1], dtype=np.int32))
        self._step.want(0)
        return self.executor.call_tensors(name, inputs, self._step)


def _pieces(form: FunctionForm, inputs: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], int]]:
    """The inputs of each call, and its tokens."""
    if not form.is_flat:
        yield list(inputs), form.most
        return
    rows = form.rows(inputs)
    for start in range(0, rows, form.most):
        stop = min(rows, start + form.most)
        yield [x[start:stop] if _is_flat(t) else x for x, t in _typed(form, inputs)], stop - start


def _typed(form: FunctionForm, inputs: Sequence[Tensor]) -> Iterator[tuple[Tensor, Type]]:
    return zip(inputs, form.args, strict=True)


def _is_flat(type: Type) -> bool:
    """Whether the first axis is T."""
    return isinstance(type, TensorType) and bool(type.dims) and "T" in type.dims[0].names


__all__ = ["FunctionForm", "FunctionRunner", "function_plan"]
