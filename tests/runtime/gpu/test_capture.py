"""Decode steps replayed as graphs give what steps one by one give, and executors end cleanly."""

from __future__ import annotations

import os
from collections.abc import Sequence

import lowered_models
import pytest
from hybrid_models import OPTIONS, bind, greedy, place
from lowered_models import prompts

from ktgraph.ir.graph import Module
from ktgraph.runtime.errors import ExecutionError
from ktgraph.runtime.gpu.device import Step
from ktgraph.runtime.gpu.simulated import SimulatedDevice


class CountingDevice(SimulatedDevice):
    captures = 0

    def capture(self, steps: Sequence[Step]) -> Step:
        self.captures += 1
        return super().capture(steps)


def lowered(model: str, experts: str) -> Module:
    module = lowered_models.MODELS[model]()
    place(module, experts)
    return module


@pytest.mark.parametrize("experts", ["cpu", "streamed"])
def test_graphs_give_the_same_tokens(experts: str) -> None:
    """Also a second executor, after the first was closed."""
    module = lowered("gqa", experts)
    found: list[list[int]] = []
    for capture in (False, True, True):
        device = CountingDevice()
        runner = bind(module, OPTIONS, device, capture=capture)
        found.append(greedy(runner))
        runner.executor.close()
        assert device.captures == (4 if capture else 0)  # one for each batch
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) > 4


def test_prompts_are_not_captured() -> None:
    device = CountingDevice()
    runner = bind(lowered("mla", "cpu"), OPTIONS, device)
    for _ in range(3):
        seq = runner.open()
        runner.forward([(seq, prompts(5)[0])])
        runner.close(seq)
    runner.executor.close()
    assert device.captures == 0


def test_two_executors_at_once_do_not_meet() -> None:
    module = lowered("mla", "cpu")
    first, second = bind(module, OPTIONS), bind(module, OPTIONS)
    text = prompts(9)[0]
    alone = first.forward([(first.open(), text)])
    beside = second.forward([(second.open(), text)])
    first.executor.close()
    after = second.forward([(second.open(), text)])
    second.executor.close()
    assert alone.equal(beside)
    assert alone.equal(after)


def test_close_ends_the_threads_and_may_be_called_again() -> None:
    runner = bind(lowered("mla", "cpu"), OPTIONS)
    seq = runner.open()
    runner.forward([(seq, [1, 2])])
    before = len(os.listdir("/proc/self/task"))
    for _ in range(2):
        runner.executor.close()
    with pytest.raises(ExecutionError, match="was closed"):
        runner.forward([(seq, [3])])
    assert runner.length(seq) == 2
    assert len(os.listdir("/proc/self/task")) < before
