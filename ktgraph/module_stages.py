"""Stages of a plain module: traced from example inputs, lowered, and compiled to a callable."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from ktgraph.analysis import CostAnalysis, MemoryAnalysis, cost_analysis, memory_analysis
from ktgraph.errors import UnsupportedInputError, path_of
from ktgraph.explain import explain as explain_op
from ktgraph.frontends.module import CallForm, ModuleTrace, OpaqueCallWarning, trace_module
from ktgraph.ir.dims import Dim
from ktgraph.ir.example import set_example
from ktgraph.ir.graph import Module
from ktgraph.ir.types import TensorType, Type
from ktgraph.model_input import ModelCard, ModelInput
from ktgraph.ops.tensor import dtype_name
from ktgraph.pass_report import PassReport
from ktgraph.runtime.executor import TraceEvent
from ktgraph.runtime.functions import FunctionForm, FunctionRunner, function_plan
from ktgraph.runtime.runner import gpu_device, torch_device
from ktgraph.runtime.weight_store import WeightStore
from ktgraph.stages import FallbackWarning, Lowered, Traced, fallback_text
from ktgraph.target import Target, check_threads, resolve_target
from ktgraph.weights.sources import ModelSource, WeightSource

_MAIN = "main"  # the function of a plain module's graph
_KEPT = 8  # plans of other sizes that stay compiled
_OF_THE_CACHE = ("context", "cache_rows", "page_size", "max_batch", "defer")  # options
ExampleInputs = Tensor | Sequence[Any] | Mapping[str, Any]


def trace_plain(model: object, example_inputs: ExampleInputs, dtype: str) -> TracedModule:
    """Trace a module from the arguments of one call."""
    if not isinstance(model, nn.Module):
        raise UnsupportedInputError(
            f"example_inputs go with a torch module, this is a {type(model).__name__}"
        )
    if dtype != "auto":
        raise UnsupportedInputError(
            f'dtype={dtype!r}: a plain module computes in its own dtypes (dtype="auto"); convert '
            "it first, as in module.to(torch.bfloat16)"
        )
    args, kwargs = _call_of(example_inputs)
    return TracedModule(trace_module(model, args, kwargs), model)


def _call_of(given: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(given, Tensor):
        return (given,), {}
    if isinstance(given, Mapping):
        return (), {str(k): v for k, v in given.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(given, (tuple, list)):
        return tuple(given), {}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    raise UnsupportedInputError(
        f"example_inputs of type {type(given).__name__}: expected a tensor, a tuple of the "
        "module's arguments, or a dict of its keyword arguments"
    )


class TracedModule(Traced):
    """A plain module's graph as its own code computes it; `lifted` and `opaque` say how."""

    def __init__(self, found: ModuleTrace, model: nn.Module) -> None:
        card = ModelCard(type(model).__name__, None, (), None, None)
        super().__init__(found.module, ModelInput(cast("Any", model), card), "auto")
        self.found = found
        self.model = model

    @property
    def lifted(self) -> dict[str, str]:
        """MoE layers that became moe.route and moe.experts, by path."""
        return {path: str(form) for path, form in self.found.lifted.items()}

    @property
    def opaque(self) -> dict[str, str]:
        """Modules that stay with torch, and why, by path."""
        return {path: o.why for path, o in self.found.opaque.items()}

    def lower(
        self,
        target: str | Path | Target = "auto",
        pipeline: str = "default",
        *,
        validate: int | None = None,
        dump: str | Path | None = None,
        **options: Any,
    ) -> LoweredModule:
        """Run the passes, as `Traced.lower` does; options of the cache are refused."""
        _check_no_cache_options(options)
        machine = resolve_target(target)
        made = super().lower(machine, pipeline, validate=validate, dump=dump, **options)
        return LoweredModule(self, made, options)

    def source(self) -> WeightSource:
        return ModelSource(self.model, self.found.constants)

    def at(self, sizes: Mapping[str, int]) -> TracedModule:
        """The same trace, to be compiled for another call's sizes where tokens are mixed."""
        other = TracedModule(self.found, self.model)
        other.ir = self.ir.clone()
        set_example(other.ir.functions[_MAIN], sizes)
        return other


def _check_no_cache_options(options: Mapping[str, Any]) -> None:
    """Raises UnsupportedInputError: a plain module keeps nothing from one call to the next."""
    given = [n for n in _OF_THE_CACHE if options.get(n) is not None]
    if given:
        raise UnsupportedInputError(
            f"{given[0]}={options[given[0]]!r}: a module compiled with example_inputs has no cache "
            "and no decode step, so this would do nothing: leave it out (max_tokens bounds what "
            "one call takes)"
        )


class LoweredModule(Lowered):
    """A plain module's graph after every pass."""

    def __init__(self, traced: TracedModule, made: Lowered, options: Mapping[str, Any]) -> None:
        super().__init__(made.module, made.passes, made.context, made.card, made.pipeline)
        self.traced = traced
        self.options = dict(options)

    def compile(self) -> CompiledModule:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Load and pack the weights, and make the graph ready to be called.

        Raises MemoryBudgetError before anything is loaded, TargetError for more threads than CPUs.
        Warns (FallbackWarning) when ops run on their torch reference: the call is slow then.
        """
        check_threads(self.threads)
        return CompiledModule(self)

    def runner(self, store: WeightStore) -> FunctionRunner:
        """A runner on weights of the store."""
        if self.context.fallbacks:
            warnings.warn(fallback_text(self.context.fallbacks), FallbackWarning, stacklevel=4)
        source = self.context.source
        assert source is not None
        plan = function_plan(self.module, self.threads)
        device = gpu_device(plan)
        weights = store.load(plan, source, self.threads, torch_device(device))
        return FunctionRunner(plan, weights, self.threads, device)


class CompiledModule:
    """A compiled module: call it as the module itself.  Not safe from several threads at once.

    A module that treats tokens one by one takes any number of them.  Any other is compiled for the
    sizes of the example, and again for the sizes of a call that differs (the last 8 are kept); it
    is traced anew where its code depends on them.
    """

    def __init__(self, lowered: LoweredModule, store: WeightStore | None = None) -> None:
        self.lowered = lowered
        self._store = store or WeightStore()
        self._main = lowered.runner(self._store)
        self._others: OrderedDict[tuple[int, ...], FunctionRunner] = OrderedDict()
        self._traced_again: OrderedDict[tuple[tuple[int, ...], ...], CompiledModule] = OrderedDict()
        self._traced = lowered.traced

    def __repr__(self) -> str:
        return f"CompiledModule(@{self.module.name}, {sum(1 for _ in self.module.walk())} ops)"

    @property
    def form(self) -> CallForm:
        return self._traced.found.form

    @property
    def module(self) -> Module:
        """The graph that runs."""
        return self._main.plan.module

    @property
    def passes(self) -> PassReport:
        return self.lowered.passes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns for these arguments, on the CPU.

        Raises UnsupportedInputError for arguments unlike those it was compiled for.
        """
        tensors = self.form.tensors(args, kwargs)
        sizes = self._sizes(tensors)
        if sizes is None:
            return self._again(tensors, args, kwargs)(*args, **kwargs)
        runner = self._runner(sizes)
        results = runner(_MAIN, _laid_out(tensors, runner.forms[_MAIN], sizes))
        wanted = [v.type for v in self._traced.ir.functions[_MAIN].body.returns]
        shaped = [r.reshape(_shape(t, sizes)) for r, t in zip(results, wanted, strict=True)]
        return self.form.results(shaped)

    def measure(self, *args: Any, **kwargs: Any) -> list[TraceEvent]:
        """A call, measured: one event for each instruction."""
        tensors = self.form.tensors(args, kwargs)
        sizes = self._sizes(tensors)
        if sizes is None:
            return self._again(tensors, args, kwargs).measure(*args, **kwargs)
        runner = self._runner(sizes)
        return runner.measure(_MAIN, _laid_out(tensors, runner.forms[_MAIN], sizes))

    def _runner(self, sizes: Mapping[str, int]) -> FunctionRunner:
        key = tuple(sizes.values())
        example = self._traced.found.example
        if self._main.forms[_MAIN].is_flat or key == tuple(example.values()):
            return self._main
        if key not in self._others:
            other = self._traced.at(sizes)
            before = self.lowered
            made = other.lower(before.target, before.pipeline, **before.options)
            self._others[key] = made.runner(self._store)
            if len(self._others) > _KEPT:
                self._others.popitem(last=False)[1].executor.close()
        self._others.move_to_end(key)
        return self._others[key]

    def _sizes(self, tensors: Sequence[Tensor]) -> dict[str, int] | None:
        """Sizes of the syms in a call; None for sizes that the trace did not leave open.

        Raises UnsupportedInputError for a tensor of another kind.
        """
        ir = self._traced.ir
        sizes: dict[str, int] = {}
        fits = True
        for arg, tensor in zip(ir.functions[_MAIN].args, tensors, strict=True):
            type = arg.tensor
            if tensor.dim() != type.rank or not _is(tensor, type.dtype) or not tensor.numel():
                raise UnsupportedInputError(self._misfit(arg.name, tensor, type))
            pairs = zip(type.dims, tensor.shape, strict=True)
            fits = all([_bind(d, n, sizes, ir) for d, n in pairs]) and fits
        return {name: sizes[name] for name in ir.syms} if fits else None

    def _misfit(self, name: str, tensor: Tensor, type: TensorType) -> str:
        syms = self._traced.ir.syms.items()
        ranges = ", ".join(f"{n} in {lo}..{hi}" for n, (lo, hi) in syms)
        wanted = f"{type}{f' with {ranges}' if ranges else ''}"
        return f"%{name} is {list(tensor.shape)} {tensor.dtype}, expected {wanted}"

    def _again(self, tensors: Sequence[Tensor], args: Any, kwargs: Any) -> CompiledModule:
        """The module traced anew for sizes that its code does something else for."""
        key = tuple(tuple(t.shape) for t in tensors)
        if key not in self._traced_again:
            before = self.lowered
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", OpaqueCallWarning)  # told the first time
                    found = trace_module(self._traced.model, args, kwargs)
            except UnsupportedInputError as error:
                arguments = self._traced.ir.functions[_MAIN].args
                faults = [
                    self._misfit(a.name, t, a.tensor)
                    for a, t in zip(arguments, tensors, strict=True)
                ]
                raise UnsupportedInputError(f"{'; '.join(faults)}. {error}") from error
            traced = TracedModule(found, self._traced.model)
            lowered = traced.lower(before.target, before.pipeline, **before.options)
            self._traced_again[key] = CompiledModule(lowered, self._store)
            if len(self._traced_again) > _KEPT:
                self._traced_again.popitem(last=False)[1]._close()
        self._traced_again.move_to_end(key)
        return self._traced_again[key]

    def _close(self) -> None:
        """End what watches the calls of every plan."""
        for runner in (self._main, *self._others.values()):
            runner.executor.close()
        for other in self._traced_again.values():
            other._close()

    # ---- what it is and costs

    def cost_analysis(self) -> CostAnalysis:
        """FLOPs, bytes and predicted seconds: ``.at(T=64).table()``."""
        return cost_analysis(self.module, self.lowered.target)

    def memory_analysis(self) -> MemoryAnalysis:
        """Bytes by device and kind."""
        return memory_analysis(self.module, self.lowered.context.options)

    def explain(self, what: str) -> str:
        """Why ``%value``, ``@weight`` or an op runs where it does, and what else was possible."""
        made = self.lowered
        return explain_op(self.module, what, made.target, made.context.options, made.placement)

    def save(self, path: str | Path) -> None:
        """Not possible yet for plain modules: raises UnsupportedInputError."""
        path_of("path", path)
        raise UnsupportedInputError(
            "a .ktplan holds causal language models only: keep the module itself (torch.save) and "
            "compile it again, or write its graph with dump="
        )


def _is(tensor: Tensor, dtype: str) -> bool:
    try:
        return dtype_name(tensor.dtype) == dtype
    except ValueError:  # a dtype that the IR lacks
        return False


def _bind(dim: Dim, size: int, sizes: dict[str, int], ir: Module) -> bool:
    """Whether a size fits a dim; a sym met for the first time gets it."""
    name = next(iter(dim.names), "")
    if dim.is_const:
        return dim.const() == size
    if dim != Dim.of(name):
        return dim.at({**ir.dims, **sizes}) == size
    lo, hi = ir.syms[name]
    return lo <= size <= hi and sizes.setdefault(name, size) == size


def _laid_out(
    tensors: Sequence[Tensor], form: FunctionForm, sizes: Mapping[str, int]
) -> list[Tensor]:
    """Arguments as the graph takes them: with one token axis where it is flat."""
    bound = {**sizes, "T": prod(sizes.values())}
    return [
        t.detach().cpu().reshape(_shape(type, bound))
        for t, type in zip(tensors, form.args, strict=True)
    ]


def _shape(type: Type, sizes: Mapping[str, int]) -> list[int]:
    assert isinstance(type, TensorType)
    return [d.at(sizes) for d in type.dims]


__all__ = ["CompiledModule", "LoweredModule", "TracedModule", "trace_plain"]
