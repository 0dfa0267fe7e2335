"""`FunctionRunner`: plain functions in pieces, on one engine that serves one call at a time."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event, Thread

import pytest
import torch
from torch import Tensor, nn

import ktgraph as kt
from ktgraph.runtime.arena import PlanError
from ktgraph.runtime.functions import FunctionRunner, function_plan
from ktgraph.runtime.runner import RunnerBusyError
from ktgraph.runtime.steps import StepArrays
from ktgraph.runtime.weight_store import WeightStore

MOST = 4  # tokens of a call


def mlp() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 12), nn.SiLU(), nn.Linear(12, 6)).eval()


def runner_of(model: nn.Module) -> FunctionRunner:
    traced = kt.trace(model, example_inputs=torch.randn(3, 8))
    lowered = traced.lower("cpu", max_tokens=MOST, threads=1)
    plan = function_plan(lowered.module, 1)
    source = traced.source()
    assert source is not None
    weights = WeightStore().load(plan, source, 1, torch.device("cpu"))
    return FunctionRunner(plan, weights, 1)


@pytest.mark.parametrize("rows", [0, 1, MOST, 2 * MOST + 3])
def test_any_number_of_rows(rows: int) -> None:
    model = mlp()
    x = torch.randn(rows, 8)
    (got,) = runner_of(model)("main", [x])
    with torch.no_grad():
        want = model(x)
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_a_call_below_a_call_is_refused_and_the_next_one_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = runner_of(mlp())
    x = torch.randn(2, 8)

    def again(name: str, inputs: Sequence[Tensor], step: StepArrays) -> list[Tensor]:
        return runner(name, inputs)

    with monkeypatch.context() as patch:
        patch.setattr(runner.executor, "call_tensors", again)
        with pytest.raises(RunnerBusyError, match="@main is called below a call"):
            runner("main", [x])
    assert runner("main", [x])[0].shape == (2, 6)


def test_a_call_of_another_thread_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    runner = runner_of(model)
    x, y = torch.randn(2, 8), torch.randn(3, 8)
    inside, go_on = Event(), Event()
    found: dict[str, Tensor] = {}
    running: list[int] = []
    call = runner.executor.call_tensors

    def slow(name: str, inputs: Sequence[Tensor], step: StepArrays) -> list[Tensor]:
        running.append(len(inputs[0]))
        assert len(running) == 1, "two calls at a time"
        inside.set()
        assert go_on.wait(20)
        result = call(name, inputs, step)
        running.pop()
        return result

    def run(key: str, given: Tensor) -> None:
        found[key] = runner("main", [given])[0]

    monkeypatch.setattr(runner.executor, "call_tensors", slow)
    threads = [Thread(target=run, args=pair) for pair in (("x", x), ("y", y))]
    threads[0].start()
    assert inside.wait(20)
    threads[1].start()
    threads[1].join(0.2)
    assert threads[1].is_alive()
    assert "y" not in found
    go_on.set()
    for thread in threads:
        thread.join(20)
    with torch.no_grad():
        for key, given in (("x", x), ("y", y)):
            torch.testing.assert_close(found[key], model(given), atol=1e-5, rtol=1e-5)


def test_a_model_with_a_cache_is_refused() -> None:
    from lowered_models import lower
    from small_models import gqa_moe

    module = gqa_moe()
    lower(module)
    with pytest.raises(PlanError, match="takes a cache or a batch"):
        function_plan(module, 1)
