"""Hybrid plans that are saved and loaded, and targets with a GPU that is not here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hybrid_models import EXPERTS

import ktgraph as kt


@pytest.mark.parametrize("experts", ["cpu", "streamed"])
def test_a_saved_plan_gives_the_same_text(
    tiny_deepseek: Path, tmp_path: Path, experts: str
) -> None:
    rules, path = tmp_path / "rules.yaml", tmp_path / "m.ktplan"
    rules.write_text(EXPERTS[experts], encoding="utf-8")
    target = kt.hybrid(gpu="simulated", cpu_threads=2)
    exe = kt.compile(tiny_deepseek, target, dtype="f32", rules=rules, context=64)
    exe.save(path)
    again = kt.load(path)
    texts = [e.generate("The sea", max_new_tokens=8) for e in (exe, again)]
    for one in (exe, again):
        one.runner.executor.close()
    assert texts[0] == texts[1]
    assert again.runner.plan.uses_gpu


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_without_a_gpu_hybrid_is_refused(tiny_deepseek: Path) -> None:
    with pytest.raises(kt.KtgraphError, match=r"needs a CUDA GPU, and torch sees none") as caught:
        kt.compile(tiny_deepseek, target="hybrid")
    assert 'kt.hybrid(gpu="simulated")' in str(caught.value)
