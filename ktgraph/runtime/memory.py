"""What a plan needs in memory, from types alone: said, and checked, before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ktgraph.errors import MemoryBudgetError
from ktgraph.pass_api import CompileOptions
from ktgraph.placement.graph import GPU_WORKSPACE
from ktgraph.runtime.cache import CacheShape, row_nbytes, window_of
from ktgraph.runtime.gpu.streaming import BUFFERS, buffer_nbytes
from ktgraph.runtime.native import CallBounds, NativeOperandError, Trial
from ktgraph.runtime.operands import WeightUse
from ktgraph.runtime.packed import use_nbytes
from ktgraph.runtime.plan import PhasePlan, Plan, PlanError, op_line
from ktgraph.runtime.reference_memory import fallback_nbytes
from ktgraph.target.description import round_size

_HEADROOM = 0.95  # share of the available memory that may be used


@dataclass(frozen=True)
class Term:
    """Bytes for one purpose; `kind` is weights, cache, activations or workspace."""

    kind: str
    name: str
    nbytes: int
    device: str = "cpu"


@dataclass(frozen=True)
class MemoryNeed:
    """Every term, largest first."""

    terms: tuple[Term, ...]

    @property
    def total(self) -> int:
        return sum(t.nbytes for t in self.terms)

    def of(self, kind: str) -> int:
        return sum(t.nbytes for t in self.terms if t.kind == kind)

    @property
    def devices(self) -> list[str]:
        """Every device that holds something, the CPU first."""
        return sorted({t.device for t in self.terms}, key=lambda d: (d != "cpu", d))

    def on(self, device: str) -> MemoryNeed:
        """The terms of one device."""
        return MemoryNeed(tuple(t for t in self.terms if t.device == device))

    def summary(self) -> str:
        """One line: the sum, and each kind; for several devices, one clause each."""
        if len(self.devices) > 1:
            return "; ".join(f"{d} {self.on(d).summary()}" for d in self.devices)
        kinds = sorted({t.kind for t in self.terms}, key=self.of, reverse=True)
        shown = ", ".join(f"{kind} {round_size(self.of(kind))}" for kind in kinds)
        return f"needs {round_size(self.total)} of memory: {shown}"

    def table(self) -> str:
        """One line a term, and the sum."""
        shown = {d: f"  on {d}" if self.devices != ["cpu"] else "" for d in self.devices}
        rows = [(round_size(t.nbytes), t.kind, t.name + shown[t.device]) for t in self.terms]
        lines = [f"  {size:>10}  {kind:<11}  {name}" for size, kind, name in rows]
        return "\n".join([*lines, f"  {round_size(self.total):>10}  in all"])


def memory_need(plan: Plan, cache: CacheShape, threads: int) -> MemoryNeed:
    """What the plan takes with a cache of this shape; raises PlanError when it cannot run."""
    kv = cache.sequence_rows
    terms = [
        *_weight_terms(plan.held()),
        *_cache_terms(plan, cache),
        *(
            Term("activations", f"arena for {_tokens(plan)} tokens a call", nbytes, device)
            for device in dict.fromkeys(("cpu", plan.home))
            if (nbytes := plan.arena_nbytes(device))
        ),
        Term(
            "workspace",
            f"kernels' scratch, {threads} threads, texts of {kv} rows",
            _scratch(plan, threads, kv),
        ),
    ]
    fallbacks = fallback_nbytes(plan, kv)
    if fallbacks:
        terms.append(Term("workspace", "ops on their torch reference (a bound)", fallbacks))
    streams = BUFFERS * buffer_nbytes(plan)
    if streams:
        what = "buffers of streamed weights"
        terms.append(Term("workspace", what, streams, plan.home))
    if plan.uses_gpu:
        what = "scratch of GPU kernels, graphs and libraries"
        terms.append(Term("workspace", what, GPU_WORKSPACE, plan.home))
    return MemoryNeed(tuple(sorted(terms, key=lambda t: -t.nbytes)))


def _cache_terms(plan: Plan, cache: CacheShape) -> list[Term]:
    found: list[Term] = []
    for type in plan.states:
        row = row_nbytes([type], plan.module.dims)
        window, rows = window_of(type, plan.module.dims), cache.rows_of(type, plan.module.dims)
        name = f"{rows} rows of {row} bytes" + (f", window {window}" if window else "")
        found.append(Term("cache", name, rows * row, type.device or plan.home))
    return found


def _weight_terms(uses: Sequence[WeightUse]) -> list[Term]:
    """One term for each family (or single weight) and form."""
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for use in uses:
        stored = use.type.encoding if use.form in ("tile", "stored") else None
        name = (f"@{use.ref.name} as {stored or use.form}", use.device)
        nbytes, count = sums.get(name, (0, 0))
        sums[name] = (nbytes + use_nbytes(use), count + 1)
    return [
        Term("weights", f"{name} x {count}", nbytes, device)
        for (name, device), (nbytes, count) in sums.items()
    ]


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


def choose_cache(
    plan: Plan, options: CompileOptions, available: Mapping[str, int], threads: int
) -> CacheShape:
    """The cache asked for; by default max_batch full contexts, or as many rows as memory has.

    available: bytes by device.  At least one sequence's context is kept by default, so that a model
    that cannot hold it is refused by `check_memory` and not cut short silently.
    """
    size = options.page_size
    shape = partial(CacheShape.of, plan.states, plan.module.dims, options)
    if options.cache_rows is not None:
        return shape(max(1, -(-options.cache_rows // size)))
    one = -(-options.context // size)
    pages = one * options.max_batch
    need = memory_need(plan, shape(pages), threads)  # caches of windows hardly depend on the pages
    for device in need.devices:
        whole = [t for t in plan.states if t.window is None and (t.device or plan.home) == device]
        page = row_nbytes(whole, plan.module.dims) * size
        share = _HEADROOM if device == "cpu" else 1.0
        room = int(available[device] * share) - (need.on(device).total - pages * page)
        pages = min(pages, room // page) if page else pages
    return shape(max(one, pages))


def check_memory(need: MemoryNeed, available: Mapping[str, int]) -> None:
    """Raise MemoryBudgetError with the largest terms and what to do, when a device lacks room."""
    for device in need.devices:
        _check_device(need.on(device), device, available[device])


def _check_device(need: MemoryNeed, device: str, available: int) -> None:
    if need.total <= available * (_HEADROOM if device == "cpu" else 1.0):
        return  # a GPU's budget is a number that somebody gave; the system shares the host's memory
    largest = MemoryNeed(need.terms[:5])
    rows = "\n".join(largest.table().split("\n")[:-1])
    where = "memory" if device == "cpu" else f"memory on {device}"
    raise MemoryBudgetError(
        f"this needs {round_size(need.total)} of {where}, and {round_size(available)} are "
        f"available. The largest terms:\n{rows}\n{_advice(need)}{_enough(need, device)}"
    )


def _enough(need: MemoryNeed, device: str) -> str:
    """A GPU's budget that does: rounded sizes may look equal."""
    return "" if device == "cpu" else f", or give gpu_memory={-(-need.total // 2**20)}MiB or more"


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


__all__ = ["GPU_WORKSPACE", "MemoryNeed", "Term", "check_memory", "choose_cache", "memory_need"]
