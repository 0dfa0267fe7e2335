"""Cost and memory of a module on a target: figures per op and device, and what overlap saves.

cost_analysis(module, target).at(T=1, S=4096).table()
memory_analysis(module, target, options)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ktgraph.cost import Call, OpCost, type_nbytes
from ktgraph.errors import KtgraphError
from ktgraph.ir.graph import Function, Module, Op
from ktgraph.ir.types import StateType
from ktgraph.ops.registry import op_def
from ktgraph.pass_api import CompileOptions
from ktgraph.placement.graph import CPU, GPU_WORKSPACE, STREAM_BUFFERS
from ktgraph.placement.lanes import (
    CROSSING,
    DiskTier,
    FlatSchedule,
    crossing,
    crossing_share,
    is_stream,
    live_peaks,
    op_device,
    op_lane,
    op_workspace,
    predict,
)
from ktgraph.placement.report import aligned
from ktgraph.placement.schedule import critical_path, waiting_chain
from ktgraph.runtime.arena import max_q, phase_sizes
from ktgraph.runtime.cache import CacheShape
from ktgraph.runtime.flat import FlatWeight, flatten
from ktgraph.runtime.weight_views import VIEWS
from ktgraph.target import Target
from ktgraph.target.description import round_size

KINDS = ("weights", "kv", "activations", "workspace", "pinned")


class AnalysisError(KtgraphError, ValueError):
    """A question about sizes or phases that the module has no answer for."""


# -- cost ------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class OpRow:
    """One op line: how often it runs, and the predicted seconds of one run."""

    op: Op
    count: int
    device: str
    lane: str
    cost: OpCost
    seconds: float


@dataclass(frozen=True)
class DeviceTotal:
    """Sums over the ops of one device (or link)."""

    lane: str
    flops: float
    nbytes: float
    seconds: float


@dataclass(frozen=True)
class Limit:
    """Seconds of a call that one thing takes: memory, compute or launch of a device, link, disk."""

    kind: str
    where: str  # a device; of a link "cpu -> cuda:0"; of the disk ""
    seconds: float

    def __str__(self) -> str:
        kinds = {"memory": "memory bandwidth", "launch": "launches"}
        return f"{self.where} {kinds.get(self.kind, self.kind)}".strip()


class CallCost:
    """What one call costs; times are predictions from the target's figures."""

    def __init__(
        self,
        module: Module,
        func: Function,
        target: Target,
        call: Call,
        tier: DiskTier | None = None,
    ) -> None:
        self.module = module
        self.func = func
        self.target = target
        self.call = call
        self.tier = tier

    @cached_property
    def predicted(self) -> FlatSchedule:
        """Every op of every layer on its lane."""
        return predict(self.module, self.func, self.target, self.call, self.tier)

    @cached_property
    def rows(self) -> list[OpRow]:
        """A row for each op line that computes or copies."""
        counts: dict[int, int] = {}
        for step in self.predicted.steps:
            counts[id(step.op)] = counts.get(id(step.op), 0) + 1
        times = self.predicted.times
        return [
            OpRow(
                op, counts[id(op)], op_device(self.module, op), op_lane(self.module, op),
                times.cost(op), times.seconds(op),
            )
            for op in self.func.walk()
            if op.body is None and not op_def(op.name).is_view
        ]  # fmt: skip

    @property
    def seconds(self) -> float:
        """From the first op to the last, overlap taken into account."""
        return self.predicted.schedule.makespan

    @property
    def serial_seconds(self) -> float:
        """The sum of all ops, as if nothing overlapped."""
        return sum(r.seconds * r.count for r in self.rows)

    @property
    def saved(self) -> float:
        """Seconds that overlap saves."""
        saved = self.serial_seconds - self.seconds
        return saved if saved > 1e-9 else 0.0  # sums in another order differ by round-off

    @property
    def flops(self) -> float:
        return sum(r.cost.flops * r.count for r in self.rows)

    @property
    def nbytes(self) -> float:
        """Bytes that ops read and write; what crosses links is left out."""
        kept = [r for r in self.rows if r.op.name not in CROSSING]
        return sum((r.cost.read + r.cost.written) * r.count for r in kept)

    @property
    def unknown(self) -> list[str]:
        """Ops without a cost rule: their FLOPs are missing from every sum."""
        return sorted({r.op.name for r in self.rows if not r.cost.known})

    @cached_property
    def limits(self) -> list[Limit]:
        """What the call's seconds go to, the largest share first; the shares add up to `seconds`.

        Followed back from the last op: each time the op that was waited for, or that held the lane.
        """
        found: dict[tuple[str, str], float] = {}
        steps, times = self.predicted.steps, self.predicted.times
        for number in waiting_chain(self.predicted.schedule):
            op = steps[number].op
            for kind, seconds in times.parts(op).items():
                where = crossing(self.module, op) if kind == "link" else op_device(self.module, op)
                key = (kind, "" if kind == "disk" else where)
                found[key] = found.get(key, 0.0) + seconds
        rows = [Limit(kind, where, seconds) for (kind, where), seconds in found.items()]
        return sorted(rows, key=lambda r: -r.seconds)

    @property
    def critical(self) -> list[str]:
        """Names of the values on the longest chain of ops that wait for each other."""
        tasks = self.predicted.schedule.tasks
        return [tasks[n].name for n in critical_path(tasks) if tasks[n].seconds > 0]

    def by_lane(self) -> list[DeviceTotal]:
        """Totals by device and link, in order of first use."""
        lanes = dict.fromkeys(r.lane for r in self.rows)
        found: list[DeviceTotal] = []
        for lane in lanes:
            rows = [r for r in self.rows if r.lane == lane]
            moved = sum((self._moved(r)) * r.count for r in rows)
            flops = sum(r.cost.flops * r.count for r in rows)
            found.append(DeviceTotal(lane, flops, moved, sum(r.seconds * r.count for r in rows)))
        return found

    def _moved(self, row: OpRow) -> float:
        if row.op.name in CROSSING:
            sizes = self.predicted.times.sizes
            return sum(type_nbytes(r.type, sizes) for r in row.op.results) * crossing_share(row.op)
        return row.cost.read + row.cost.written

    def table(self) -> str:
        """A line for each op, then totals by device and the critical path."""
        head = f"@{self.func.name}: {_call_text(self.call)} on {self.target.name}"
        heads = ("value", "op", "x", "device", "MFLOP", "MB", "FLOP/B", "bound", "µs", "share")
        rows = [heads, *[self._cells(r) for r in self.rows]]
        lines = [head, *aligned(rows, (2, 4, 5, 6, 8, 9)), ""]
        totals = [("on", "GFLOP", "MB", "busy ms")]
        totals += [
            (t.lane, f"{t.flops / 1e9:.4g}", f"{t.nbytes / 1e6:.4g}", f"{t.seconds * 1e3:.4g}")
            for t in self.by_lane()
        ]
        lines += aligned(totals, (1, 2, 3))
        lines.append(
            f"critical path {self.seconds * 1e3:.4g} ms; one after the other "
            f"{self.serial_seconds * 1e3:.4g} ms: overlap saves {self.saved * 1e3:.4g} ms"
        )
        if self.unknown:
            lines.append(f"without a cost rule (FLOPs not counted): {', '.join(self.unknown)}")
        return "\n".join(lines)

    __str__ = table

    def _cells(self, row: OpRow) -> tuple[str, ...]:
        crosses = row.op.name in CROSSING
        moved = self._moved(row)
        parts = self.predicted.times.parts(row.op)
        bound = max(reversed(parts), key=lambda kind: parts[kind]) if parts else "-"
        share = row.seconds * row.count / self.serial_seconds if self.serial_seconds else 0.0
        known = "" if row.cost.known else "?"
        return (
            ", ".join(f"%{r.name}" for r in row.op.results), row.op.name, str(row.count), row.lane,
            known or f"{row.cost.flops / 1e6:.4g}", f"{moved / 1e6:.4g}",
            known or ("-" if crosses else f"{row.cost.intensity:.3g}"), bound,
            f"{row.seconds * 1e6:.4g}", f"{share:.1%}",
        )  # fmt: skip


class CostAnalysis:
    """Costs of a module on a target, at any call."""

    def __init__(self, module: Module, target: Target, tier: DiskTier | None = None) -> None:
        self.module = module
        self.target = target
        self.tier = tier

    def at(
        self, T: int = 1, S: int | None = None, B: int = 1, phase: str | None = None
    ) -> CallCost:
        """Cost of a call of T new tokens over B sequences that ends with S cache rows in all.

        phase: a function's name or phase; by default the function that serves T/B new tokens of a
        sequence.  Raises AnalysisError for sizes that cannot be.
        """
        rows = T if S is None else S
        if B < 1 or T < B or rows < T:
            raise AnalysisError(f"T={T}, S={rows}, B={B}: expected B >= 1, T >= B and S >= T")
        new, past = _shared(T, B), _shared(rows - T, B)
        func = self._function(phase, max(new))
        return CallCost(self.module, func, self.target, Call(new, past), self.tier)

    def _function(self, phase: str | None, most: int) -> Function:
        functions = list(self.module.functions.values())
        if phase is not None:
            found = [f for f in functions if phase in (f.name, f.attrs.get("phase"))]
            if not found:
                known = ", ".join(f.name for f in functions)
                raise AnalysisError(f"no phase {phase!r}; phases: {known}")
            return found[0]
        bounds = [(float("inf") if (b := max_q(f)) is None else b, f) for f in functions]
        fitting = [x for x in bounds if x[0] >= most]
        return (
            min(fitting, key=lambda x: x[0])[1] if fitting else max(bounds, key=lambda x: x[0])[1]
        )


def _shared(total: int, parts: int) -> tuple[int, ...]:
    return tuple(total // parts + (1 if n < total % parts else 0) for n in range(parts))


def _call_text(call: Call) -> str:
    return f"{call.tokens} new tokens of {len(call.new)} sequence(s), {call.rows} rows in the cache"


def cost_analysis(module: Module, target: Target, tier: DiskTier | None = None) -> CostAnalysis:
    """Costs of a flat module; placed or not (then everything is priced on its home device).

    tier: the share of routed experts that is read from disk; without it RAM holds all.
    """
    return CostAnalysis(module, target, tier)


def cost_text(module: Module, target: Target, calls: Mapping[str, Call], home: str) -> str:
    """The file cost.txt of a dump: a table for each function, before anything crosses devices."""
    before, module.home = module.home, home
    try:
        found = [CallCost(module, module.functions[n], target, c).table() for n, c in calls.items()]
    finally:
        module.home = before
    return "\n\n".join(found) + "\n"


# -- memory ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class MemoryTerm:
    """Bytes for one purpose on one device."""

    device: str
    kind: str
    name: str
    nbytes: float


@dataclass(frozen=True)
class MemoryAnalysis:
    """Bytes by device and kind, from types alone.  Workspace is an estimate."""

    terms: tuple[MemoryTerm, ...]

    def of(self, device: str, kind: str | None = None) -> float:
        """Bytes on a device, of one kind or of all."""
        return sum(t.nbytes for t in self.terms if t.device == device and kind in (None, t.kind))

    @property
    def devices(self) -> list[str]:
        return list(dict.fromkeys(t.device for t in self.terms))

    def largest(self, count: int = 8) -> list[MemoryTerm]:
        return sorted(self.terms, key=lambda t: -t.nbytes)[:count]

    def fits(self, target: Target) -> bool:
        """Whether every device has enough."""
        return all(self.of(d) <= target.device(d).memory for d in self.devices)

    def table(self) -> str:
        """Devices by kinds, then the largest terms."""
        rows: list[tuple[str, ...]] = [("device", *KINDS, "in all")]
        for device in self.devices:
            sizes = [round_size(self.of(device, k)) for k in KINDS]
            rows.append((device, *sizes, round_size(self.of(device))))
        lines = aligned(rows, range(1, len(KINDS) + 2))
        largest = [(round_size(t.nbytes), t.device, t.kind, t.name) for t in self.largest()]
        return "\n".join([*lines, "", "largest:", *aligned(largest, (0,), "  ")])

    __str__ = table


def memory_analysis(
    module: Module, options: CompileOptions | None = None, cache_rows: int | None = None
) -> MemoryAnalysis:
    """What a flat module takes.  `cache_rows`: by default every sequence's context in full."""
    options = options or CompileOptions()
    rows = cache_rows or options.cache_rows or options.context * options.max_batch
    cache = _cache_terms(module, options, rows)
    terms = [*_weight_terms(module), *cache, *_value_terms(module, options)]
    kept = [t for t in terms if t.nbytes > 0]
    return MemoryAnalysis(tuple(sorted(kept, key=lambda t: (t.device != module.home, -t.nbytes))))


def _weight_terms(module: Module) -> list[MemoryTerm]:
    """Members that ops read, each once; streamed ones lie where they are read from."""
    home = module.home or CPU
    members: dict[str, set[int | None]] = {}
    for func in module.functions.values():
        for step in flatten(module, func).ops:
            for operand in step.operands:
                if isinstance(operand, FlatWeight):
                    members.setdefault(operand.ref.name, set()).add(operand.index)
    found: list[MemoryTerm] = []
    for name, held in members.items():
        kind = module.weights[name].type
        if _is_view(module, name, members):
            continue
        nbytes = type_nbytes(kind, module.dims) * len(held)
        found.append(MemoryTerm(kind.device or home, "weights", f"@{name} x {len(held)}", nbytes))
    return found


def _is_view(module: Module, name: str, read: Mapping[str, object]) -> bool:
    """Whether a GPU's weight is a view of another that it reads: halves of MLA's kv_b."""
    weight = module.weights[name]
    made, device = weight.recipe, weight.type.device or module.home or CPU
    if device == CPU or made is None or made.kind not in VIEWS:
        return False
    (base,) = made.args
    whole = module.weights[base.name].type
    on_same = (whole.device or module.home) == device
    return base.name in read and on_same and whole.encoding == weight.type.encoding


def _cache_terms(module: Module, options: CompileOptions, rows: int) -> list[MemoryTerm]:
    home = module.home or CPU
    func = next(iter(module.functions.values()), None)
    args = func.args if func is not None else []
    types = [a.type for a in args if isinstance(a.type, StateType)]
    shape = CacheShape.of(types, module.dims, options, -(-rows // options.page_size))
    found: list[MemoryTerm] = []
    for arg in args:
        if isinstance(arg.type, StateType):
            kept = rows if arg.type.window is None else shape.rows_of(arg.type, module.dims)
            sizes = {**module.dims, "C": kept}
            size = arg.type.layers.at(sizes) * sum(type_nbytes(p, sizes) for p in arg.type.parts)
            found.append(
                MemoryTerm(arg.type.device or home, "kv", f"%{arg.name}, {kept} rows", size)
            )
    return found


def _value_terms(module: Module, options: CompileOptions) -> list[MemoryTerm]:
    """Activations, workspace and pinned buffers of the largest call; phases share them."""
    most: dict[tuple[str, str], MemoryTerm] = {}
    for func in module.functions.values():
        for term in _function_terms(module, func, options):
            key = (term.device, term.kind)
            if key not in most or most[key].nbytes < term.nbytes:
                most[key] = term
    return [*most.values(), *_gpu_terms(module)]


def _function_terms(module: Module, func: Function, options: CompileOptions) -> list[MemoryTerm]:
    sizes = phase_sizes(func, options).bindings(module)
    peaks = live_peaks(module, flatten(module, func), sizes)
    found = [MemoryTerm(d, "activations", f"values of @{func.name}", n) for d, n in peaks.items()]
    for op in func.walk():
        if op.name in CROSSING and not is_stream(op):
            nbytes = sum(type_nbytes(r.type, sizes) for r in op.results)
            name = f"%{op.results[0].name} of @{func.name}"
            found.append(MemoryTerm(CPU, "pinned", name, nbytes))
        elif op.body is None and op_device(module, op) == CPU:
            nbytes = op_workspace(module, op, sizes)
            name = f"inside %{op.results[0].name} of @{func.name} (estimate)"
            found.append(MemoryTerm(CPU, "workspace", name, nbytes))
    return found


def _gpu_terms(module: Module) -> list[MemoryTerm]:
    """What a GPU at home keeps besides: scratch, and the buffers of streamed weights."""
    home = module.home or CPU
    if home == CPU:
        return []
    copies = [op for op in module.walk() if is_stream(op)]
    layer = max((sum(type_nbytes(r.type, module.dims) for r in op.results) for op in copies),
                default=0.0)  # fmt: skip
    buffers = f"{STREAM_BUFFERS} buffers of a streamed layer"
    return [
        MemoryTerm(home, "workspace", "scratch of kernels, graphs and libraries", GPU_WORKSPACE),
        MemoryTerm(home, "workspace", buffers, STREAM_BUFFERS * layer),
    ]


__all__ = [
    "KINDS",
    "AnalysisError",
    "CallCost",
    "CostAnalysis",
    "Limit",
    "MemoryAnalysis",
    "MemoryTerm",
    "cost_analysis",
    "cost_text",
    "memory_analysis",
]
