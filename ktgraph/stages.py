"""Stages of a model, each an object that prints itself: Traced, Lowered; then `Compiled`."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ktgraph.analysis import CostAnalysis, MemoryAnalysis, cost_analysis, memory_analysis
from ktgraph.compile_options import check_isa, compile_options
from ktgraph.compiled import PLACEMENT, Compiled, Provenance, plan_extras
from ktgraph.errors import UnsupportedInputError, path_of
from ktgraph.explain import explain as explain_op
from ktgraph.ir.graph import Module
from ktgraph.ir.types import StateType
from ktgraph.model_input import ModelCard, ModelInput, weight_source
from ktgraph.pass_api import PassContext
from ktgraph.pass_manager import PassManager, PassReport
from ktgraph.runtime.memory import MemoryNeed, choose_cache, memory_need
from ktgraph.runtime.packed import packed_weights, packing_nbytes, use_nbytes
from ktgraph.runtime.plan import Plan
from ktgraph.runtime.planfile_write import write_plan
from ktgraph.runtime.runner import Runner, available_memory
from ktgraph.target import (
    Target,
    check_runs_here,
    check_threads,
    resolve_target,
    with_threads,
)
from ktgraph.weights.evaluate import WeightEvaluator
from ktgraph.weights.policy import Policy
from ktgraph.weights.sources import WeightSource

log = logging.getLogger("ktgraph")


class Traced:
    """The model's graph as its own code computes it: unplaced, with leading axes [b, s]."""

    def __init__(self, ir: Module, given: ModelInput, dtype: str) -> None:
        self.ir = ir
        self.given = given
        self.dtype = dtype

    def as_text(self) -> str:
        """Canonical .ktir text; `ktgraph opt` resumes from it."""
        return str(self.ir)

    __str__ = as_text

    def __repr__(self) -> str:
        return f"Traced(@{self.ir.name}, {sum(1 for _ in self.ir.walk())} ops)"

    def lower(
        self,
        target: str | Path | Target = "auto",
        pipeline: str = "default",
        *,
        validate: int | None = None,
        dump: str | Path | None = None,
        **options: Any,
    ) -> Lowered:
        """Run the passes; the traced graph itself stays as it is.

        target: "auto", "cpu", "hybrid", "cuda", a target file, its name, or a `Target`.
        pipeline: e.g. "default,-fuse-norms,+my-pass@before:place".
        validate: 0, 1 (every pass on a miniature in float64) or 2 (kernels too); None: what the
            environment's KTGRAPH_VALIDATE says.
        dump: folder for every pass's IR and reports; None: what KTGRAPH_DUMP says.
        options: fields of `CompileOptions`: quantize, activations, max_tokens, context, max_batch,
            cache_rows, page_size, exact, defer, rules, popularity, threads.  None means the
            default.
        """
        chosen = compile_options(self.given.card, self.dtype, options)
        if validate not in (None, 0, 1, 2):
            raise UnsupportedInputError(f"validate={validate!r}: expected 0, 1, 2 or None")
        dump = None if dump is None else path_of("dump", dump)
        check_isa()
        if chosen.quantize is not None:
            Policy.parse(chosen.quantize)  # an unknown encoding shows before anything runs
        machine = with_threads(resolve_target(target), chosen.threads)
        context = PassContext(machine, self.source(), chosen)
        module = self.ir.clone()
        report = PassManager().run(module, pipeline, context, validate=validate, dump=dump)
        return Lowered(module, report, context, self.given.card, pipeline)

    def source(self) -> WeightSource | None:
        """Where the weights are read from."""
        return weight_source(self.given)


class Lowered:
    """The graph after every pass: placed, scheduled, each op with its kernel."""

    def __init__(
        self,
        module: Module,
        passes: PassReport,
        context: PassContext,
        card: ModelCard,
        pipeline: str,
    ) -> None:
        self.module = module
        self.passes = passes
        self.context = context
        self.card = card
        self.pipeline = pipeline

    def as_text(self) -> str:
        """Canonical .ktir text."""
        return str(self.module)

    __str__ = as_text

    def __repr__(self) -> str:
        return f"Lowered(@{self.module.name}, {len(self.passes.records)} passes)"

    def ir_after(self, name: str) -> Module:
        """The graph as the pass called `name` left it."""
        return self.passes.ir_after(name)

    def diff(self, name: str) -> str:
        """What the pass changed, as a unified diff of the text."""
        return self.passes.diff(name)

    def why_not(self, rule: str, layer: int | None = None) -> str:
        """Where a rule matched, and why it did not elsewhere."""
        if layer is not None and not 0 <= layer < self.layers:
            raise UnsupportedInputError(f"layer={layer}: the model has layers 0..{self.layers - 1}")
        return self.passes.why_not(rule, layer=layer)

    @property
    def layers(self) -> int:
        """Layers of the model: those its cache has rows for."""
        values = [[a.type for a in f.args] for f in self.module.functions.values()]
        states = [[t for t in types if isinstance(t, StateType)] for types in values]
        return max((sum(t.layers.const() for t in found) for found in states), default=0)

    @property
    def target(self) -> Target:
        """The machine it was lowered for."""
        assert self.context.target is not None
        return self.context.target

    @property
    def threads(self) -> int:
        """Worker threads that will run it: as asked for, else as measured for the target."""
        return self.context.options.threads or self.target.cpu_threads

    def cost_analysis(self) -> CostAnalysis:
        """FLOPs, bytes and predicted seconds: ``.at(T=1, S=4096).table()``."""
        return cost_analysis(self.module, self.target)

    def explain(self, what: str) -> str:
        """Why ``%value``, ``@weight`` or an op runs where it does, and what else was possible."""
        return explain_op(self.module, what, self.target, self.context.options, self.placement)

    @property
    def placement(self) -> str:
        """What the pass `place` reported, op by op."""
        return self.context.artifacts.get(PLACEMENT, "")

    def memory_analysis(self) -> MemoryAnalysis:
        """Bytes by device and kind, from types alone, with a cache of the default size."""
        return memory_analysis(self.module, self.context.options)

    def memory_need(self) -> MemoryNeed:
        """Bytes that `compile` will take of this machine's memory; nothing is loaded for it."""
        plan = Plan.build(self.module)
        available = available_memory(plan)
        shape = choose_cache(plan, self.context.options, available, self.threads)
        return memory_need(plan, shape, self.threads)

    def packing(self) -> tuple[int, int]:
        """Bytes that `save` writes, and about the most memory that it takes meanwhile."""
        uses = Plan.build(self.module).loaded()
        return sum(map(use_nbytes, uses)), packing_nbytes(uses, self.threads)

    def save(
        self, path: str | Path, *, resume: bool = False, say: Callable[[str], None] | None = None
    ) -> None:
        """Pack the weights straight into a .ktplan, which `kt.load` starts from.

        One weight after another is read, packed and written: the model need not fit into memory.
        resume: keep finished weights when it is interrupted, and go on behind those that a save
            of the same model with the same options left; `say` is told so.
        """
        source, options = self.context.source, self.context.options
        assert source is not None
        plan = Plan.build(self.module)
        evaluator, uses = WeightEvaluator(self.module, source, cache_nbytes=0), plan.loaded()
        write_plan(
            path_of("path", path),
            plan,
            options,
            lambda first: packed_weights(uses[first:], evaluator, self.threads),
            fingerprint=source.fingerprint(),
            pipeline=self.pipeline,
            target=self.target.to_toml(),
            extras=plan_extras(self.card, self.placement),
            resume=resume,
            say=say or log.info,
        )

    def compile(self) -> Compiled:
        """Load and pack the weights, and make the graph ready to run.

        Raises MemoryBudgetError before anything is loaded, TargetError for more threads than CPUs
        or a GPU that is not here, and errors of the checkpoint.
        Warns (FallbackWarning) when ops run on their torch reference: the step is slow then.
        """
        source, options = self.context.source, self.context.options
        if source is None:
            raise UnsupportedInputError(
                f"{self.card.name} was traced from a config, which has no weights: it can be "
                "planned, dumped and read, but not run; give a checkpoint folder or a loaded model"
            )
        check_runs_here(self.target)
        check_threads(self.threads)
        if self.context.fallbacks:
            warnings.warn(fallback_text(self.context.fallbacks), FallbackWarning, stacklevel=2)
        runner = Runner.load(self.module, source, options, threads=self.threads)
        made = Provenance(self.pipeline, options, self.target, source.fingerprint(), self.placement)
        return Compiled(runner, self.card, made, self.passes)


class FallbackWarning(UserWarning):
    """Ops without a native kernel; the message names them, and why each kernel refused."""


def fallback_text(fallbacks: Mapping[str, Mapping[str, str]]) -> str:
    shown = [
        f"{op} ({'; '.join(f'{kernel}: {why}' for kernel, why in refused.items()) or 'no kernel'})"
        for op, refused in sorted(fallbacks.items())
    ]
    return f"these ops run on their torch reference, which is slow: {', '.join(shown)}"


__all__ = ["FallbackWarning", "Lowered", "Traced", "fallback_text"]
