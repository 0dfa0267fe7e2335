"""From a module, a target and what the user asked for to a decision: what lies and runs where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from ktgraph.cost import Call, type_nbytes
from ktgraph.errors import MemoryBudgetError
from ktgraph.ir.dims import Dim
from ktgraph.ir.graph import Function, Module
from ktgraph.ir.types import Encoding, StateType, TensorType
from ktgraph.pass_api import CompileOptions
from ktgraph.placement.decision import Decision, Run, Settings, Term
from ktgraph.placement.graph import (
    CPU,
    GPU_WORKSPACE,
    HOT,
    ON_HOST,
    STREAM,
    STREAM_BUFFERS,
    Machine,
    Region,
    Site,
    regions_of,
)
from ktgraph.placement.hot import (
    Wish,
    asked_nbytes,
    check_popularity,
    choose_hot,
    wishes,
)
from ktgraph.placement.hot_runs import all_hot, hot_runs, may_be_hot, split_values
from ktgraph.placement.lanes import op_workspace
from ktgraph.placement.late import mark_late
from ktgraph.placement.partition import (
    Budget,
    Cell,
    Config,
    Fixed,
    NothingFitsError,
    Pricer,
    Solution,
    layer_configs,
    make_cells,
    solve,
)
from ktgraph.placement.rules import (
    Rule,
    RuleError,
    match_rules,
    rule_encodings,
)
from ktgraph.runtime.arena import phase_sizes, plan_arena
from ktgraph.runtime.cache import CacheShape
from ktgraph.target import Target
from ktgraph.target.description import round_size
from ktgraph.weights.encodings import parse_encoding
from ktgraph.weights.policy import Policy

_BUDGET_ENCODING = parse_encoding("int8")  # what a policy's error budget is priced as


# -- what is priced --------------------------------------------------------------------------------
def phase_call(func: Function, settings: Settings) -> Call:
    """A typical call: decode at the end of each sequence's context, prefill one chunk."""
    bound = func.attrs.get("max_q")
    most = bound.const() if isinstance(bound, Dim) and bound.is_const else None
    if func.attrs.get("phase") == "decode" or most == 1:
        return Call.decode(max(settings.context - 1, 0), settings.batch)
    tokens = min(most or settings.options.max_tokens, settings.context)
    return Call.prefill(max(tokens, 1))


def request_calls(
    module: Module, calls: Mapping[str, Call], settings: Settings
) -> dict[str, float]:
    """How often each function runs in a request: half the context is prompt, a quarter is new."""
    counts: dict[str, float] = {}
    for func in module.functions.values():
        tokens = calls[func.name].tokens
        is_decode = func.attrs.get("phase") == "decode"
        counts[func.name] = (
            max(settings.context / 4, 1.0)
            if is_decode
            else max(settings.context / 2 / max(tokens, 1), 1.0)
        )
    return counts


def planned_encodings(module: Module, settings: Settings) -> dict[str, Encoding]:
    """How weights will be stored by the policy."""
    found: dict[str, Encoding] = {}
    text = settings.options.quantize
    if text is not None:
        for decision in Policy.parse(text).decide(module):
            if decision.encoding is not None:
                found[decision.use.name] = decision.encoding
            elif decision.budget is not None:
                found[decision.use.name] = _BUDGET_ENCODING
    return found


def decide(module: Module, target: Target, settings: Settings) -> Decision:
    """Choose; raises MemoryBudgetError when the module fits nowhere, RuleError for bad rules."""
    machine = Machine.of(target)
    calls = {f.name: phase_call(f, settings) for f in module.functions.values()}
    encodings = planned_encodings(module, settings)
    by_rule = rule_encodings(module, settings.rules)
    regions = regions_of(module, machine, calls, encodings, by_rule)
    mark_late(regions, settings.options.defer)
    check_popularity(module, regions, settings.popularity)
    held = _held_rules(module, machine, settings, regions)
    attempt = partial(_decide_by, module, machine, settings, regions, calls, encodings)
    found = attempt(held)
    if settings.popularity is None or not may_be_hot(found):
        return found
    for prefill in (STREAM, HOT):
        try:
            other = attempt(all_hot(regions, held, settings.popularity, prefill))
        except MemoryBudgetError:  # no room for one expert of each layer
            continue
        found = min(found, other, key=lambda d: d.request_seconds)
    return found


def _decide_by(
    module: Module,
    machine: Machine,
    settings: Settings,
    regions: list[Region],
    calls: dict[str, Call],
    encodings: dict[str, Encoding],
    held: dict[tuple[int, int, int | None], Rule],
) -> Decision:
    """The decision under rules; with as many cache rows as wanted, or else with one context."""
    states = _states(machine, regions, held)
    cells = make_cells(regions, _fixed(held, regions))
    hot = wishes(module, regions, held)
    wanted = settings.options.cache_rows or settings.options.context * settings.options.max_batch
    least = settings.options.cache_rows or settings.options.context
    base = partial(_base_terms, module, machine, settings, regions)
    attempt = partial(_attempt, module, machine, settings, regions, cells, hot)
    try:
        return attempt(base(wanted), calls, states, encodings, wanted, held)
    except MemoryBudgetError:
        if least == wanted:
            raise
    return attempt(base(least), calls, states, encodings, least, held)


def _attempt(
    module: Module,
    machine: Machine,
    settings: Settings,
    regions: list[Region],
    cells: list[Cell],
    hot: Mapping[str, Wish],
    base: Sequence[Term],
    calls: dict[str, Call],
    states: Sequence[str],
    encodings: dict[str, Encoding],
    rows: int,
    held: dict[tuple[int, int, int | None], Rule],
) -> Decision:
    memory = home_memory(machine, settings)
    state_bytes = sum(t.nbytes for t in base if t.kind == "kv")
    fixed_bytes = sum(t.nbytes for t in base if t.kind != "kv") + asked_nbytes(hot)
    experts = [s.streamed_bytes for r in regions for s in r.sites if s.is_experts]
    stream = STREAM_BUFFERS * max(experts, default=0.0)
    budget = Budget(memory - fixed_bytes - state_bytes, state_bytes, stream)
    counts = request_calls(module, calls, settings)
    try:
        solution, pricer = solve(cells, machine, counts, budget, states)
    except NothingFitsError:
        slots = _slot_terms(machine, asked_nbytes(hot))
        everything = [*base, *slots, *_all_weights(module, regions, machine.home)]
        stays = everything
        if machine.is_hybrid:
            stays = [*slots, *_least_terms(module, regions, machine, base, states, held)]
        raise no_room(machine.home, memory, everything, stays) from None
    runs = _runs(regions, cells, solution, pricer)
    decision = Decision(
        machine, settings, calls, counts, encodings, regions, runs, solution.state,
        _streams(runs), rows, [], budget.room, pricer, held,
    )  # fmt: skip
    decision.terms = _terms(decision, base, stream)
    if hot:
        spare = memory - decision.used(machine.home) - split_values(regions)
        decision.hot = choose_hot(hot, spare, settings.popularity)
        slots = sum(layer.nbytes for layer in decision.hot.values())
        decision.terms = _terms(decision, [*base, *_slot_terms(machine, slots)], stream)
        decision.runs = hot_runs(module, decision)
    host = machine.target.device(CPU).memory if machine.is_hybrid else memory
    if machine.is_hybrid and decision.used(CPU) > host:
        raise no_room(CPU, host, decision.terms, decision.terms)
    return decision


def _slot_terms(machine: Machine, nbytes: float) -> list[Term]:
    return [Term(machine.home, "weights", "slots of hot experts", nbytes)]


def home_memory(machine: Machine, settings: Settings) -> float:
    """Bytes of the home device that may be used; `gpu_memory` lowers a GPU's."""
    memory = machine.target.device(machine.home).memory
    if settings.gpu_memory is None or machine.home == CPU:
        return float(memory)
    return float(min(memory, settings.gpu_memory))


# -- rules -----------------------------------------------------------------------------------------
def _held_rules(
    module: Module, machine: Machine, settings: Settings, regions: Sequence[Region]
) -> dict[tuple[int, int, int | None], Rule]:
    if not settings.rules:
        return {}
    devices = (*machine.devices, STREAM, HOT) if machine.is_hybrid else machine.devices
    found = match_rules(module, settings.rules, devices)
    places: dict[int, tuple[Region, Site]] = {
        id(s.op): (r, s) for r in regions for s in r.sites if not s.is_barrier
    }
    out: dict[tuple[int, int, int | None], Rule] = {}
    for (op, layer), rule in found.items():
        region, site = places[id(op)]
        if rule.device == STREAM and not site.is_experts:
            raise RuleError(f"{rule}: only routed experts are streamed, and this is\n  {op}")
        out[region.number, site.number, layer] = rule
    return out


def _fixed(held: Mapping[tuple[int, int, int | None], Rule], regions: Sequence[Region]) -> Fixed:
    """Devices that rules set, for ops that do not follow the state, and of ops of the host.

    Hot experts leave the rest to the CPU.
    """
    fixed = {
        key: CPU if rule.device == HOT else rule.device
        for key, rule in held.items()
        if rule.device is not None and not regions[key[0]].sites[key[1]].has_state
    }
    for region in regions:
        for site in (s for s in region.sites if s.op.name in ON_HOST):
            for layer in region.layers:
                key = (region.number, site.number, layer)
                if fixed.setdefault(key, CPU) != CPU:
                    raise RuleError(
                        f"{held[key]} asks for {fixed[key]}, but {site.op.name} runs on the cpu, "
                        f"where what it calls lives\n  in: {site.op}"
                    )
    return fixed


def _states(
    machine: Machine, regions: Sequence[Region], held: Mapping[tuple[int, int, int | None], Rule]
) -> list[str]:
    """Devices where the cache may lie: a rule for an op on the cache decides for all of them."""
    asked: dict[str, Rule] = {}
    for (region, site, _), rule in held.items():
        if rule.device is not None and regions[region].sites[site].has_state:
            asked.setdefault(rule.device, rule)
    if len(asked) > 1:
        shown = " and ".join(f"{device} ({rule})" for device, rule in asked.items())
        raise RuleError(f"the cache is one state and lies on one device; rules ask for {shown}")
    return list(asked) or list(machine.devices)


# -- memory ----------------------------------------------------------------------------------------
def _base_terms(
    module: Module,
    machine: Machine,
    settings: Settings,
    regions: Sequence[Region],
    rows: int,
) -> list[Term]:
    """What lies at home besides matrices: cache, activations, workspace, vectors."""
    home = machine.home
    cache = cache_nbytes(module, settings.options, rows)
    terms = [Term(home, "kv", f"cache of {rows} rows", cache)]
    arenas = [
        float(plan_arena(module, f, phase_sizes(f, settings.options)).nbytes)
        for f in module.functions.values()
    ]
    terms.append(Term(home, "activations", "values of one call", max(arenas, default=0.0)))
    ops = [(s.op, r.sizes) for r in regions for s in r.sites if not s.is_barrier]
    scratch = max((op_workspace(module, op, sizes) for op, sizes in ops), default=0.0)
    if home == CPU:
        terms.append(Term(home, "workspace", "inside kernels (estimate)", scratch))
    else:
        what = "scratch of kernels, graphs and libraries"
        terms.append(Term(home, "workspace", what, float(GPU_WORKSPACE)))
    vectors: dict[str, float] = {}
    for region in regions:
        for site in region.sites:
            for ref, nbytes in site.weights:
                if ref.name not in site.matrices:
                    vectors[ref.name] = nbytes * module.weight_of(ref).members
    terms.append(Term(home, "weights", "norms, biases and tables", sum(vectors.values())))
    return [t for t in terms if t.nbytes > 0]


def cache_nbytes(module: Module, options: CompileOptions, rows: int) -> float:
    """Bytes of the caches that the first function takes, at `rows` rows a layer.

    Caches of a window take what that many rows can need of it.
    """
    func = next(iter(module.functions.values()), None)
    args = func.args if func is not None else []
    types = [a.type for a in args if isinstance(a.type, StateType)]
    shape = CacheShape.of(types, module.dims, options, -(-rows // options.page_size))
    total = 0.0
    for type in types:
        kept = rows if type.window is None else shape.rows_of(type, module.dims)
        sizes = {**module.dims, "C": kept}
        total += type.layers.at(sizes) * sum(type_nbytes(p, sizes) for p in type.parts)
    return total


def _all_weights(module: Module, regions: Sequence[Region], device: str) -> list[Term]:
    found: dict[str, Term] = {}
    for region in regions:
        for site in region.sites:
            for ref, nbytes in site.heavy_weights:
                members = module.weight_of(ref).members
                found[ref.name] = Term(device, "weights", f"@{ref.name}", nbytes * members)
    return list(found.values())


def _terms(decision: Decision, base: Sequence[Term], stream: float) -> list[Term]:
    """Every term once the choice is made."""
    home = decision.machine.home
    terms = [Term(decision.state, t.kind, t.name, t.nbytes) if t.kind == "kv" else t for t in base]
    seen: set[tuple[str, str, int | None]] = set()
    sums: dict[tuple[str, str], float] = {}
    moved = 0.0
    for region in decision.regions:
        for run in decision.runs[region.number]:
            for site in region.sites:
                moved += _add_weights(decision, region, run, site, seen, sums)
    for (device, name), nbytes in sums.items():
        terms.append(Term(device, "weights", f"@{name}", nbytes))
    if decision.streams:
        terms.append(
            Term(home, "workspace", f"{STREAM_BUFFERS} buffers of a streamed layer", stream)
        )
    if decision.machine.is_hybrid:
        terms.append(Term(CPU, "pinned", "values that cross", moved))
    return sorted((t for t in terms if t.nbytes > 0), key=lambda t: (t.device, -t.nbytes))


def _add_weights(
    decision: Decision,
    region: Region,
    run: Run,
    site: Site,
    seen: set[tuple[str, str, int | None]],
    sums: dict[tuple[str, str], float],
) -> float:
    """Count a site's matrices where they lie; returns bytes of results made on the host."""
    if site.is_barrier:
        return 0.0
    device = decision.device(region, run, site)
    lies = CPU if device == STREAM else device
    for ref, nbytes in site.heavy_weights:
        for layer in run.layers:
            key = (ref.name, lies, layer if ref.index is not None else None)
            if key not in seen:
                seen.add(key)
                here = site.nbytes_on(lies, ref, nbytes)
                sums[lies, ref.name] = sums.get((lies, ref.name), 0.0) + here
    if device != CPU or site.is_view:
        return 0.0
    return sum(region.nbytes(r) for r in site.op.results if isinstance(r.type, TensorType))


def _streams(runs: Mapping[int, Sequence[Run]]) -> bool:
    return any(STREAM in run.assign.values() for held in runs.values() for run in held)


def _least_terms(
    module: Module,
    regions: Sequence[Region],
    machine: Machine,
    base: Sequence[Term],
    states: Sequence[str],
    held: Mapping[tuple[int, int, int | None], Rule],
) -> list[Term]:
    """What lies at home when all that may leave has left: rules keep weights, and the cache."""
    kept = [t for t in base if t.kind != "kv" or CPU not in states]
    sums: dict[str, float] = {}
    counted: set[tuple[str, int | None]] = set()
    for (region, number, layer), rule in held.items():
        site = regions[region].sites[number]
        for ref, nbytes in site.heavy_weights if rule.device == machine.home else ():
            key = (ref.name, layer if ref.index is not None else None)
            if key not in counted:
                counted.add(key)
                sums[ref.name] = sums.get(ref.name, 0.0) + nbytes
    rules = "kept by a rule"
    return [*kept, *(Term(machine.home, "weights", f"@{n}, {rules}", b) for n, b in sums.items())]


def no_room(
    device: str, memory: float, everything: Sequence[Term], least: Sequence[Term]
) -> MemoryBudgetError:
    """What a device lacks: what all of it would take there, and the least that would do."""
    total = sum(t.nbytes for t in everything if t.device == device)
    here = sorted((t for t in least if t.device == device), key=lambda t: -t.nbytes)
    needed = sum(t.nbytes for t in here)
    shown = "\n".join(f"  {round_size(t.nbytes):>10}  {t.kind:<11}  {t.name}" for t in here[:6])
    whole = f"this needs {round_size(needed)} there"
    if total > needed:
        whole = (
            f"with every matrix on the cpu that may leave it needs {round_size(needed)}, which is "
            f"the least that does; everything there would take {round_size(total)}"
        )
    return MemoryBudgetError(
        f"the model does not fit: {device} has {round_size(memory)}; {whole}. The largest terms:\n"
        f'{shown}\nCompile with quantize="int4p(group=64)", or a smaller context, max_batch or '
        "max_tokens"
    )


# -- layers ----------------------------------------------------------------------------------------
def _runs(
    regions: Sequence[Region], cells: Sequence[Cell], solution: Solution, pricer: Pricer
) -> dict[int, list[Run]]:
    chosen: dict[tuple[int, int | None], tuple[Cell, Config]] = {}
    for cell in cells:
        for layer, config in layer_configs(cell, solution.configs[cell.number]):
            for region in cell.regions:
                chosen[region.number, layer] = (cell, config)
    runs: dict[int, list[Run]] = {}
    for region in regions:
        held: list[Run] = []
        for layer in region.layers:
            cell, config = chosen[region.number, layer]
            assign, seconds = pricer.best(cell, region, config)
            if held and dict(held[-1].assign) == dict(assign):
                last = held[-1]
                held[-1] = Run((*last.layers, layer), last.cell, last.config, assign, seconds)
            else:
                held.append(Run((layer,), cell, config, assign, seconds))
        runs[region.number] = held
    return runs


__all__ = [
    "cache_nbytes",
    "decide",
    "home_memory",
    "no_room",
    "phase_call",
]
