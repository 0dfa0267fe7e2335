"""What the benchmark of whole models tells of hot experts, and the floor that it measures by."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hybrid_models import HOT, OPTIONS, bind, plan_of

from ktgraph.runtime.plan import Plan

_BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(scope="module")
def hybrid() -> Any:
    """bench/hybrid.py, which is a script and imports its neighbours."""
    sys.path.insert(0, str(_BENCH))
    try:
        spec = importlib.util.spec_from_file_location("bench_hybrid", _BENCH / "hybrid.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # its dataclasses look themselves up
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(_BENCH))
    return module


def test_the_share_of_hot_experts(hybrid: Any) -> None:
    """Three experts of six and the other three share every choice of the same tokens."""
    found: list[dict[str, float]] = []
    for experts in ([0, 1, 2], [3, 4, 5]):
        runner = bind(plan_of("gqa", HOT).module, OPTIONS)
        for layer in (0, 1):
            runner.set_residency(layer, experts)
        runner.settle_residency()
        torch.manual_seed(0)
        share = hybrid.hot_share(runner, 8)
        assert share is not None
        found.append(share)
        runner.executor.close()
    assert [f["slots"] for f in found] == [3, 3]
    assert 0 < found[0]["share"] < 1
    assert found[0]["share"] + found[1]["share"] == pytest.approx(1)


def test_the_floor_counts_by_the_share(hybrid: Any) -> None:
    """Bytes of chosen experts move from the CPU to the GPU, and the slower side binds."""
    read = hybrid.bytes_of(Plan.build(plan_of("gqa", HOT, quantize="int8").module))
    assert read.gpu_experts == read.cpu_experts > 0  # half of the experts are hot
    parted = hybrid.with_share(read, 0.75)
    assert parted.gpu_experts == 3 * parted.cpu_experts
    assert parted.gpu_experts + parted.cpu_experts == read.gpu_experts + read.cpu_experts
    floors = [hybrid.decode_floor(hybrid.with_share(read, s), 0, 1e6, 1e9) for s in (0, 0.5, 1)]
    assert floors[0] > floors[1] > floors[2]
    assert floors[0] >= (read.gpu_experts + read.cpu_experts) / 1e6


def test_a_burst_has_the_better_of_the_readings_around_it(
    hybrid: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps go below a floor by the mean of them."""
    for name, count in (("WARM", 1), ("BURSTS", 3), ("SETTLE", 1), ("BURST", 2)):
        monkeypatch.setattr(hybrid, name, count)
    readings = iter([3e9, 1e9, 2e9, 0.0])
    runner = bind(plan_of("gqa", HOT).module, OPTIONS)
    bursts = hybrid.decode_bursts(runner, 4, lambda: next(readings))
    runner.executor.close()
    assert [b.bandwidth for b in bursts] == [3e9, 2e9, 2e9]
    assert [len(b.steps) for b in bursts] == [2, 2, 2]
    assert all(b.cpu > 0 for b in bursts)
