"""Deferred experts of the trained models: against transformers' model, deferred by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

import ktgraph as kt
from ktgraph.cli import main as command_line
from ktgraph.errors import UnsupportedInputError
from ktgraph.validate import nmse

if TYPE_CHECKING:
    from .conftest import Pair

# n, and the largest share by which the perplexity of a window may grow; docs/gpu.md has more.
ALLOWED = {
    "tiny-deepseek-v2": (2, 0.03),
    "tiny-deepseek-v3": (2, 0.03),
    "tiny-qwen3-moe": (1, 0.05),
}


def defer_in(model: Any, n: int, patch: pytest.MonkeyPatch) -> None:
    """Every layer's n lightest experts of each token are added by the next layer of experts."""
    blocks = [layer.mlp.experts for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    late: list[Tensor] = []

    def patched(number: int, experts: Any) -> Any:
        whole = type(experts).forward

        def forward(rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            if number + 1 == len(blocks):
                return whole(experts, rows, ids, weights) + late.pop()
            weights, order = weights.sort(dim=-1, descending=True)
            ids = ids.gather(-1, order)
            found = whole(experts, rows, ids[:, :-n], weights[:, :-n])
            found = found + late.pop() if late else found
            late.append(whole(experts, rows, ids[:, -n:], weights[:, -n:]))
            return found

        return forward

    for number, experts in enumerate(blocks):
        patch.setattr(experts, "forward", patched(number, experts))


def test_decode_is_the_model_deferred_by_hand(
    trained: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt is exact; only what decode steps compute is deferred."""
    n, _ = ALLOWED[trained.name]
    exe = trained.traced.lower("cpu", defer=n).compile()
    (prompt,), (steps,) = trained.prompts(9), trained.prompts(5)
    seq = exe.runner.open()
    with torch.inference_mode():
        wanted = trained.model(torch.tensor([prompt]), use_cache=True)
        assert nmse(exe.runner.forward([(seq, prompt)]), wanted.logits[:, -1]) < 1e-10
        defer_in(trained.model, n, monkeypatch)
        for token in steps:
            past = wanted.past_key_values
            wanted = trained.model(torch.tensor([[token]]), past_key_values=past, use_cache=True)
            assert nmse(exe.runner.forward([(seq, [token])]), wanted.logits[:, -1]) < 1e-10
        plain = trained.exe.runner.open()
        trained.exe.runner.forward([(plain, prompt)])
        exact = [trained.exe.runner.forward([(plain, [t])]) for t in steps][-1]
        assert nmse(exact, wanted.logits[:, -1]) > 1e-6
        trained.exe.runner.close(plain)


def test_what_it_costs(trained: Pair, reference: dict[str, Any], eval_text: str) -> None:
    assert trained.exe.tokenizer is not None
    tokens = trained.exe.tokenizer.encode(eval_text, special=False)[:1023]
    n, allowed = ALLOWED[trained.name]
    pipeline = f"default,expert-deferral{{n={n},phases=[prefill, decode]}}"
    found = trained.traced.lower("cpu", pipeline).compile().perplexity(tokens).value
    exact = math.exp(reference["float32"]["window_mean_nll"][0])
    assert exact < found < exact * (1 + allowed)


def test_a_plan_keeps_it(trained: Pair, tmp_path: Path) -> None:
    exe = trained.traced.lower("cpu", defer=1).compile()
    exe.save(tmp_path / "m.ktplan")
    loaded = kt.load(tmp_path / "m.ktplan")
    assert loaded.made.options.defer == 1
    assert loaded.module.functions["decode"].attrs["lossy"] == ("expert-deferral{n=1}",)
    prompt = trained.prompts(5)[0]
    assert loaded.generate(prompt, 8, eos=()) == exe.generate(prompt, 8, eos=())


@pytest.mark.parametrize("defer", [-1, 1.5, "2"])
def test_values_that_make_no_sense(trained: Pair, defer: Any) -> None:
    with pytest.raises(UnsupportedInputError, match=r"defer=.*expected a number of experts"):
        trained.traced.lower("cpu", defer=defer)


def test_exact_refuses_it(trained: Pair) -> None:
    with pytest.raises(UnsupportedInputError, match=r"expert-deferral\{n=1\}.*exact=True"):
        trained.traced.lower("cpu", defer=1, exact=True)


def test_on_the_command_line(tiny_qwen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(["run", str(tiny_qwen), "The", "--target", "cpu", "--defer", "3"]) != 0
    assert "n=3, but a token has 2 experts: expected 0..2" in capsys.readouterr().err
