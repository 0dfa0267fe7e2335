"""What a hybrid plan needs on each device is what it takes, and too small a GPU is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hybrid_models import EXPERTS, OPTIONS, make_hybrid, place, plan_of
from lowered_models import MODELS

import ktgraph as kt
from ktgraph.analysis import memory_analysis
from ktgraph.errors import MemoryBudgetError
from ktgraph.ir import parse_module
from ktgraph.runtime.arena import PlanError, arena_attrs, plan_arena, read_arena
from ktgraph.runtime.cache import CacheShape
from ktgraph.runtime.gpu.simulated import SimulatedDevice
from ktgraph.runtime.memory import GPU_WORKSPACE, memory_need
from ktgraph.runtime.plan import Plan
from ktgraph.runtime.runner import Runner
from ktgraph.weights.sources import RandomSource

SLACK = 256  # bytes of an arena for alignment
GPU = "cuda:0"


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize(("model", "quantize"), [("mla", None), ("gqa", "int4(group=32)")])
def test_the_need_of_each_device(model: str, quantize: str | None, experts: str) -> None:
    pair = make_hybrid(model, experts, quantize=quantize)
    executor, plan = pair.executor, pair.runner.plan
    need = memory_need(plan, executor.shape, 2)
    held: dict[str, int] = {"cpu": 0, GPU: 0}
    for use in plan.held():
        held[use.device] += executor.weights.tensors[use.key].nbytes
    assert held == {d: need.on(d).of("weights") for d in held}
    for device in held:
        assert executor.arenas[device].nbytes == need.on(device).of("activations") + SLACK
    states = sum(part.nbytes for state in executor.states for part in state.parts)
    assert (need.on(GPU).of("cache"), need.on("cpu").of("cache")) == (states, 0)
    buffers = sum(b.nbytes for b in executor.buffers)
    assert need.on(GPU).of("workspace") == GPU_WORKSPACE + buffers
    assert bool(buffers) == ("streamed" in experts)
    executor.close()


def test_streamed_experts_lie_on_the_host() -> None:
    shape = CacheShape(4, 60, 64)
    need = {e: memory_need(plan_of("mla", e), shape, 2) for e in EXPERTS}
    gpu = {e: n.on(GPU).of("weights") for e, n in need.items()}
    assert gpu["cpu"] == gpu["streamed"] == gpu["streamed prefill"] < gpu["resident"]


def test_logits_go_through_one_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory does not grow with the number of sizes that are called."""
    taken: list[int] = []
    host = SimulatedDevice.host

    def noted(self: SimulatedDevice, nbytes: int) -> torch.Tensor:
        taken.append(nbytes)
        return host(self, nbytes)

    monkeypatch.setattr(SimulatedDevice, "host", noted)
    pair = make_hybrid("mla", "cpu")
    before = len(taken)
    for length in range(1, 12):
        seq = pair.open()
        pair.forward([(seq, list(range(length)))], "all")
        pair.close(seq)
    pair.executor.close()
    assert len(taken) == before


def test_too_small_a_gpu_is_refused_before_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    module = MODELS["mla"]()
    place(module, "cpu")
    source = RandomSource(module)

    def loaded(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(source, "get", loaded)
    small = re.sub(r'(kind = "simulated", memory = )\d+', r"\g<1>1048576", str(module))
    with pytest.raises(
        MemoryBudgetError,
        match=r"on cuda:0, and 1 MiB are available[\s\S]*gpu_memory=\d+MiB or more",
    ):
        Runner.load(parse_module(small), source, OPTIONS)


@pytest.mark.parametrize("size", ["1MiB", "900MiB"])
def test_gpu_memory_is_respected(tiny_deepseek: Path, size: str) -> None:
    """Too small for the model is said by `place`, too small for kernels' scratch by `compile`."""
    target = kt.hybrid(size, gpu="simulated", cpu_threads=2)
    with pytest.raises(kt.KtgraphError, match=GPU) as caught:
        kt.compile(tiny_deepseek, target, context=64, max_tokens=64, max_batch=1)
    assert size[:-3] in str(caught.value)


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("model", MODELS)
def test_analysis_and_need_agree(model: str, experts: str) -> None:
    """Before lowering, from types; after it, from the plan: the same GPU, but for rounding."""
    plan = plan_of(model, experts)
    rows = 240
    need = memory_need(plan, CacheShape(4, rows // 4, 64), 2).on("cuda:0")
    found = memory_analysis(plan.module, OPTIONS, rows)
    assert found.of("cuda:0", "workspace") == pytest.approx(need.of("workspace"), rel=1e-3)
    assert found.of("cuda:0", "weights") == pytest.approx(need.of("weights"), rel=0.02)
    assert found.of("cuda:0", "kv") == need.of("cache")
    assert found.of("cuda:0") == pytest.approx(need.total, rel=1e-3)


# -- the arenas of a plan ----------------------------------------------------------------------
def test_the_arenas_of_other_devices_round_trip() -> None:
    plan = plan_of("gqa", "cpu")
    again = parse_module(str(plan.module))
    for name, func in plan.module.functions.items():
        planned = plan_arena(plan.module, func, read_arena(func).sizes)
        read = read_arena(again.functions[name])
        assert planned.away.keys() == read.away.keys() == {"cpu"}
        assert planned.away == read.away
        assert {k: (p.offset, p.nbytes) for k, p in planned.places.items()} == {
            k: (p.offset, p.nbytes) for k, p in read.places.items()
        }
        assert arena_attrs(read)["away_bytes"] == arena_attrs(planned)["away_bytes"]


@pytest.mark.parametrize("nbytes", [0, 64])
def test_an_arena_of_the_host_that_is_too_small_is_refused(nbytes: int) -> None:
    text = str(plan_of("gqa", "cpu").module)
    edited = re.sub(r'(away_bytes = \["cpu=)\d+', rf"\g<1>{nbytes}", text)
    assert edited != text
    with pytest.raises(PlanError, match=rf"an arena of {nbytes}: run plan-memory again"):
        Plan.build(parse_module(edited))
