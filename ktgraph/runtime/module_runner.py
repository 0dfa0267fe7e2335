"""`ModuleRunner`: runs the plan of a plain module, which takes and returns tensors.

A flat module (axis T) takes any number of tokens, more than one call holds in several calls; any
other is planned for the sizes of one call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from ktgraph.ir.graph import Module
from ktgraph.ir.types import TensorType, Type
from ktgraph.ops.tensor import torch_dtype
from ktgraph.pass_api import CompileOptions
from ktgraph.runtime.cache import CacheShape
from ktgraph.runtime.executor import Executor, TraceEvent
from ktgraph.runtime.gpu.executor import GpuExecutor
from ktgraph.runtime.memory import check_memory, memory_need
from ktgraph.runtime.packed import LoadedWeights, load_weights
from ktgraph.runtime.plan import Plan, argument_slots
from ktgraph.runtime.runner import (
    RunnerBusyError,
    available_memory,
    gpu_device,
    torch_device,
    worker_threads,
)
from ktgraph.runtime.steps import StepArrays
from ktgraph.weights.evaluate import WeightEvaluator
from ktgraph.weights.sources import WeightSource

_PAGE = 32


class WeightStore:
    """Loaded weights that the plans of one module share: each form of a weight is made once."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, str], Tensor] = {}

    def load(
        self, plan: Plan, source: WeightSource, threads: int, gpu: torch.device
    ) -> LoadedWeights:
        """What the plan reads; what no earlier plan read is loaded now."""
        uses = plan.loaded()
        keys = {u.key: (u.key, str(u.type)) for u in uses}
        new = [u for u in uses if keys[u.key] not in self._held]
        evaluator = WeightEvaluator(plan.module, source, cache_nbytes=0)
        made = load_weights(new, evaluator, threads, gpu=gpu)
        self._held |= {keys[key]: tensor for key, tensor in made.tensors.items()}
        held = LoadedWeights({key: self._held[pair] for key, pair in keys.items()})
        return held.with_views(plan.views)


class ModuleRunner:
    """A lowered plain module bound to its weights, on this machine's CPU or a GPU and the CPU."""

    def __init__(self, plan: Plan, executor: Executor | GpuExecutor) -> None:
        self.plan = plan
        self.module = plan.module
        self.executor = executor
        phase = plan.phases[0]
        self.name = phase.name
        self.max_tokens = phase.arena.sizes.tokens
        self.args = [s.type for s in argument_slots(phase)[0]]
        self.returns = [s.type for s in phase.flat.returns]
        self.is_flat = any(_is_flat(t) for t in self.args)
        width = -(-self.max_tokens // _PAGE)
        self._step = StepArrays(self.max_tokens, 1, 1, width)
        self._lock = Lock()

    @staticmethod
    def load(
        module: Module,
        source: WeightSource,
        options: CompileOptions,
        store: WeightStore,
        *,
        threads: int | None = None,
    ) -> ModuleRunner:
        """Plan a lowered module, check the memory it needs, load and pack its weights.

        Raises PlanError, MemoryBudgetError (before anything is loaded), WeightError.
        """
        plan = Plan.build(module)
        count = worker_threads(options, threads)
        device = gpu_device(plan)
        pages = -(-plan.phases[0].arena.sizes.tokens // _PAGE)
        shape = CacheShape(_PAGE, pages, pages * _PAGE)
        check_memory(memory_need(plan, shape, count), available_memory(plan))
        weights = store.load(plan, source, count, torch_device(device))
        if device is None:
            return ModuleRunner(plan, Executor(plan, weights, [], shape, count))
        return ModuleRunner(plan, GpuExecutor(plan, device, weights, [], shape, count))

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The results of the graph's function, in order; T is what the inputs' first axes say.

        Raises ExecutionError when an op fails, RunnerBusyError on re-entry.
        """
        if not self._lock.acquire(blocking=False):
            raise RunnerBusyError(
                "this module runs already, in another thread or below this call: it serves one "
                "caller at a time. Wait for it, or compile it a second time"
            )
        try:
            parts = [self._call(piece, tokens) for piece, tokens in self._pieces(inputs)]
        finally:
            self._lock.release()
        if len(parts) == 1:
            return parts[0]
        return [
            torch.cat(found) if _is_flat(type) else found[0]
            for type, found in zip(self.returns, zip(*parts, strict=True), strict=True)
        ]

    def measure(self, inputs: Sequence[Tensor]) -> list[TraceEvent]:
        """`run`, measured: one event for each instruction."""
        events: list[TraceEvent] = []
        self.executor.trace = events
        try:
            self.run(inputs)
        finally:
            self.executor.trace = None
        return events

    def _pieces(self, inputs: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], int]]:
        """The inputs of each call, and its tokens."""
        typed = [
            x.to(torch_dtype(t.dtype)) if isinstance(t, TensorType) else x
            for x, t in zip(inputs, self.args, strict=True)
        ]
        if not self.is_flat:
            yield typed, self.max_tokens
            return
        total = next(len(x) for x, t in zip(typed, self.args, strict=True) if _is_flat(t))
        for start in range(0, total, self.max_tokens):
            stop = min(total, start + self.max_tokens)
            piece = [
                x[start:stop] if _is_flat(t) else x for x, t in zip(typed, self.args, strict=True)
            ]
            yield piece, stop - start

    def _call(self, inputs: Sequence[Tensor], tokens: int) -> list[Tensor]:
        self._step.begin()
        self._step.add(0, tokens, np.arange(self._step.table().shape[1], dtype=np.int32))
        self._step.want(0)
        return self.executor.call_tensors(self.name, inputs, self._step)


def _is_flat(type: Type) -> bool:
    """Whether the first axis is T."""
    return isinstance(type, TensorType) and "T" in _first_names(type)


def _first_names(type: TensorType) -> frozenset[str]:
    return type.dims[0].names if type.dims else frozenset()


__all__ = ["ModuleRunner", "WeightStore"]
