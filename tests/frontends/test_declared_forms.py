"""What a config says of quantized weights: what is left out, what is refused, and sizes of plans.

That it is what the files say: tests/weights/test_quantized_checkpoints.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoints import CASES
from transformers import AutoModelForCausalLM

import ktgraph as kt
from ktgraph.frontends.declared_forms import declared_forms
from ktgraph.frontends.errors import UnsupportedModelError

FP8 = CASES["fp8"].settings
PACKED = CASES["compressed-tensors"].settings
GPTQ = CASES["gptq"].settings


def model_of(name: str) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(CASES[name].config())


@pytest.mark.parametrize(
    ("left_out", "wanted"),
    [
        (["down_proj"], {"gate_up_proj", "q_proj", "k_proj", "v_proj", "o_proj"}),
        (["self_attn"], {"gate_up_proj", "down_proj"}),
        (["model.layers.*.self_attn"], {"gate_up_proj", "down_proj"}),
        (["model.layers.0", "model.layers.1"], set()),
        (["re:.*mlp.experts.*gate_proj"], {"down_proj", "q_proj", "k_proj", "v_proj", "o_proj"}),
        (["proj"], {"gate_up_proj", "down_proj", "q_proj", "k_proj", "v_proj", "o_proj"}),
    ],
)
def test_what_a_config_leaves_out(left_out: list[str], wanted: set[str]) -> None:
    settings = {**GPTQ, "modules_to_not_convert": left_out}
    found = declared_forms(model_of("gptq"), settings).encodings
    assert {n.removesuffix(".weight").rpartition(".")[2] for n in found} == wanted


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "by 'bitsandbytes', which ktgraph does not read"),
        ({**FP8, "weight_block_size": [1, 128]}, r"weight_block_size \[1, 128\] \(read: e4m3"),
        ({**FP8, "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({**GPTQ, "bits": 8}, "8 bits"),
        ({**GPTQ, "group_size": -1}, "groups of -1 columns"),
        ({**PACKED, "format": "float-quantized"}, "int weights of 4 bits in format 'float-"),
        ({**PACKED, "config_groups": {}}, "0 config_groups"),
    ],
)
def test_what_is_not_read(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        declared_forms(model_of("gptq"), settings)


def test_a_plan_counts_the_checkpoints_own_bytes(tiny_deepseek: Path, tmp_path: Path) -> None:
    """Experts in fp8 take half of what they take in bf16, and a few scales."""
    experts: list[int] = []
    for name, settings in (("bf16", {}), ("fp8", {"quantization_config": FP8})):
        path = tmp_path / f"{name}.json"
        config = json.loads((tiny_deepseek / "config.json").read_text())
        path.write_text(json.dumps({**config, "dtype": "bfloat16", **settings}))
        base = kt.plan(path, "cpu", context=64).base
        (routed,) = [h for h in base.holdings if h.what == "routed experts"]
        assert {e.partition("(")[0] for e in routed.encodings} == {name}
        experts.append(routed.nbytes)
    assert 0.5 <= experts[1] / experts[0] < 0.56
