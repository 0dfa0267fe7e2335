"""Hybrid plans on a real GPU: the interpreter's numbers, and graphs that change no token."""

from __future__ import annotations

import pytest
import torch
from hybrid_models import (
    DEFERRED,
    EXPERTS,
    HOT_EXPERTS,
    OPTIONS,
    bind,
    follow,
    gqa_layers,
    greedy,
    make_hybrid,
    place,
)
from lowered_models import MODELS

from ktgraph.runtime.gpu.cuda import CudaDevice

pytestmark = pytest.mark.gpu

LIMIT = 1e-10  # NMSE in float32


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("model", ["mla", "gqa"])
def test_prefill_chunk_decode(model: str, experts: str) -> None:
    pair = make_hybrid(model, experts, device=CudaDevice())
    assert max(follow(pair, [15, 2, 6, 1], [1, 4, 2, 3])) <= LIMIT


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize(("model", "quantize"), [("mla", "int8"), ("gqa", "int4(group=32)")])
def test_quantized_experts(model: str, experts: str, quantize: str) -> None:
    pair = make_hybrid(model, experts, device=CudaDevice(), quantize=f"experts={quantize}")
    assert max(follow(pair, [9, 3], [1, 2])) <= LIMIT


@pytest.mark.parametrize("experts", EXPERTS)
def test_a_busy_stream_of_torch(experts: str) -> None:
    """Zeros and weights are written on torch's stream: the first call waits for them."""
    device = CudaDevice()
    warm = make_hybrid("gqa", experts, device=device)  # kernels are compiled by now
    follow(warm, [9, 3], [2])
    torch.cuda._sleep(int(4e8))  # pyright: ignore[reportPrivateUsage]
    pair = make_hybrid("gqa", experts, device=device)
    assert max(follow(pair, [9, 3], [2])) <= LIMIT


class Busy(CudaDevice):
    """Its memory was torch's, who still writes to it."""

    def empty(self, nbytes: int) -> torch.Tensor:
        memory = super().empty(nbytes)
        torch.cuda._sleep(int(1e7))  # pyright: ignore[reportPrivateUsage]
        memory.fill_(0xFF)  # NaN
        del memory
        return super().empty(nbytes)


@pytest.mark.parametrize("experts", [*EXPERTS, *HOT_EXPERTS])
def test_memory_that_torch_still_writes(experts: str) -> None:
    rules = {**EXPERTS, **HOT_EXPERTS}[experts]
    pair = make_hybrid("gqa", rules, device=Busy())
    assert max(follow(pair, [9, 3], [2])) <= LIMIT


@pytest.mark.parametrize("layers", [1, 2, 3, 5])
def test_streamed_layers(layers: int) -> None:
    pair = make_hybrid(gqa_layers(layers), "streamed", device=CudaDevice())
    assert max(follow(pair, [9, 3], [1, 2, 1, 2])) <= LIMIT


@pytest.mark.parametrize("n", [1, 2])
def test_deferred_experts(n: int) -> None:
    """Batches of one to four: pieces of the router's choice are dense for one token only."""
    device = CudaDevice()
    pair = make_hybrid(gqa_layers(4), "cpu", device=device, pipeline=DEFERRED, defer=n)
    assert max(follow(pair, [9, 3, 5, 2], [1, 1, 1, 3, 3, 3, 4, 4])) <= LIMIT


@pytest.mark.parametrize("experts", ["resident", "cpu", "streamed"])
def test_graphs_give_the_same_tokens(experts: str) -> None:
    """Two executors of each kind, one after the other."""
    module = MODELS["gqa"]()
    place(module, experts)
    found: list[list[int]] = []
    for capture in (False, True, False, True):
        runner = bind(module, OPTIONS, CudaDevice(), capture=capture)
        found.append(greedy(runner))
        for _ in range(2):
            runner.executor.close()
    assert found[0] == found[1] == found[2] == found[3]
