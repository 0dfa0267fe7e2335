"""Level 2 of validation: real kernels against the references of their ops, op by op.

The lowered module runs on its miniature.  When all of it runs on this CPU, the plan is executed in
lockstep: before each op its operands are copied out of the arena, after it the results are compared
with what the op's reference makes of those copies.  A plan for a GPU runs so too, its kernels on
the GPU or in Triton's interpreter (TRITON_INTERPRET=1); what the CPU computes beside them is not
looked at.  Otherwise the kernels that have a launcher in Python are run beside the interpreter.
Values are in the module's own dtypes, weights as encoded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any, cast

import torch

from ktgraph.drive import drive, is_language_model, make_trace, one_thread, vocabulary
from ktgraph.ir.graph import Module, Op
from ktgraph.ir.interp import evaluate_attr
from ktgraph.ir.types import BatchType
from ktgraph.miniature import shrink
from ktgraph.ops.registry import KernelDef, kernels_for, op_def
from ktgraph.pass_api import CompileOptions, PassContext, pass_class
from ktgraph.runtime.cache import CacheShape, allocate_states, window_of
from ktgraph.runtime.executor import CallSizes, Executor
from ktgraph.runtime.flat import FlatOp, FlatWeight, Slot
from ktgraph.runtime.gpu.device import KernelCall
from ktgraph.runtime.gpu.executor import GpuExecutor
from ktgraph.runtime.kernels_cpu import native_kernels
from ktgraph.runtime.operands import Instruction, TensorRef
from ktgraph.runtime.packed import load_weights
from ktgraph.runtime.plan import PhasePlan, Plan, argument_slots, is_on_gpu
from ktgraph.runtime.runner import Runner
from ktgraph.runtime.state import State
from ktgraph.triton_kernels.packed import PackedWeight
from ktgraph.validate import nmse
from ktgraph.weights.evaluate import WeightEvaluator
from ktgraph.weights.sources import RandomSource

_F32_BOUND = 1e-10  # NMSE of a GPU kernel on float32 operands
_OPTIONS = CompileOptions(max_tokens=32, max_batch=4, context=64, page_size=4)


@dataclass(frozen=True)
class KernelError:
    """A kernel's largest error against its op's reference, over the ops that use it."""

    kernel: str
    op: str  # the op line
    error: float  # NMSE
    bound: float

    @property
    def is_wrong(self) -> bool:
        return not self.error <= self.bound

    def is_worse_than(self, other: KernelError) -> bool:
        """By what each may have: one kernel has several bounds, by the dtypes that it meets."""
        if self.is_wrong != other.is_wrong:
            return self.is_wrong
        return self.error * other.bound > other.error * self.bound


def check_kernels(module: Module, seed: int = 0) -> list[KernelError]:
    """Largest error of every chosen kernel that can run here.

    Raises MiniatureError when the module cannot be run at small sizes.
    """
    small = shrink(module).modules[0]
    with one_thread():
        if _runs_here(small):
            return _lockstep(small, seed)
        if _is_hybrid(small) and why_no_gpu_kernels() == "":
            return _on_gpu(small, seed)
        return _beside_interpreter(small, seed)


def why_no_gpu_kernels() -> str:
    """Why kernels of a GPU cannot be checked here; an empty string when they can."""
    if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        return ""
    return "no CUDA device is here (TRITON_INTERPRET=1 runs them in Triton's interpreter)"


def gpu_kernels(module: Module) -> set[str]:
    """Kernels of a GPU that ops of the module name."""
    ops = [(op.via, kernels_for(op.name, "cuda")) for op in module.walk() if op.via]
    return {via for via, known in ops if any(k.name == via and k.into for k in known)}


def _is_hybrid(module: Module) -> bool:
    lowered = all(op.via for op in module.walk() if op.body is None)
    return lowered and is_language_model(module) and is_on_gpu(module) and bool(native_kernels())


def _runs_here(module: Module) -> bool:
    """Whether every op has a kernel, on this CPU, and the native part is built."""
    lowered = all(op.via for op in module.walk() if op.body is None)
    return (
        lowered and is_language_model(module) and not is_on_gpu(module) and bool(native_kernels())
    )


@dataclass
class _Worst:
    """The largest error of each kernel."""

    found: dict[str, KernelError]

    def add(self, op: Op, pairs: Sequence[tuple[Any, Any]]) -> None:
        kernel = next((k for k in kernels_for(op.name) if k.name == op.via), None)
        if kernel is None:
            return
        error = max((_error(got, want) for got, want in pairs), default=0.0)
        before = self.found.get(kernel.name)
        if before is None or not error <= before.error:
            line = str(op).split("\n")[0]
            self.found[kernel.name] = KernelError(kernel.name, line, error, kernel.nmse)


def _error(got: Any, want: Any) -> float:
    if isinstance(want, State):
        pairs = zip(got.parts, want.parts, strict=True)
        return max(_rows_error(g, w) for g, w in pairs)
    return nmse(got, want) if isinstance(want, torch.Tensor) else 0.0


def _rows_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Rows that nobody wrote may hold NaN, in the same places."""
    unwritten = got.isnan() & want.isnan()
    return nmse(got.masked_fill(unwritten, 0.0), want.masked_fill(unwritten, 0.0))


# -- on a GPU, or its interpreter ------------------------------------------------------------------
def _on_gpu(small: Module, seed: int) -> list[KernelError]:
    """Run the plan over the whole trace; every kernel of the GPU against its reference."""
    from ktgraph.runtime.gpu.checking import checking_device

    worst: dict[str, KernelError] = {}

    def observe(call: KernelCall, pairs: Sequence[tuple[Any, Any]]) -> None:
        kernel = call.kernel
        tensors = [o for o in call.operands if isinstance(o, torch.Tensor)]
        is_wide = all(t.dtype != torch.bfloat16 for t in tensors) and not any(
            isinstance(o, PackedWeight) for o in call.operands
        )
        error = max((_rows_error(got, want) for got, want in pairs), default=0.0)
        bound = min(kernel.nmse, _F32_BOUND) if is_wide else kernel.nmse
        found = KernelError(kernel.name, call.definition.name, error, bound)
        if kernel.name not in worst or found.is_worse_than(worst[kernel.name]):
            worst[kernel.name] = found

    device = checking_device(observe)
    assert device is not None
    _without_refused_kernels(small)
    pass_class("plan-memory")().run(small, PassContext(options=_OPTIONS))
    plan = Plan.build(small)
    weights = WeightEvaluator(small, RandomSource(small, seed))
    loaded = load_weights(plan.loaded(), weights, gpu=device.torch_device).with_views(plan.views)
    shape = CacheShape.of(plan.states, small.dims, _OPTIONS, _OPTIONS.context)
    places = {"cpu": torch.device("cpu"), plan.home: device.torch_device}
    states = allocate_states(plan.states, small.dims, shape, places, plan.home)
    executor = GpuExecutor(plan, device, loaded, states, shape, 1, capture=False)
    try:
        _follow(Runner(executor), small, seed)
    finally:
        executor.close()
    return list(worst.values())


def _without_refused_kernels(small: Module) -> None:
    """Ops whose kernel does not take the miniature's sizes run on their reference."""
    for op in (o for o in small.walk() if o.via):
        launched = [k for k in kernels_for(op.name, "cuda") if k.name == op.via and k.into]
        if any(kernel.supports(op, small) is not True for kernel in launched):
            op.via = "torch.reference"


def _follow(runner: Runner, small: Module, seed: int) -> None:
    """Every call of the trace."""
    names: dict[int, int] = {}
    for step in make_trace(max(vocabulary(small), 2), seed):
        names |= {q: runner.open() for q in step if q not in names}
        runner.forward([(names[q], tokens) for q, tokens in step.items()], "all")


# -- beside the interpreter -----------------------------------------------------------------------
def _beside_interpreter(small: Module, seed: int) -> list[KernelError]:
    worst = _Worst({})

    def observe(
        op: Op, operands: Sequence[Any], attrs: Mapping[str, Any], results: Sequence[Any]
    ) -> None:
        kernel = _launchable(op)
        if kernel is None or kernel.launch is None:
            return
        got = _as_tuple(kernel.launch(*operands, **attrs))
        worst.add(op, list(zip(got, results, strict=True)))

    weights = WeightEvaluator(small, RandomSource(small, seed))
    drive(small, weights, make_trace(max(vocabulary(small), 2), seed), None, observe)
    return list(worst.found.values())


def _launchable(op: Op) -> KernelDef | None:
    """The kernel of an op that can run here: on this CPU, or on a CUDA device that is there."""
    for kernel in kernels_for(op.name):
        here = kernel.device == "cpu" or torch.cuda.is_available()
        if kernel.name == op.via and kernel.launch is not None and here:
            return kernel
    return None


# -- in lockstep with the plan --------------------------------------------------------------------
def _lockstep(small: Module, seed: int) -> list[KernelError]:
    """Run the native plan over the whole trace, every op against its reference."""
    pass_class("plan-memory")().run(small, PassContext(options=_OPTIONS))
    plan = Plan.build(small)
    plan = Plan(small, tuple(_ByOp.of(p) for p in plan.phases))
    weights = WeightEvaluator(small, RandomSource(small, seed))
    shape = CacheShape.of(plan.states, small.dims, _OPTIONS, _OPTIONS.context)
    states = allocate_states(plan.states, small.dims, shape)
    for part in (p for state in states for p in state.parts):
        part.fill_(float("nan"))  # rows that nobody wrote must not count, whatever memory held
    worst = _Worst({})
    executor = _Lockstep(plan, load_weights(plan.uses(), weights), states, shape, 1)
    executor.watch(weights, worst)
    _follow(Runner(executor), small, seed)
    return list(worst.found.values())


class _ByOp(PhasePlan):
    """A phase whose segments are single ops, so that each can be looked at."""

    @staticmethod
    def of(phase: PhasePlan) -> _ByOp:
        return _ByOp(**{f.name: getattr(phase, f.name) for f in fields(PhasePlan)})

    @property
    def segments(self) -> list[tuple[Instruction, ...]]:
        return [tuple(items) for _, items in groupby(self.instructions, key=lambda i: i.step)]


class _Lockstep(Executor):
    """Runs op by op, and compares."""

    def watch(self, weights: WeightEvaluator, worst: _Worst) -> None:
        """Where references take weights from, and where errors go."""
        self.values = weights
        self.worst = worst

    def run(self, phase: str, call: CallSizes) -> None:
        bound = self._phases[phase]
        for part, segment in zip(bound.parts, bound.segments, strict=True):
            step = bound.phase.step(part[0])
            before = [self._read(bound.phase, o, call, copy=True) for o in step.operands]
            segment(call)
            got = [self._read(bound.phase, r, call, copy=False) for r in step.results]
            want = _reference(step, before, call)
            self.worst.add(step.op, list(zip(got, want, strict=True)))

    def _read(
        self, phase: PhasePlan, slot: Slot | FlatWeight | None, call: CallSizes, *, copy: bool
    ) -> Any:
        """A slot's present value."""
        if slot is None:
            return None
        if isinstance(slot, FlatWeight):
            return self.values.tensor(slot.ref, slot.index)
        if slot.name in phase.layouts.states:
            argument = phase.layouts.states[slot.name]
            parts = self.states[argument_slots(phase)[1].index(argument)].parts
            return State(tuple(p.clone() for p in parts) if copy else parts)
        if slot.name not in phase.layouts.views:
            assert isinstance(slot.type, BatchType)
            return call.batch(window_of(slot.type, {}))
        view = phase.layouts.view(slot)
        dtype = getattr(slot.type, "dtype", "f32")
        found = self.tensor(phase, TensorRef(dtype, view), {"T": call.tokens, "O": call.rows})
        return found.clone() if copy else found


def _reference(step: FlatOp, operands: Sequence[Any], call: CallSizes) -> tuple[Any, ...]:
    definition = op_def(step.op.name)
    bindings = {**step.bindings, "T": call.tokens, "O": call.rows}
    full = definition.signature.full_attrs(step.op.attrs)
    attrs = {k: evaluate_attr(v, bindings) for k, v in full.items()}
    return _as_tuple(definition.reference(*operands, **attrs))


def _as_tuple(found: Any) -> tuple[Any, ...]:
    return cast("tuple[Any, ...]", found if isinstance(found, tuple) else (found,))


__all__ = ["KernelError", "check_kernels", "gpu_kernels", "why_no_gpu_kernels"]
