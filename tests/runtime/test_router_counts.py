"""Counts of router choices: those of the interpreter, on the CPU and on a simulated GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hybrid_models import EXPERTS, HOT, bind, plan_of
from lowered_models import OPTIONS, lower, prompts
from small_models import gqa_moe, mla_moe

from ktgraph.cli import main
from ktgraph.ir.graph import Module, Op
from ktgraph.runtime.errors import ExecutionError
from ktgraph.runtime.runner import InterpreterRunner, Runner
from ktgraph.weights.evaluate import WeightEvaluator
from ktgraph.weights.sources import RandomSource


def on_the_cpu(module: Module) -> Runner:
    lower(module)
    return Runner.load(module, RandomSource(module), OPTIONS)


def calls(runner: Runner | InterpreterRunner) -> None:
    """A ragged prefill in two calls, and decode steps of which the last are replayed graphs."""
    seqs = [runner.open() for _ in range(3)]
    runner.forward(list(zip(seqs, prompts(15, 2, 6), strict=True)))
    for step in range(4):
        tokens = prompts(1, 1, 1, seed=step)
        runner.forward(list(zip(seqs, tokens, strict=True)))
    for seq in seqs:
        runner.close(seq)


def ids_of_the_interpreter(module: Module) -> list[list[int]]:
    """What every run of a router chose, in order."""
    found: list[list[int]] = []
    runner = InterpreterRunner(module, WeightEvaluator(module, RandomSource(module)), OPTIONS)

    def observe(op: Op, operands: Any, attrs: Any, results: Any) -> None:
        if op.name == "moe.route":
            found.append(results[0].flatten().tolist())

    runner._interpreter.observe = observe  # pyright: ignore[reportPrivateUsage]
    calls(runner)
    return found


@pytest.mark.parametrize("model", ["mla", "gqa"])
@pytest.mark.parametrize("where", ["cpu alone", "cpu", "resident", "hot"])
def test_counts_are_those_of_the_interpreter(model: str, where: str) -> None:
    made = {"mla": mla_moe, "gqa": gqa_moe}[model]
    rules = {**EXPERTS, "hot": HOT}
    if where == "cpu alone":
        runner = on_the_cpu(made())
    else:
        runner = bind(plan_of(model, rules[where]).module, OPTIONS)
    with runner.counting_experts() as counts:
        calls(runner)
    chosen = ids_of_the_interpreter(made())
    routers = {"mla": ["layers[1].mlp.gate"], "gqa": ["layers[0].mlp.gate", "layers[1].mlp.gate"]}
    found = counts.popularity("small")
    for number, router in enumerate(routers[model]):
        ids = [e for run in chosen[number :: len(routers[model])] for e in run]
        assert found.counts[router] == [ids.count(e) for e in range(6)]
    assert list(found.counts) == routers[model]
    assert found.tokens == 23 + 4 * 3
    calls(runner)  # not counted any more
    assert counts.popularity("small") == found
    counts.clear()
    assert counts.popularity("small").tokens == 0
    runner.executor.close()


def test_a_router_on_the_host_beside_a_gpu_is_refused() -> None:
    rules = "- match: {class: moe.*}\n  replace: {device: cpu}\n"
    runner = bind(plan_of("mla", rules).module, OPTIONS)
    with (
        pytest.raises(ExecutionError, match=r"a router on the host is not counted.*\n.*moe\.route"),
        runner.counting_experts(),
    ):
        pass
    runner.executor.close()


def test_the_command(tiny_qwen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts, out = tmp_path / "prompts.txt", tmp_path / "p.json"
    texts.write_text("The sea\n\nOnce upon\n", encoding="utf-8")
    command = ["profile", str(tiny_qwen), str(texts), "-o", str(out), "--target", "cpu"]
    assert main([*command, "--max-new-tokens", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    made = json.loads(out.read_text())
    assert lines[-1] == f"{out}: {made['tokens']} tokens of 2 prompts"
    assert lines[0].startswith("layers[0].mlp.gate: 12 experts; share of choices of the hottest 1 ")
    assert {len(c) for c in made["counts"].values()} == {12}
    assert {sum(c) for c in made["counts"].values()} == {made["tokens"] * 2}
    nowhere = tmp_path / "no" / "p.json"
    assert main([*command[:4], str(nowhere)]) == 2
    assert f"-o {nowhere}: there is no folder {nowhere.parent}" in capsys.readouterr().err
    texts.write_text("\n")
    assert main(command) == 2
    assert f"{texts}: no prompts" in capsys.readouterr().err
