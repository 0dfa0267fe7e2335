"""Native instructions bound to an executor's memory: its arena on the host, weights and caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ktgraph.ir.types import StateType
from ktgraph.runtime.cache import CacheShape, InPlaceState, window_of
from ktgraph.runtime.errors import ExecutionError
from ktgraph.runtime.kernels_cpu import engine_kernel
from ktgraph.runtime.native import Addresses, native_operand, native_state
from ktgraph.runtime.operands import Instruction, StateUse
from ktgraph.runtime.packed import LoadedWeights
from ktgraph.runtime.plan import PhasePlan, argument_slots, op_line


@dataclass(frozen=True)
class NativeBinding:
    """What the engine's plans of an executor work on; `engine` is None without native code."""

    engine: Any
    arena: torch.Tensor
    weights: LoadedWeights
    states: Sequence[InPlaceState]
    shape: CacheShape

    def plan(self, phase: PhasePlan, items: Sequence[Instruction]) -> Any:
        """The engine's plan of some instructions; raises ExecutionError for one that it refuses."""
        from ktgraph.cpu_kernels import load_native

        sizes, at = phase.arena.sizes, self._addresses(phase)
        plan = load_native().Plan(self.engine, sizes.tokens, sizes.rows)
        for item in items:
            operands = [native_operand(o, at) for o in item.operands]
            try:
                plan.add(engine_kernel(item.kernel), operands, dict(item.attrs))
            except ValueError as error:
                raise ExecutionError(f"{error}\n  in: {op_line(phase, item)}") from error
        return plan

    def state(self, phase: PhasePlan, use: StateUse) -> InPlaceState:
        """The cache that a state argument of the phase stands for."""
        return self.states[argument_slots(phase)[1].index(use.argument)]

    def _addresses(self, phase: PhasePlan) -> Addresses:
        base = self.arena.data_ptr()
        return Addresses(
            lambda root: base + phase.arena.offset(root),
            self.weights.native,
            lambda use: self._native_state(phase, use),
        )

    def _native_state(self, phase: PhasePlan, use: StateUse) -> Any:
        type = use.slot.type
        assert isinstance(type, StateType)
        parts = self.state(phase, use).parts
        pages, size = self.shape.pages_of(window_of(type, {})), self.shape.page_size
        return native_state(type, pages, size, parts[0].shape[0], [p.data_ptr() for p in parts])


def start_engine(threads: int) -> Any:
    """The CPU engine; its threads live as long as it does."""
    from ktgraph.cpu_kernels import load_native

    return load_native().Engine(threads)


__all__ = ["NativeBinding", "start_engine"]
