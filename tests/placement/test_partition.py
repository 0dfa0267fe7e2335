"""The search against every possible choice on small modules."""

from itertools import product

import pytest
from placed_models import run, small_target
from small_models import gqa_moe, mla_moe

from ktgraph.ir.graph import Module
from ktgraph.pass_api import CompileOptions
from ktgraph.placement.decide import phase_call, request_calls
from ktgraph.placement.decision import Settings
from ktgraph.placement.graph import Machine, regions_of
from ktgraph.placement.partition import Cell, NothingFitsError, Pricer, Search, make_cells

_FRONT = "specialize-phases,merge-linears,moe-group,fuse-norms,fuse-rope-kv"


def _module(name: str) -> Module:
    module = {"gqa": gqa_moe, "mla": mla_moe}[name]()
    wide = {"D": 512, "E": 16, "F": 512, "VOC": 4096}
    return run(module.rebind(**{k: v for k, v in wide.items() if k in module.dims}), _FRONT)


def _problem(name: str) -> tuple[list[Cell], Machine, dict[str, float]]:
    module = _module(name)
    machine = Machine.of(small_target(1 << 30))
    settings = Settings(CompileOptions(), context=256)
    calls = {f.name: phase_call(f, settings) for f in module.functions.values()}
    cells = make_cells(regions_of(module, machine, calls), {})
    return cells, machine, request_calls(module, calls, settings)


def _every(cells: list[Cell], pricer: Pricer, calls: dict[str, float]) -> list[tuple[float, float]]:
    """(bytes at home, seconds) of every assignment of units to layers that no other one beats."""
    choices: list[tuple[float, float]] = [(0.0, 0.0)]
    search = Search(cells, pricer, calls, 0.0)
    for cell in cells:
        options: list[tuple[float, float]] = []
        for bits in product([False, True], repeat=len(cell.units)):
            config = frozenset(u.number for u, b in zip(cell.units, bits, strict=True) if b)
            size = sum(u.nbytes for u in cell.units if u.number not in config)
            options.append((size, search.time(cell, config)))
        options = _pareto(options)
        for _ in cell.layers:
            choices = _pareto([(a + b, s + t) for a, s in choices for b, t in options])
    return choices


def _pareto(pairs: list[tuple[float, float]]) -> list[tuple[float, float]]:
    kept: list[tuple[float, float]] = []
    for size, time in sorted(pairs):
        if not kept or time < kept[-1][1] - 1e-15:
            kept.append((size, time))
    return kept


@pytest.mark.slow
@pytest.mark.parametrize(("name", "streams"), [("gqa", False), ("gqa", True), ("mla", False)])
def test_search_is_near_the_best_of_all_choices(name: str, streams: bool) -> None:
    cells, machine, calls = _problem(name)
    pricer = Pricer(machine, "cuda:0", streams)
    whole = Search(cells, pricer, calls, 0.0)
    every = _every(cells, pricer, calls)
    for share in (0.1, 0.2, 0.35, 0.5, 0.7, 0.9, 1.0):
        room = share * (whole.used() - whole.room)
        found = Search(cells, pricer, calls, room).run()
        best = min(t for size, t in every if size <= room + whole.room)
        assert best - 1e-12 <= found.seconds <= 1.02 * best, share
        assert found.home_bytes <= room


def test_too_little_room_for_what_the_cache_pins() -> None:
    cells, machine, calls = _problem("mla")  # kv_b is read by attention in prefill
    with pytest.raises(NothingFitsError):
        Search(cells, Pricer(machine, "cuda:0", False), calls, 10.0).run()


def test_units_join_phases_and_layers_of_a_repeat_are_alike() -> None:
    cells, _, _ = _problem("gqa")
    repeat = next(c for c in cells if c.layers == [0, 1])
    experts = next(u for u in repeat.units if any("experts" in n for n in u.names))
    assert len(experts.sites) == 2  # one op in each phase
    assert len(repeat.regions) == 2
    tied = next(c for c in cells if c.layers == [None])
    assert any(len(u.sites) == 4 for u in tied.units)  # embedding and head, twice
