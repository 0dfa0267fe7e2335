"""`FunctionRunner`: the functions of a module that take and give plain tensors, by name.

They have one token axis T and share an engine and an arena: only one runs at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from ktgraph.ir.graph import Module
from ktgraph.pass_api import CompileOptions
from ktgraph.runtime.arena import PlanError
from ktgraph.runtime.cache import CacheShape
from ktgraph.runtime.executor import Executor
from ktgraph.runtime.memory import check_memory, memory_need
from ktgraph.runtime.packed import LoadedWeights
from ktgraph.runtime.plan import Plan, argument_slots
from ktgraph.runtime.runner import available_memory
from ktgraph.runtime.steps import StepArrays

_NO_CACHE = CacheShape(page_size=1, pages=1, context=1)


class FunctionRunner:
    """Runs a lowered module on the CPU."""

    def __init__(self, plan: Plan, weights: LoadedWeights, threads: int) -> None:
        self.plan = plan
        self.executor = Executor(plan, weights.with_views(plan.views), [], _NO_CACHE, threads)
        self._most = {p.name: p.arena.sizes.tokens for p in plan.phases}
        self._step = StepArrays(max(self._most.values()), 1, 1, 1)
        self._lock = Lock()

    @staticmethod
    def check(module: Module, options: CompileOptions, threads: int) -> Plan:
        """The plan of a lowered module.

        Raises PlanError for one that takes a cache or runs elsewhere, and MemoryBudgetError before
        anything is loaded.
        """
        plan = Plan.build(module)
        if plan.uses_gpu:
            raise PlanError(f"@{module.name} is placed on {plan.home}: functions run on the cpu")
        for phase in plan.phases:
            _, states, batches = argument_slots(phase)
            if states or batches:
                raise PlanError(f"@{phase.name} takes a cache or a batch, not plain tensors alone")
        check_memory(memory_need(plan, _NO_CACHE, threads), available_memory(plan))
        return plan

    def __call__(self, name: str, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run a function on tensors [n, …] of the CPU; each result is [n, …], memory of its own.

        More rows than the plan was made for are run in several calls.
        """
        rows = tensors[0].shape[0]
        if rows == 0:
            one = self(name, [t.new_zeros(1, *t.shape[1:]) for t in tensors])
            return [t[:0] for t in one]
        with self._lock:
            parts = [self._run(name, [t[at] for t in tensors]) for at in self._chunks(name, rows)]
        if len(parts) == 1:
            return parts[0]
        return [torch.cat([p[n] for p in parts]) for n in range(len(parts[0]))]

    def _chunks(self, name: str, rows: int) -> Iterator[slice]:
        for start in range(0, rows, self._most[name]):
            yield slice(start, min(start + self._most[name], rows))

    def _run(self, name: str, tensors: Sequence[Tensor]) -> list[Tensor]:
        self._step.begin()
        self._step.add(0, tensors[0].shape[0], np.zeros(1, np.int32))
        self._step.want(0)
        return self.executor.call_tensors(name, tensors, self._step)


__all__ = ["FunctionRunner"]
