"""One forecast: a traced model on one machine, from types and prices alone.

The model is lowered as `kt.compile` lowers it, and what it then needs is held against the target's
memory.  Where RAM is short it is lowered for a host whose RAM has no end; what lacks of the routed
experts is priced as read from disk at every use, and the forecast says that `kt.compile` refuses
it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ktgraph.analysis import CallCost, CostAnalysis, Limit
from ktgraph.compile_options import compile_options
from ktgraph.errors import MemoryBudgetError
from ktgraph.ir.graph import Module
from ktgraph.pass_api import CompileOptions, PassContext
from ktgraph.pass_manager import PassManager
from ktgraph.placement.graph import CPU
from ktgraph.placement.lanes import DiskTier
from ktgraph.planner.holdings import ROUTED, Holding, holdings
from ktgraph.planner.what_if import Setting
from ktgraph.runtime.cache import CacheShape
from ktgraph.runtime.memory import MemoryNeed, choose_cache, memory_need
from ktgraph.runtime.plan import Plan
from ktgraph.stages import Traced
from ktgraph.target import ASSUMED_DISK, Target, round_size, with_threads

_ENDLESS = 1 << 50  # bytes of RAM
_TERMS = 6  # shown of a device that is too small


@dataclass(frozen=True)
class Phase:
    """A call of one function: what it takes, and what its seconds go to (largest first)."""

    name: str
    tokens: int
    rows: int  # in the cache at its end, over all sequences
    seconds: float
    limits: tuple[Limit, ...]

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    @property
    def bound(self) -> Limit:
        """What binds it: the largest share of its seconds."""
        return self.limits[0]


@dataclass(frozen=True)
class FromDisk:
    """What RAM does not hold of the routed experts."""

    nbytes: float
    share: float  # of the routed experts' bytes on the host
    a_token: float  # bytes that a decode step reads, for each sequence


@dataclass(frozen=True)
class Forecast:
    """What a setting is predicted to do.  `refusal`: why `kt.compile` would not take it, or "".

    A refused forecast has phases all the same when only RAM is short and disk can hold the rest;
    without them `need` is None too.
    """

    name: str
    setting: Setting
    options: CompileOptions
    refusal: str
    need: MemoryNeed | None = None
    cache: CacheShape | None = None
    holdings: tuple[Holding, ...] = ()
    prefill: Phase | None = None
    decode: Phase | None = None
    prompt: Phase | None = None  # a prompt of half the context, in as many calls as it takes
    disk: FromDisk | None = None
    module: Module | None = None  # lowered

    @property
    def fits(self) -> bool:
        return not self.refusal

    @property
    def target(self) -> Target:
        return self.setting.target

    def memory(self, device: str) -> int:
        """Bytes that it takes of a device; 0 when nothing could be placed."""
        return self.need.on(device).total if self.need is not None else 0


def forecast(name: str, traced: Traced, setting: Setting) -> Forecast:
    """Lower, count and price a traced model.

    Raises errors of options and rules; a model that does not fit is a forecast with a `refusal`.
    """
    given = {**setting.options, "max_batch": setting.batch}
    options = compile_options(traced.given.card, traced.dtype, given)
    target = with_threads(setting.target, options.threads)
    setting = replace(setting, target=target)
    try:
        module = _lowered(traced, target, options, setting.batch)
    except MemoryBudgetError:
        try:
            module = _lowered(traced, _with_endless_ram(target), options, setting.batch)
        except MemoryBudgetError as error:  # a GPU is short
            return Forecast(name, setting, options, str(error))
    plan = Plan.build(module)
    room = {d.name: d.memory for d in target.devices if d.kind != "cpu"}
    cache = choose_cache(plan, options, {CPU: _ENDLESS, **room}, target.cpu_threads)
    need = memory_need(plan, cache, target.cpu_threads)
    lies = tuple(holdings(plan))
    short = _short(need, target)
    tier, disk = None, None
    if CPU in short:
        tier = _tier(need, lies, target)
    if any(device != CPU for device in short) or (CPU in short and tier is None):
        refusal = _refusal(need, target, short)
        return Forecast(name, setting, options, refusal, need, cache, lies, module=module)
    costs = CostAnalysis(module, target, tier)
    decode = _decode(costs, options, setting.batch)
    if tier is not None:
        disk = _from_disk(need, target, tier, decode, setting.batch)
    return Forecast(
        name, setting, options, _refusal(need, target, short), need, cache, lies,
        _phase(costs.at(T=_chunk(options), phase="prefill")), _phase(decode),
        _prompt(costs, options), disk, module,
    )  # fmt: skip


def _lowered(traced: Traced, target: Target, options: CompileOptions, batch: int) -> Module:
    """The module after every pass; no weight is read."""
    module = traced.ir.clone()
    pipeline = f"default,place{{batch={batch}}}"
    PassManager().run(module, pipeline, PassContext(target, None, options), validate=0)
    return module


def _with_endless_ram(target: Target) -> Target:
    for host in [d for d in target.devices if d.kind == "cpu"]:
        target = target.with_device(replace(host, memory=_ENDLESS))
    return target


# -- memory ----------------------------------------------------------------------------------------
def _short(need: MemoryNeed, target: Target) -> list[str]:
    """Devices that have less than is needed."""
    return [d.name for d in target.devices if need.on(d.name).total > d.memory]


def _refusal(need: MemoryNeed, target: Target, short: list[str]) -> str:
    lines: list[str] = []
    for device in short:
        here = need.on(device)
        lines.append(
            f"{device} has {round_size(target.device(device).memory)}, and this needs "
            f"{round_size(here.total)} there. The largest terms:"
        )
        lines += MemoryNeed(here.terms[:_TERMS]).table().split("\n")[:-1]
    return "\n".join(lines)


def _tier(need: MemoryNeed, lies: tuple[Holding, ...], target: Target) -> DiskTier | None:
    """The share of routed experts that RAM is short of; None when it is more than all of them."""
    experts = sum(h.nbytes for h in lies if h.what == ROUTED and h.device == CPU)
    missing = need.on(CPU).total - target.cpu.memory
    if missing > experts:
        return None
    return DiskTier(target.disk or ASSUMED_DISK, missing / experts)


def _from_disk(
    need: MemoryNeed, target: Target, tier: DiskTier, decode: CallCost, batch: int
) -> FromDisk:
    predicted = decode.predicted
    touched = sum(predicted.times.host_experts(step.op) for step in predicted.steps)
    missing = need.on(CPU).total - target.cpu.memory
    return FromDisk(missing, tier.share, tier.share * touched / batch)


# -- speed -----------------------------------------------------------------------------------------
def _chunk(options: CompileOptions) -> int:
    """New tokens of a full prefill call."""
    return min(options.max_tokens, options.context)


def _decode(costs: CostAnalysis, options: CompileOptions, batch: int) -> CallCost:
    """One token for each sequence at the end of its context."""
    return costs.at(T=batch, S=batch * options.context, B=batch, phase="decode")


def _phase(cost: CallCost) -> Phase:
    call = cost.call
    return Phase(cost.func.name, call.tokens, call.rows, cost.seconds, tuple(cost.limits))


def _prompt(costs: CostAnalysis, options: CompileOptions) -> Phase:
    """A prompt of half the context, chunk by chunk."""
    total = max(options.context // 2, 1)
    seconds, sums = 0.0, dict[tuple[str, str], float]()
    for start in range(0, total, _chunk(options)):
        rows = min(start + _chunk(options), total)
        cost = costs.at(T=rows - start, S=rows, phase="prefill")
        seconds += cost.seconds
        for limit in cost.limits:
            key = (limit.kind, limit.where)
            sums[key] = sums.get(key, 0.0) + limit.seconds
    limits = sorted((Limit(*k, s) for k, s in sums.items()), key=lambda x: -x.seconds)
    return Phase("prompt", total, total, seconds, tuple(limits))


__all__ = ["Forecast", "FromDisk", "Phase", "forecast"]
