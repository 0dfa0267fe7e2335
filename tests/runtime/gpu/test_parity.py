"""Hybrid plans on the simulated GPU against the interpreter, wherever the experts are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hybrid_models import EXPERTS, follow, make_hybrid

import ktgraph as kt

LIMIT = 1e-10  # NMSE in float32


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("model", ["mla", "gqa"])
def test_prefill_chunk_decode(model: str, experts: str) -> None:
    """The prompts take two calls; batches of decode change from step to step."""
    pair = make_hybrid(model, experts)
    assert max(follow(pair, [15, 2, 6, 1], [1, 4, 2, 3])) <= LIMIT


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize(
    ("model", "quantize"), [("mla", "int8"), ("gqa", "int4(group=32)"), ("mla", "fp8")]
)
def test_quantized_experts(model: str, experts: str, quantize: str) -> None:
    check_quantized(model, experts, quantize)


@pytest.mark.parametrize("experts", ["resident", "streamed"])  # the CPU's kernel rounds rows
def test_progressive_int4_on_the_gpu(experts: str) -> None:
    check_quantized("gqa", experts, "int4p(group=32)")


def check_quantized(model: str, experts: str, quantize: str) -> None:
    pair = make_hybrid(model, experts, quantize=f"experts={quantize}")
    tiles = {u.tile.format for u in pair.runner.plan.uses() if u.form == "tile"}
    assert tiles == {quantize.partition("(")[0]}
    assert max(follow(pair, [9, 3], [1, 2])) <= LIMIT


@pytest.mark.parametrize("experts", EXPERTS)
def test_the_trained_model_writes_the_same_text(
    tiny_deepseek: Path, tmp_path: Path, experts: str
) -> None:
    """As transformers and the CPU target do, wherever its experts are."""
    (tmp_path / "rules.yaml").write_text(EXPERTS[experts], encoding="utf-8")
    wanted = json.loads((tiny_deepseek / "reference.json").read_text())["greedy_float32"][0]
    target = kt.hybrid(gpu="simulated", cpu_threads=2)
    options: dict[str, Any] = {"dtype": "f32", "rules": tmp_path / "rules.yaml", "context": 128}
    exe = kt.compile(tiny_deepseek, target, **options)
    found = exe.generate(wanted["prompt_ids"], max_new_tokens=24)
    exe.runner.executor.close()
    assert found == wanted["ids"][:24]
