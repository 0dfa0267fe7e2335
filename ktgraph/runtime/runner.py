"""`Runner`: sequences over a paged cache; `forward` gives logits, steps may give tokens.

`InterpreterRunner` has `forward` too and runs the interpreter: slow, and what the IR means.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ktgraph.errors import UnsupportedInputError, is_whole
from ktgraph.ir.dims import Dim
from ktgraph.ir.graph import Module
from ktgraph.ir.interp import Interpreter, WeightProvider
from ktgraph.ir.types import BatchType, StateType, TensorType
from ktgraph.pass_api import CompileOptions
from ktgraph.runtime.arena import PhaseSizes, PlanError, max_q, phase_sizes
from ktgraph.runtime.cache import (
    CacheShape,
    InPlaceState,
    allocate_states,
    window_of,
)
from ktgraph.runtime.executor import Executor, TraceEvent, chrome_trace
from ktgraph.runtime.gpu.adaptation import Adaptation
from ktgraph.runtime.gpu.cuda import CudaDevice
from ktgraph.runtime.gpu.device import GpuDevice, Model
from ktgraph.runtime.gpu.executor import GpuExecutor
from ktgraph.runtime.gpu.simulated import SimulatedDevice
from ktgraph.runtime.memory import check_memory, choose_cache, memory_need
from ktgraph.runtime.packed import LoadedWeights, load_weights
from ktgraph.runtime.paged_runner import PagedRunner, Request, Rows, RunnerBusyError
from ktgraph.runtime.plan import Plan
from ktgraph.runtime.router_counts import RouterCounts
from ktgraph.runtime.steps import CallLimits
from ktgraph.runtime.token_runner import TokenRunner
from ktgraph.target.probe import probe_memory
from ktgraph.weights.evaluate import WeightEvaluator
from ktgraph.weights.sources import WeightSource


class Runner(TokenRunner):
    """Runs a plan on this machine: on its CPU, or on a GPU and the CPU."""

    def __init__(self, executor: Executor | GpuExecutor) -> None:
        plan = executor.plan
        phases = {p.name: _limits(p.arena.sizes, p.max_q) for p in plan.phases}
        super().__init__(plan.module, executor, phases)
        self._adaptation: Adaptation | None = None

    @staticmethod
    def load(
        module: Module,
        source: WeightSource,
        options: CompileOptions,
        *,
        threads: int | None = None,
    ) -> Runner:
        """Plan a lowered module, check the memory it needs, load and pack its weights.

        threads: None: `options.threads`, or what suits this machine.
        Raises PlanError, MemoryBudgetError (before anything is loaded), WeightError.
        """
        plan = Plan.build(module)
        count = worker_threads(options, threads)
        device = gpu_device(plan)
        shape = fit_cache(plan, options, count)
        evaluator = WeightEvaluator(module, source, cache_nbytes=0)
        weights = load_weights(plan.loaded(), evaluator, count, gpu=torch_device(device))
        return Runner.bind(plan, weights, shape, count, device)

    @staticmethod
    def bind(
        plan: Plan,
        weights: LoadedWeights,
        shape: CacheShape,
        threads: int,
        device: GpuDevice | None = None,
    ) -> Runner:
        """A runner over weights that are loaded already; `device` for a plan that uses a GPU."""
        places = {"cpu": torch.device("cpu")}
        if device is not None:
            places[plan.home] = device.torch_device
        weights = weights.with_views(plan.views)
        states = allocate_states(plan.states, plan.module.dims, shape, places, plan.home)
        if device is None:
            return Runner(Executor(plan, weights, states, shape, threads))
        return Runner(GpuExecutor(plan, device, weights, states, shape, threads))

    @property
    def plan(self) -> Plan:
        return self.executor.plan

    def timeline(self, requests: Sequence[Request], logits: Rows = "last") -> dict[str, Any]:
        """`forward`, measured: every instruction's seconds in the Chrome trace format.

        Like `forward` it appends the tokens.
        """
        return chrome_trace(self.measure(requests, logits))

    def measure(self, requests: Sequence[Request], logits: Rows = "last") -> list[TraceEvent]:
        """`forward`, measured: one event for each instruction.

        A hand-over's share of the CPU is one event.  A decode step is measured instruction by
        instruction, not as the graph that a GPU replays.
        """
        events: list[TraceEvent] = []
        self.executor.trace = events
        try:
            self.forward(requests, logits)
        finally:
            self.executor.trace = None
        return events

    @property
    def residency(self) -> dict[int, list[int]]:
        """Experts with slots on the GPU, by layer; empty where no layer has slots."""
        executor = self.executor
        return executor.residency.resident() if isinstance(executor, GpuExecutor) else {}

    def set_residency(self, layer: int, experts: Sequence[int]) -> None:
        """Give a layer's slots to these experts, between two calls; see `Residency`."""
        executor = self.executor
        if not isinstance(executor, GpuExecutor):
            raise UnsupportedInputError(
                "this model runs on the CPU alone: hot experts are those with slots on a GPU"
            )
        with self._alone():
            executor.set_residency(layer, experts)

    def settle_residency(self) -> None:
        """Wait until every change of hot experts' slots is done."""
        if isinstance(self.executor, GpuExecutor):
            with self._alone():
                self.executor.settle_residency()

    def adapt_residency(self, every: int | None) -> None:
        """Let the hottest experts take over slots after every so many tokens; None: no longer."""
        executor = self.executor
        if every is not None and (not is_whole(every) or every < 1):
            raise UnsupportedInputError(
                f"every={every!r}: expected a whole number above 0, or None"
            )
        if not isinstance(executor, GpuExecutor) or not self.residency:
            raise UnsupportedInputError(
                "no layer has slots for hot experts: placement rules give them (device: hot), or "
                "the option popularity"
            )
        residency = executor.residency
        residency.check_movable(residency.layers if every is not None else ())
        with self._alone():
            if self._adaptation is not None:
                self._adaptation.end()
            self._adaptation = None if every is None else Adaptation(executor, every)

    @contextmanager
    def counting_experts(self) -> Generator[RouterCounts]:
        """Count which experts the calls inside choose."""
        if self._adaptation is not None:
            raise UnsupportedInputError(
                "router choices are counted already, to adapt residency: end that first, with "
                "adapt_residency(None)"
            )
        with self._alone():
            counts = self.executor.count_experts(True)
        assert counts is not None
        try:
            yield counts
        finally:
            self.executor.count_experts(False)

    def set_model(self, model: Model) -> None:
        """Give a simulated GPU the times that its share of measured runs has."""
        executor = self.executor
        if isinstance(executor, GpuExecutor) and isinstance(executor.device, SimulatedDevice):
            executor.device.model = model

    def _call(self, phase: str, ids: list[int]) -> Tensor:
        found = self.executor.call(phase, ids, self._step)
        self._count(self._step.tokens)
        return found

    def _count(self, tokens: int) -> None:
        if self._adaptation is not None:
            self._adaptation.after(tokens)


def _limits(sizes: PhaseSizes, bound: int | None) -> CallLimits:
    most = sizes.tokens if bound is None else min(bound, sizes.tokens)
    return CallLimits(sizes.tokens, sizes.batch, sizes.rows, most)


def gpu_device(plan: Plan) -> GpuDevice | None:
    """The GPU that a plan runs on, real or simulated; None for a plan of the CPU alone.

    Raises PlanError where the plan needs a GPU that is not here.
    """
    if not plan.uses_gpu:
        return None
    kind = plan.module.devices.get(plan.home, {}).get("kind")
    if kind == "simulated":
        return SimulatedDevice()
    if not torch.cuda.is_available():
        raise PlanError(
            f"@{plan.module.name} is placed on {plan.home}, and torch sees no CUDA device here: it "
            'can be priced and drawn (ktgraph dump, explain). Compile with target="cpu" to run on '
            'this machine, or with target=kt.hybrid(gpu="simulated") to try the hybrid path'
        )
    return CudaDevice(int(plan.home.partition(":")[2] or 0))


def torch_device(device: GpuDevice | None) -> torch.device:
    """Where the weights of the GPU's ops lie."""
    return torch.device("cpu") if device is None else device.torch_device


def worker_threads(options: CompileOptions, threads: int | None) -> int:
    """Worker threads: as asked for, else one for each CPU this process may use."""
    from ktgraph.cpu_kernels import NativeMissingError, load_native

    asked = threads or options.threads
    if asked:
        return asked
    try:
        return len(load_native().default_cpus())
    except NativeMissingError:
        return 1


def fit_cache(plan: Plan, options: CompileOptions, threads: int) -> CacheShape:
    """The cache's shape; raises MemoryBudgetError when plan and cache exceed what is available."""
    available = available_memory(plan)
    shape = choose_cache(plan, options, available, threads)
    check_memory(memory_need(plan, shape, threads), available)
    return shape


def available_memory(plan: Plan) -> dict[str, int]:
    """Bytes that may be used on each device; of a GPU its budget, or what is free if less."""
    found = {"cpu": probe_memory().available}
    if plan.uses_gpu:
        device = plan.module.devices.get(plan.home, {})
        budget = device.get("memory")
        found[plan.home] = budget.const() if isinstance(budget, Dim) else found["cpu"]
        if device.get("kind") == "cuda" and torch.cuda.is_available():
            free, _ = torch.cuda.mem_get_info(int(plan.home.partition(":")[2] or 0))
            found[plan.home] = min(found[plan.home], free)
    return found


class InterpreterRunner(PagedRunner):
    """The same interface on the interpreter: any flat module, at any stage of the pipeline.

    `dtype` replaces every float dtype (torch.float64 to validate).
    """

    def __init__(
        self,
        module: Module,
        weights: WeightProvider,
        options: CompileOptions,
        dtype: torch.dtype | None = None,
    ) -> None:
        size = options.page_size
        rows = options.cache_rows or options.max_batch * options.context
        first = next(iter(module.functions.values()))
        types = [a.type for a in first.args if isinstance(a.type, StateType)]
        shape = CacheShape.of(types, module.dims, options, max(1, -(-rows // size)))
        functions = module.functions.values()
        phases = {f.name: _limits(phase_sizes(f, options), max_q(f)) for f in functions}
        super().__init__(module, shape, phases)
        self._interpreter = Interpreter(module, weights, dtype)
        states = [self._interpreter.new_state(t, shape.rows_of(t, module.dims)) for t in types]
        self._states = [InPlaceState(s.parts) for s in states]

    def _call(self, phase: str, ids: list[int]) -> Tensor:
        func = self.module.functions[phase]
        states = iter(self._states)
        inputs = [self._argument(a.type, ids, states) for a in func.args]
        found = self._interpreter.run(phase, inputs)
        return next(r for r in found if isinstance(r, Tensor)).clone()

    def _argument(self, type: object, ids: list[int], states: Any) -> Any:
        if isinstance(type, BatchType):
            return self._step.as_batch(self.page_size, window_of(type, self.module.dims))
        if isinstance(type, StateType):
            return next(states)
        wanted = (
            torch.int64 if isinstance(type, TensorType) and type.dtype == "i64" else torch.int32
        )
        return torch.tensor(ids, dtype=wanted)


__all__ = [
    "InterpreterRunner",
    "PagedRunner",
    "Request",
    "Rows",
    "Runner",
    "RunnerBusyError",
    "available_memory",
    "fit_cache",
    "gpu_device",
    "worker_threads",
]
