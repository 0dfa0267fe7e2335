"""Streamed weights: every copy behind the last reader before it, every reader behind its copy."""

from __future__ import annotations

from typing import Any

import pytest
from hybrid_models import Hybrid, gqa_layers, make_hybrid, plan_of
from lowered_models import prompts

from ktgraph.runtime.errors import ExecutionError
from ktgraph.runtime.gpu.simulated import SimulatedDevice
from ktgraph.runtime.gpu.streaming import WeightStream, buffer_nbytes, copy_nbytes, streamed

LIMIT = 1e-10


def follow(pair: Hybrid) -> list[float]:
    seqs = [pair.open(), pair.open()]
    errors = [pair.forward(list(zip(seqs, prompts(5, 2), strict=True)), "all")]
    errors += [pair.forward([(seq, [4]) for seq in seqs]) for _ in range(3)]
    pair.executor.close()
    return errors


@pytest.mark.parametrize("quantize", [None, "experts=int4(group=32)"])
@pytest.mark.parametrize("layers", [1, 2, 3, 5])
def test_any_number_of_layers(layers: int, quantize: str | None) -> None:
    pair = make_hybrid(gqa_layers(layers), "streamed", quantize=quantize)
    for phase in pair.runner.plan.phases:
        assert len(streamed(phase)) == layers
    assert max(follow(pair)) <= LIMIT


def test_buffers_hold_the_largest_copy() -> None:
    plan = plan_of("mla", "streamed")
    copies = [copy_nbytes(i) for p in plan.phases for i in streamed(p)]
    assert buffer_nbytes(plan) == max(copies) > 0
    assert buffer_nbytes(plan_of("mla", "cpu")) == 0


def test_streamed_weights_take_no_bytes_of_an_arena() -> None:
    """Whether or not they are stored in another form than they are computed in."""
    for model in ("mla", "gqa"):  # f32 as it is; bf16 under f32
        plan = plan_of(model, "streamed")
        for phase in plan.phases:
            names = {r.name for i in streamed(phase) for r in phase.step(i).results}
            assert names
            assert not names & phase.arena.places.keys()


@pytest.mark.parametrize("layers", [3, 5])
def test_a_copy_into_a_buffer_in_use_is_caught(
    layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third copy begins in front of the release of the first."""
    after = WeightStream.after

    def hasty(self: WeightStream, item: Any) -> list[Any]:
        return after(self, item)[::-1]

    monkeypatch.setattr(WeightStream, "after", hasty)
    pair = make_hybrid(gqa_layers(layers), "streamed")
    with pytest.raises(ExecutionError, match="begins before its buffer was released"):
        pair.runner.forward([(pair.runner.open(), [1, 2])])
    pair.executor.close()


@pytest.mark.parametrize("layers", [1, 3])
def test_a_reader_that_does_not_wait_sees_poison(
    layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WeightStream, "before", lambda self, item: [])
    pair = make_hybrid(gqa_layers(layers), "streamed")
    logits = pair.runner.forward([(pair.runner.open(), [1, 2])])
    pair.executor.close()
    assert logits.isnan().all()


def test_nothing_is_copied_before_somebody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated link is as slow as it may be: a late release would show too."""
    done: list[int] = []
    fetched = SimulatedDevice.fetched

    def noted(self: SimulatedDevice, copy: Any) -> Any:
        step = fetched(self, copy)

        def run() -> object:
            assert not copy.ready
            done.append(1)
            return step()

        return run

    monkeypatch.setattr(SimulatedDevice, "fetched", noted)
    pair = make_hybrid(gqa_layers(3), "streamed")
    assert max(follow(pair)) <= LIMIT
    assert len(done) == 3 * 4  # layers x calls
