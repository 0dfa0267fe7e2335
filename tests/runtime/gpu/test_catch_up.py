"""Memory from torch's stream is used once that stream has caught up: zeros, slots, host results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hybrid_models import EXPERTS, HOT_EXPERTS, OPTIONS, bind, place
from lowered_models import MODELS, prompts

from ktgraph.ops.sample import seen_words, settings
from ktgraph.runtime.gpu.device import Step
from ktgraph.runtime.gpu.phase import BoundPhase
from ktgraph.runtime.gpu.simulated import SimulatedDevice
from ktgraph.runtime.kernels_cpu import REFERENCE
from ktgraph.runtime.runner import Runner

PLACES = {**EXPERTS, **HOT_EXPERTS}


class Ordered(SimulatedDevice):
    """Runs nothing between new memory, or work of torch, and what orders both."""

    is_behind = False

    def empty(self, nbytes: int) -> torch.Tensor:
        self.is_behind = True
        return super().empty(nbytes)

    def catch_up(self) -> None:
        self.is_behind = False

    def run(self, steps: Sequence[Step]) -> None:
        assert not self.is_behind
        super().run(steps)


def made(experts: str, *fallbacks: str) -> tuple[Runner, Ordered]:
    module, device = MODELS["gqa"](), Ordered()
    place(module, PLACES[experts])
    for op in module.walk():
        if op.name in fallbacks:
            op.via = REFERENCE
    return bind(module, OPTIONS, device), device


@pytest.mark.parametrize("experts", PLACES)
def test_new_memory(experts: str) -> None:
    """Of arenas, buffers, slots, mailboxes and counts, and of what a first penalty needs."""
    runner, _ = made(experts)
    seq = runner.open()
    how = settings(0.0, 0, 1.0, 0.0, 0, penalty=2.0)[None]
    seen = torch.zeros(1, seen_words(runner.vocabulary), dtype=torch.int32).numpy()
    runner.forward([(seq, prompts(9)[0])])
    runner.tokens(runner.start([(seq, [1])], how, seen))
    with runner.counting_experts():
        runner.forward([(seq, [1])])
    runner.executor.close()


def test_results_of_ops_that_the_host_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch may write them by a kernel, on its own stream."""
    runner, device = made("resident", "nn.embedding")
    copy, ran = torch.Tensor.copy_, list[int]()

    def copies(self: torch.Tensor, *given: Any, **more: Any) -> torch.Tensor:
        device.is_behind = True
        ran.append(1)
        return copy(self, *given, **more)

    inner = BoundPhase._run_on_host  # pyright: ignore[reportPrivateUsage]

    def watched(self: BoundPhase, *given: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "copy_", copies)
            inner(self, *given)

    monkeypatch.setattr(BoundPhase, "_run_on_host", watched)
    runner.forward([(runner.open(), prompts(9)[0])])
    assert ran
    runner.executor.close()
