"""place: choose the device of every op and weight, from prices, under memory budgets.

Each op costs max(FLOPs / peak, bytes / bandwidth) + launch on a device, a value that crosses costs
latency + bytes / bandwidth; the critical path of each phase is made short while weights, cache,
activations and workspace fit the GPU (docs/placement.md).  Experts of a layer stay on the GPU, are
computed on the CPU, or stream to the GPU; of those on the CPU some may be hot, with slots on the
GPU (ktgraph/placement/hot.py).  YAML rules override.  insert-copies adds the copies.

Before:  module @m … %routed = moe.grouped_mlp %h, %ids, %wts, @w13, @w2 : bf16[T, D]
After:   module @m home cuda:0 … %routed = moe.grouped_mlp … : bf16[T, D]@cpu
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from ktgraph.errors import KtgraphError
from ktgraph.ir.graph import Block, Function, Module, Op, Value, WeightRef, attr
from ktgraph.ir.repeats import split_repeat_at
from ktgraph.ir.types import BatchType, StateType
from ktgraph.ir.verify import COPIES, PENDING
from ktgraph.ops.registry import op_def
from ktgraph.pass_api import Numerics, Pass, PassContext, exact, register_pass, reorder
from ktgraph.placement.decide import decide
from ktgraph.placement.decision import Decision, Run, Settings
from ktgraph.placement.graph import CPU, STREAM, Assign, Region
from ktgraph.placement.hot import Splitting, stack_key
from ktgraph.placement.popularity import Popularity
from ktgraph.placement.report import Row, layers_of, layers_text, placement_text, rows_of
from ktgraph.placement.rules import RULES_FILE, read_rules, split_where_rules_differ
from ktgraph.rewrite import derived_weight, reference
from ktgraph.target.description import round_size


class PlacementError(KtgraphError, ValueError):
    """A module that cannot be placed as asked."""


@register_pass
@dataclass(frozen=True)
class Place(Pass):
    """Choose devices by predicted time under memory budgets."""

    name: ClassVar[str] = "place"
    numerics: ClassVar[Numerics] = exact()
    requires: ClassVar[Sequence[str]] = ("flat",)
    ensures: ClassVar[Sequence[str]] = ("placed",)
    required: ClassVar[bool] = True

    gpu_memory: int | None = None  # bytes, e.g. 22GiB; none: all that the target gives
    rules: str | None = None  # a YAML file; none: the compile option `rules`
    context: int | None = None  # rows of a sequence that is priced; none: the compile option
    batch: int = 1  # sequences of a decode step that is priced

    def numerics_for(self, module: Module) -> Numerics:
        """With hot experts the sum over a token's experts has another order."""
        is_split = any(op.name == "moe.split_ids" for op in module.walk())
        return reorder() if is_split else self.numerics

    def run(self, module: Module, ctx: PassContext) -> None:
        if module.home is not None:
            _check_same_target(module, ctx)
            ctx.note(f"placed already, home {module.home}: left as it is")
            return
        if ctx.target is None:
            module.home = CPU
            ctx.note("no target: everything on cpu, nothing was priced")
            return
        settings = self._settings(ctx)
        if settings.rules:
            split_where_rules_differ(module, settings.rules)
        decision = decide(module, ctx.target, settings)
        rows = [
            list(rows_of(decision, region, run))
            for region in decision.regions
            for run in decision.runs[region.number]
        ]
        blocks = _Applying(module, decision).apply()
        regions = [r for r in decision.regions for _ in decision.runs[r.number]]
        named = [r for part in zip(rows, regions, blocks, strict=True) for r in _renamed(*part)]
        _split_hot(module, decision, blocks)
        _report(module, ctx, decision, named)

    def _settings(self, ctx: PassContext) -> Settings:
        path = self.rules or ctx.options.rules
        rules = read_rules(path) if path is not None else []
        if path is not None:  # `quantize` reads its encodings from there
            ctx.artifacts[RULES_FILE] = Path(path).read_text(encoding="utf-8")
        return Settings(
            ctx.options,
            self.gpu_memory,
            tuple(rules),
            self.context or ctx.options.context,
            self.batch,
            None if ctx.options.popularity is None else Popularity.load(ctx.options.popularity),
        )


def _check_same_target(module: Module, ctx: PassContext) -> None:
    if ctx.target is None or module.target_hash in (None, ctx.target.hash):
        return
    raise PlacementError(
        f"@{module.name} was placed for target {module.target_hash}, this is {ctx.target.name} "
        f"({ctx.target.hash}): go on from a module that the pass place has not seen"
    )


def _split_hot(module: Module, decision: Decision, blocks: Sequence[Block]) -> None:
    """Part the experts of layers with slots; `blocks` are those of every run, in order."""
    splitting = Splitting(module, decision.hot)
    runs = [(r, run) for r in decision.regions for run in decision.runs[r.number]]
    found: list[tuple[Region, Op, list[str]]] = []
    for (region, run), block in zip(runs, blocks, strict=True):
        for number in (n for n in run.slots if run.assign[n] == CPU):  # others stream all
            site = region.sites[number]
            keys = [stack_key(module, region, site, layer) for layer in run.layers]
            found.append((region, _op_in(block, region, number), keys))
    for region, op, keys in found:
        splitting.split(region.func, op, keys)


class _Applying:
    """Writes a decision into the module: split repeats, devices of values and weights."""

    def __init__(self, module: Module, decision: Decision) -> None:
        self.module = module
        self.decision = decision
        self.home = decision.machine.home
        self.uses: dict[str, dict[str, list[tuple[Op, int, Sequence[int | None]]]]] = {}

    def apply(self) -> list[Block]:
        """Returns the block of every run, in order."""
        module, machine = self.module, self.decision.machine
        module.home, module.target_hash = self.home, machine.target.hash
        for func in module.functions.values():
            self._states(func)
        blocks: list[Block] = []
        for region in self.decision.regions:
            for block, run in self._parts(region):
                _Devices(self, region, run.assign).block(block, run)
                blocks.append(block)
        self._weights()
        for name in machine.devices if self.home != CPU else ():
            device = machine.target.device(name)
            module.devices[name] = {"kind": device.kind, "memory": attr(device.memory)}
        for func in module.functions.values() if machine.is_hybrid else ():
            func.attrs[COPIES] = PENDING
        return blocks

    def printed(self, device: str) -> str | None:
        """How a type names a device: the home device is left out."""
        return None if device == self.home else device

    def _states(self, func: Function) -> None:
        at = self.printed(self.decision.state)
        for value in func.values():
            if isinstance(value.type, StateType):
                value.type = value.type.on(at)

    def _parts(self, region: Region) -> Iterator[tuple[Block, Run]]:
        """The blocks of a region after its repeat was split where layers differ."""
        runs = self.decision.runs[region.number]
        if region.repeat is None or len(runs) == 1:
            yield region.block, runs[0]
            return
        starts = [layer for run in runs[1:] if (layer := run.layers[0]) is not None]
        parts = split_repeat_at(region.func, region.repeat, starts)
        for part, run in zip(parts, runs, strict=True):
            assert part.body is not None
            yield part.body, run

    def use(self, device: str, op: Op, position: int, layers: Sequence[int | None]) -> None:
        ref = op.weight(position)
        self.uses.setdefault(ref.name, {}).setdefault(device, []).append((op, position, layers))

    def _weights(self) -> None:
        """A weight lies where it is used; one used on two devices gets a twin on the host."""
        for name, by_device in self.uses.items():
            weight = self.module.weights[name]
            if len(by_device) == 1:
                weight.type = weight.type.on(self.printed(next(iter(by_device))))
                continue
            for device, uses in by_device.items():
                if device != self.home:
                    self._twin(device, uses)

    def _twin(self, device: str, uses: Sequence[tuple[Op, int, Sequence[int | None]]]) -> None:
        for op, position, _ in uses:
            ref = op.weight(position)
            weight = self.module.weight_of(ref)
            leaf = f"{ref.name.rpartition('.')[2]}.{device.replace(':', '')}"
            twin = derived_weight(self.module, [ref], leaf, "identity", weight.type.on(device))
            if twin.name not in self.module.weights:
                self.module.add_weight(twin)
                spans = [_members(u.weight(p), layers) for u, p, layers in uses]
                if twin.is_family and all(spans):
                    twin.lo = min(lo for lo, _ in spans)
                    twin.hi = max(hi for _, hi in spans)
            op.set_operand(position, reference(twin, [ref]))


def _members(ref: WeightRef, layers: Sequence[int | None]) -> tuple[int, int]:
    """Lowest and highest member of a family that a use at these layers reads."""
    if ref.index is None:
        return 0, 0
    names = ref.index.names
    found = [ref.index.at(dict.fromkeys(names, layer or 0)) for layer in layers]
    return min(found), max(found)


class _Devices:
    """Sets the devices of one block's values."""

    def __init__(self, parent: _Applying, region: Region, assign: Assign) -> None:
        self.parent = parent
        self.region = region
        self.assign = assign

    def block(self, block: Block, run: Run) -> None:
        for site, op in zip(self.region.sites, block.ops, strict=True):
            if op.body is not None:
                continue
            device = self._device(site.number, op)
            at = CPU if device == STREAM else device
            runs_on = self.parent.home if device == STREAM else device
            for result in op.results:
                if not isinstance(result.type, BatchType):
                    result.type = result.type.on(self.parent.printed(runs_on))
            for position, operand in enumerate(op.operands):
                if isinstance(operand, WeightRef):
                    lies = at if operand.name in site.matrices else runs_on
                    self.parent.use(lies, op, position, run.layers)

    def _device(self, number: int, op: Op) -> str:
        values = [*op.values, *op.results]
        if any(isinstance(v.type, StateType) for v in values):
            return self.parent.decision.state
        if op_def(op.name).is_view and op.values:
            return self._where(op.values[0])
        return self.assign.get(number, self.parent.home)

    def _where(self, value: Value) -> str:
        return value.type.device or self.parent.home


# -- report ----------------------------------------------------------------------------------------
def _renamed(rows: Sequence[Row], region: Region, block: Block) -> Iterator[Row]:
    """Rows with the names that the ops have after repeats were split, which may add ops."""
    for row in rows:
        op = _op_in(block, region, row.number)
        names = ", ".join(f"%{r.name}" for r in op.results)
        yield replace(row, value=f"{row.value.split(' ')[0]} {names}")


def _op_in(block: Block, region: Region, number: int) -> Op:
    """The op of a site in the block of one of the region's runs."""
    own = region.sites[number].op
    return own if own.block is block else block.ops[number]


def _report(module: Module, ctx: PassContext, decision: Decision, rows: Sequence[Row]) -> None:
    from ktgraph.analysis import cost_text

    machine = decision.machine
    for name, call in decision.calls.items():
        ctx.note(
            f"@{name}: {decision.seconds(name) * 1e3:.4g} ms predicted "
            f"for {call.tokens} new tokens at {call.rows} rows"
        )
    for device in machine.devices:
        ctx.note(f"{device}: {round_size(decision.used(device))} used")
    for line in _expert_lines(decision):
        ctx.note(line)
    for name in _unknown(decision):
        ctx.note(f"{name} has no cost rule: its FLOPs are left out")
    ctx.artifacts["placement.txt"] = placement_text(decision, rows)
    ctx.artifacts["cost.txt"] = cost_text(module, machine.target, decision.calls, machine.home)


def _expert_lines(decision: Decision) -> Iterator[str]:
    """Where the routed experts of each function run."""
    home = decision.machine.home
    shown: Mapping[str, str] = {STREAM: f"streamed to {home}", home: f"resident on {home}"}
    for region in decision.regions:
        for run in decision.runs[region.number]:
            for site in (s for s in region.sites if s.is_experts):
                device = decision.device(region, run, site)
                where = shown.get(device, f"computed on {device}")
                if site.number in run.slots:
                    what = "bytes" if device == STREAM else "choices expected"
                    share = f"{run.shares[site.number]:.0%} of {what}"
                    where = f"{where}, {run.slots[site.number]} hot ones on {home} ({share})"
                if site.late and device == CPU:
                    where = f"{where}, priced with {site.late:.0%} of it a layer later"
                layers = layers_of(site.op, run.layers)
                at = "" if layers[0] is None else f" of layers {layers_text(layers)}"
                yield f"@{region.func.name}: experts{at} {where}"


def _unknown(decision: Decision) -> list[str]:
    return sorted({s.op.name for r in decision.regions for s in r.sites if not s.cost.known})


__all__ = ["Place", "PlacementError"]
