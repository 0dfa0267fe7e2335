"""Memory is known from types alone, and refused before anything is loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from lowered_models import MODELS, NATIVE, OPTIONS, lower, make_pair

from ktgraph.errors import MemoryBudgetError
from ktgraph.pass_api import CompileOptions
from ktgraph.runtime import runner as runner_module
from ktgraph.runtime.cache import CacheShape
from ktgraph.runtime.memory import check_memory, choose_cache, memory_need
from ktgraph.runtime.packed import use_nbytes
from ktgraph.runtime.plan import Plan
from ktgraph.runtime.runner import Runner
from ktgraph.target.probe import MemoryInfo
from ktgraph.weights.sources import RandomSource

GIB = 1 << 30


def plan(name: str = "mla", **options: Any) -> Plan:
    module = MODELS[name]()
    pipeline = NATIVE.replace("pack-weights", "quantize,pack-weights")
    lower(module, pipeline, replace(OPTIONS, **options))
    return Plan.build(module)


@pytest.mark.parametrize("quantize", [None, "int8", "int4(group=32)"])
@pytest.mark.parametrize("name", MODELS)
def test_bytes_from_types_are_those_loaded(name: str, quantize: str | None) -> None:
    pipeline = NATIVE.replace("pack-weights", "quantize,pack-weights")
    pair = make_pair(name, pipeline, quantize=quantize)
    executor = pair.runner.executor
    need = memory_need(executor.plan, executor.shape, 2)
    assert need.of("weights") == executor.weights.nbytes
    states = sum(part.nbytes for state in executor.states for part in state.parts)
    assert need.of("cache") == states
    assert need.of("activations") == executor.plan.arena_nbytes("cpu")
    for use in executor.plan.uses():
        assert executor.weights.tensors[use.key].nbytes == use_nbytes(use)


@pytest.mark.parametrize("threads", [1, 2, 16])
@pytest.mark.parametrize("context", [64, 4000, 100_000])
@pytest.mark.parametrize("name", MODELS)
def test_scratch_covers_every_call(name: str, context: int, threads: int) -> None:
    """The engine is asked for every size of call; the need is the largest answer, not less."""
    runner = make_pair(name, max_tokens=37).runner
    executor: Any = runner.executor
    shape = CacheShape(4, context // 4 * OPTIONS.max_batch, context)
    told = memory_need(runner.plan, shape, threads).of("workspace")
    calls = [
        native.scratch(t, min(t, phase.arena.sizes.rows), q, min(t, new), context, threads)
        for phase in runner.plan.phases
        for native in executor.native_plans(phase.name)
        for new in [min(phase.max_q or 37, phase.arena.sizes.tokens)]
        for q in range(1, phase.arena.sizes.batch + 1)
        for t in range(q, phase.arena.sizes.tokens + 1)
    ]
    needed = max(shared + threads * local for shared, local in calls)
    assert needed <= told <= 1.5 * needed


def test_long_texts_are_told_before_loading() -> None:
    """Decoding a long text divides its keys among the threads: partial results by chunk."""
    given = plan("gqa", context=1_000_000, cache_rows=1_000_000)
    short, long = (
        memory_need(given, CacheShape(4, rows // 4, rows), 16) for rows in (4000, 1_000_000)
    )
    assert long.of("workspace") > 100 * short.of("workspace")
    available = long.total - long.of("workspace") // 2
    with pytest.raises(MemoryBudgetError, match="texts of 1000000 rows"):
        check_memory(long, {"cpu": available})


def test_int4_is_smaller() -> None:
    plans = [plan(quantize=q) for q in (None, "int8", "int4(group=32)")]
    sizes = [sum(map(use_nbytes, p.uses())) for p in plans]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 3


def test_the_table_sums_families() -> None:
    need = memory_need(plan("gqa"), choose_cache(plan("gqa"), OPTIONS, {"cpu": GIB}, 2), 2)
    text = need.table()
    assert "@layers[].mlp.experts.gate_up_proj.p as tile.bf16(gate_up=yes) x 2" in text
    assert "240 rows of 512 bytes" in text
    assert text.rstrip().endswith("in all")
    assert [t.nbytes for t in need.terms] == sorted((t.nbytes for t in need.terms), reverse=True)


def test_the_cache_is_what_memory_has_room_for() -> None:
    given = plan()
    free = CompileOptions(context=64, page_size=4, max_batch=4)
    assert choose_cache(given, free, {"cpu": GIB}, 1).rows == 256
    without = memory_need(given, choose_cache(given, free, {"cpu": 0}, 1), 1)
    little = int((without.total + 100 * 256) / 0.95) + 1  # 100 rows of 256 bytes more than one text
    assert choose_cache(given, free, {"cpu": little}, 1).rows == 164
    assert choose_cache(given, free, {"cpu": 0}, 1).rows == 64
    asked = replace(free, cache_rows=101)
    assert (
        choose_cache(given, asked, {"cpu": 0}, 1).rows == 104
    )  # whole pages, and not less than asked


@pytest.mark.parametrize(
    ("change", "threads", "advice"),
    [
        ({}, 64, "max_tokens, context or max_batch, or fewer threads"),
        ({"cache_rows": 10**9}, 1, "smaller cache_rows, context or max_batch$"),
    ],
)
def test_too_large_says_what_is_large(change: dict[str, int], threads: int, advice: str) -> None:
    given, options = plan(), replace(OPTIONS, **change)
    need = memory_need(given, choose_cache(given, options, {"cpu": 10}, threads), threads)
    with pytest.raises(MemoryBudgetError, match=advice) as caught:
        check_memory(need, {"cpu": 100 << 10})
    text = str(caught.value)
    assert "100 KiB are available" in text
    assert need.terms[0].name in text
    check_memory(need, {"cpu": 2 * need.total})


def test_nothing_is_loaded_when_it_cannot_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    module = MODELS["mla"]()
    lower(module)
    source = RandomSource(module)

    def loaded(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(source, "get", loaded)
    monkeypatch.setattr(runner_module, "probe_memory", lambda: MemoryInfo(GIB, 100 << 10, None))
    with pytest.raises(MemoryBudgetError, match="The largest terms"):
        Runner.load(module, source, OPTIONS)
