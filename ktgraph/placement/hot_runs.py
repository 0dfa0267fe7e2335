"""Hot experts in a decision: where they may pay, and runs of layers with slots, priced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from ktgraph.ir.graph import Module
from ktgraph.placement.decision import Decision, Run
from ktgraph.placement.graph import CPU, HOT, STREAM, Region
from ktgraph.placement.hot import Held, HotLayer, stack_key
from ktgraph.placement.popularity import Popularity
from ktgraph.placement.rules import Rule
from ktgraph.runtime.arena import max_q


def may_be_hot(decision: Decision) -> bool:
    """Whether some experts are on the host, and no rule says which are hot."""
    if decision.hot or not decision.machine.is_hybrid:
        return False
    away = (CPU, STREAM)
    return any(
        decision.device(region, run, site) in away
        for region in decision.regions
        for run in decision.runs[region.number]
        for site in region.sites
        if site.op.name == "moe.grouped_mlp"
    )


def all_hot(
    regions: Sequence[Region], held: Held, popularity: Popularity, prefill: str
) -> dict[tuple[int, int, int | None], Rule]:
    """The rules, and for experts that none speaks of: hot ones, in prefill hot ones or streams."""
    found = dict(held)
    for region in regions:
        is_prefill = region.func.attrs.get("phase") == "prefill"
        device = prefill if is_prefill else HOT
        rule = Rule(popularity.path, None, "moe.grouped_mlp", device, None, None)
        for site in region.sites:
            if site.op.name == "moe.grouped_mlp":
                for layer in region.layers:
                    found.setdefault((region.number, site.number, layer), rule)
    return found


def split_values(regions: Sequence[Region]) -> float:
    """Bytes of activations that the split adds: the hot experts' result, and two lists of ids."""
    sites = [(r, s.op) for r in regions for s in r.sites if s.op.name == "moe.grouped_mlp"]
    return max(r.nbytes(op.result) + 2 * r.nbytes(op.value(1)) for r, op in sites)


def hot_runs(module: Module, decision: Decision) -> dict[int, list[Run]]:
    """The runs, parted where layers have different numbers of slots."""
    found: dict[int, list[Run]] = {}
    for region in decision.regions:
        found[region.number] = held = list[Run]()
        for run in decision.runs[region.number]:
            sites = [_hot_sites(module, decision, region, run, layer) for layer in run.layers]
            pairs = zip(run.layers, sites, strict=True)
            for _, group in groupby(pairs, key=lambda p: {n: h.slots for n, h in p[1].items()}):
                layers, hot = zip(*group, strict=True)
                held.append(_with_hot(decision, region, replace(run, layers=layers), hot))
    return found


def _hot_sites(
    module: Module, decision: Decision, region: Region, run: Run, layer: int | None
) -> dict[int, HotLayer]:
    """The slots of a layer by site: of experts that the host computes, or streams for a prompt."""
    found: dict[int, HotLayer] = {}
    places = (CPU,) if max_q(region.func) == 1 else (CPU, STREAM)
    for site in region.sites:
        if site.op.name == "moe.grouped_mlp" and run.assign.get(site.number) in places:
            hot = decision.hot.get(stack_key(module, region, site, layer))
            found |= {} if hot is None else {site.number: hot}
    return found


def _with_hot(
    decision: Decision, region: Region, run: Run, hot: Sequence[Mapping[int, HotLayer]]
) -> Run:
    """The run and its price; `hot` by layer, with equally many slots in all of them."""
    if not hot[0]:
        return run
    shares: dict[int, float] = {}
    for number in hot[0]:
        layers = [sites[number] for sites in hot]
        parts = [
            layer.share if run.assign[number] == CPU else layer.slots / layer.of for layer in layers
        ]
        shares[number] = sum(parts) / len(parts)
    slots = {n: layer.slots for n, layer in hot[0].items()}
    seconds = decision.pricer.makespan(region, run.assign, shares)
    return replace(run, seconds=seconds, slots=slots, shares=shares)


__all__ = ["all_hot", "hot_runs", "may_be_hot", "split_values"]
