"""`FunctionRunner`: the functions of a module that take and give plain tensors, by name.

They have one token axis T and share an engine and an arena: only one runs at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import Lock

import torch
from torch import Tensor

from ktgraph.ir.graph import Module
from ktgraph.pass_api import CompileOptions
from ktgraph.runtime.arena import PlanError
from ktgraph.runtime.batch import Batch
from ktgraph.runtime.cache import CacheShape
from ktgraph.runtime.executor import CallSizes, Executor
from ktgraph.runtime.memory import check_memory, memory_need
from ktgraph.runtime.packed import LoadedWeights
from ktgraph.runtime.plan import Plan, argument_slots
from ktgraph.runtime.runner import available_memory

_NO_CACHE = CacheShape(page_size=1, pages=1, context=1)


class FunctionRunner:
    """Runs a lowered module on the CPU; weights are bound when they are there."""

    def __init__(self, plan: Plan, weights: LoadedWeights, threads: int) -> None:
        self.plan = plan
        self.executor = Executor(plan, weights.with_views(plan.views), [], _NO_CACHE, threads)
        self._ports = {p.name: _Ports(self.executor, p.name) for p in plan.phases}
        self._lock = Lock()

    @staticmethod
    def check(module: Module, options: CompileOptions, threads: int) -> Plan:
        """The plan of a lowered module; raises MemoryBudgetError before anything is loaded."""
        plan = Plan.build(module)
        if plan.uses_gpu:
            raise PlanError(f"@{module.name} is placed on {plan.home}: functions run on the cpu")
        check_memory(memory_need(plan, _NO_CACHE, threads), available_memory(plan))
        return plan

    def __call__(self, name: str, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run a function on tensors [n, …] of the CPU; each result is [n, …], memory of its own.

        More rows than the plan was made for are run in several calls.
        """
        ports = self._ports[name]
        rows = tensors[0].shape[0]
        with self._lock:
            parts = [ports.run([t[at] for t in tensors]) for at in _chunks(rows, ports.most)]
        if len(parts) == 1:
            return parts[0]
        return [torch.cat([p[n] for p in parts]) for n in range(len(parts[0]))]


def _chunks(rows: int, most: int) -> Iterator[slice]:
    for start in range(0, max(rows, 1), most):
        yield slice(start, min(start + most, rows))


class _Ports:
    """Where a function's tensors go in and its results come out."""

    def __init__(self, executor: Executor, name: str) -> None:
        phase = executor.plan.phase(name)
        self.executor = executor
        self.name = name
        self.most = phase.arena.sizes.tokens
        tensors, states, batches = argument_slots(phase)
        if states or batches:
            raise PlanError(f"@{name} takes a cache or a batch: it is no function of plain tensors")
        self._given = [executor.window(name, s, self.most, 1) for s in tensors]
        self._results = [executor.window(name, s, self.most, 1) for s in phase.flat.returns]

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        count = tensors[0].shape[0]
        for window, tensor in zip(self._given, tensors, strict=True):
            window[:count].copy_(tensor)
        if count:
            self.executor.run(self.name, CallSizes(count, 1, None, _no_batch))
        return [window[:count].clone() for window in self._results]


def _no_batch() -> Batch:
    raise PlanError("a function of plain tensors has no batch")


__all__ = ["FunctionRunner"]
