"""What a plan needs in memory, from types alone: said, and checked, before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ktgraph.errors import MemoryBudgetError
from ktgraph.pass_api import CompileOptions
from ktgraph.runtime.cache import CacheShape, row_nbytes
from ktgraph.runtime.native import CallBounds, NativeOperandError, Trial
from ktgraph.runtime.operands import WeightUse
from ktgraph.runtime.packed import use_nbytes
from ktgraph.runtime.plan import PhasePlan, Plan, PlanError, op_line
from ktgraph.target.description import round_size

_HEADROOM = 0.95  # share of the available memory that may be used


@dataclass(frozen=True)
class Term:
    """Bytes for one purpose; `kind` is weights, cache, activations or workspace."""

    kind: str
    name: str
    nbytes: int


@dataclass(frozen=True)
class MemoryNeed:
    """Every term, largest first."""

    terms: tuple[Term, ...]

    @property
    def total(self) -> int:
        return sum(t.nbytes for t in self.terms)

    def of(self, kind: str) -> int:
        return sum(t.nbytes for t in self.terms if t.kind == kind)

    def summary(self) -> str:
        """One line: the sum, and each kind."""
        kinds = sorted({t.kind for t in self.terms}, key=self.of, reverse=True)
        shown = ", ".join(f"{kind} {round_size(self.of(kind))}" for kind in kinds)
        return f"needs {round_size(self.total)} of memory: {shown}"

    def table(self) -> str:
        """One line a term, and the sum."""
        rows = [(round_size(t.nbytes), t.kind, t.name) for t in self.terms]
        lines = [f"  {size:>10}  {kind:<11}  {name}" for size, kind, name in rows]
        return "\n".join([*lines, f"  {round_size(self.total):>10}  in all"])


def memory_need(plan: Plan, cache: CacheShape, threads: int) -> MemoryNeed:
    """What the plan takes with a cache of this shape; raises PlanError when it cannot run."""
    kv = cache.sequence_rows
    terms = [
        *_weight_terms(plan.uses()),
        Term("cache", f"{cache.rows} rows of {_row(plan)} bytes", cache.rows * _row(plan)),
        Term("activations", f"arena for {_tokens(plan)} tokens a call", plan.arena_nbytes("cpu")),
        Term(
            "workspace",
            f"kernels' scratch, {threads} threads, texts of {kv} rows",
            _scratch(plan, threads, kv),
        ),
    ]
    return MemoryNeed(tuple(sorted(terms, key=lambda t: -t.nbytes)))


def _weight_terms(uses: Sequence[WeightUse]) -> list[Term]:
    """One term for each family (or single weight) and form."""
    sums: dict[str, tuple[int, int]] = {}
    for use in uses:
        stored = use.type.encoding if use.form in ("tile", "stored") else None
        name = f"@{use.ref.name} as {stored or use.form}"
        nbytes, count = sums.get(name, (0, 0))
        sums[name] = (nbytes + use_nbytes(use), count + 1)
    return [Term("weights", f"{n} x {count}", nbytes) for n, (nbytes, count) in sums.items()]


def _row(plan: Plan) -> int:
    return row_nbytes(plan.states, plan.module.dims)


def _tokens(plan: Plan) -> int:
    return max((p.arena.sizes.tokens for p in plan.phases), default=0)


def _scratch(plan: Plan, threads: int, kv: int) -> int:
    """The phases run one at a time, on the same threads, whose scratch only grows."""
    return max((_phase_scratch(plan, p, threads, kv) for p in plan.phases), default=0)


def _phase_scratch(plan: Plan, phase: PhasePlan, threads: int, kv: int) -> int:
    items = [i for i in phase.instructions if i.is_native]
    if not items:
        return 0
    sizes, trial = phase.arena.sizes, Trial()
    new = sizes.tokens if phase.max_q is None else min(phase.max_q, sizes.tokens)
    most = CallBounds(sizes.tokens, sizes.rows, sizes.batch, new, kv)
    try:
        return trial.scratch(items, plan.module.dims, most, threads)
    except (NativeOperandError, ValueError, TypeError) as error:
        refused = [i for i in items if trial.refusal([i], plan.module.dims)]
        where = "".join(f"\n  in: {op_line(phase, i)}" for i in refused[:1])
        raise PlanError(f"{error}{where}") from error


def choose_cache(plan: Plan, options: CompileOptions, available: int, threads: int) -> CacheShape:
    """The cache asked for; by default max_batch full contexts, or as many rows as memory has.

    At least one sequence's context is kept by default, so that a model that cannot hold it is
    refused by `check_memory` and not cut short silently.
    """
    size = options.page_size
    if options.cache_rows is not None:
        return CacheShape(size, max(1, -(-options.cache_rows // size)), options.context)
    one = -(-options.context // size)
    least = memory_need(plan, CacheShape(size, one, options.context), threads)
    room = int(available * _HEADROOM) - (least.total - least.of("cache"))
    affordable = room // max(1, size * _row(plan))
    return CacheShape(size, max(one, min(one * options.max_batch, affordable)), options.context)


def check_memory(need: MemoryNeed, available: int) -> None:
    """Raise MemoryBudgetError with the largest terms and what to do, when it cannot fit."""
    if need.total <= available * _HEADROOM:
        return
    largest = MemoryNeed(need.terms[:5])
    rows = "\n".join(largest.table().split("\n")[:-1])
    raise MemoryBudgetError(
        f"this needs {round_size(need.total)} of memory, and {round_size(available)} are "
        f"available. The largest terms:\n{rows}\n{_advice(need)}"
    )


def _advice(need: MemoryNeed) -> str:
    """What helps most, by the largest kind."""
    kinds = {t.kind for t in need.terms}
    most = max(kinds, key=need.of)
    return {
        "weights": 'Compile with quantize="int4p(group=64)" (or "int8"), or use a smaller model',
        "cache": "Compile with a smaller cache_rows, context or max_batch",
        "activations": "Compile with a smaller max_tokens",
        "workspace": "Compile with a smaller max_tokens, context or max_batch, or fewer threads",
    }[most]


__all__ = ["MemoryNeed", "Term", "check_memory", "choose_cache", "memory_need"]
