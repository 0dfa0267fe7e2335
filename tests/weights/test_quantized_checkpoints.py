"""Quantized checkpoints: values, tiles and logits are those of each format's definition."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoints import CASES, make

import ktgraph as kt
from ktgraph.frontends.hf import trace_hf_full
from ktgraph.frontends.hf_build import load_config
from ktgraph.model_input import read_model
from ktgraph.passes.pipelines import PIPELINES
from ktgraph.runtime.plan import Plan
from ktgraph.runtime.weight_views import weight_views
from ktgraph.stages import Lowered, Traced
from ktgraph.weights.encodings import Tile, to_float
from ktgraph.weights.evaluate import WeightEvaluator
from ktgraph.weights.safetensors_source import SafetensorsSource
from ktgraph.weights.stored_rows import has_rows


@dataclass
class Made:
    name: str
    folder: Path
    model: Any
    traced: Traced

    @cached_property
    def lowered(self) -> Lowered:
        """For the CPU, rows of x as they are."""
        return self.traced.lower("cpu", context=64, activations="f32")


@pytest.fixture(scope="module", params=CASES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    at = tmp_path_factory.mktemp("checkpoint")
    model = make(at, request.param)
    return Made(request.param, at / request.param, model, traced(at / request.param))


def traced(folder: Path) -> Traced:
    """Without the traces at other sizes, which take most of the time."""
    module = trace_hf_full(folder, torch.float32, witnesses=False).module
    return Traced(module, read_model(folder), "f32")


def nmse(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).double().square().sum() / want.double().square().sum())


def test_a_config_alone_says_the_same(made: Made) -> None:
    """What is planned from config.json is the graph of the files, every encoding included."""
    config = load_config(made.folder)
    module = trace_hf_full(config, torch.float32, witnesses=False).module
    assert CASES[made.name].encoding in str(module)
    assert str(module) == str(made.traced.ir)


def test_values_are_those_of_the_definition(made: Made) -> None:
    source, want = SafetensorsSource(made.folder), made.model.state_dict()
    for name, tensor in want.items():
        assert torch.equal(source.get(name).float(), tensor), name
        if tensor.dim() == 3:
            assert torch.equal(source.get(name, 1), tensor[1]), name


def test_the_ir_says_how_weights_are_stored(made: Made) -> None:
    text = str(made.traced)
    encodings = {w.type.encoding for w in made.traced.ir.weights.values()}
    stored = {str(e) for e in encodings if has_rows(e)}
    assert stored == {CASES[made.name].encoding}
    if made.name == "mxfp4":
        assert "experts.gate_up_proj_blocks : f32[5, 128, 64]<mxfp4(group=32)>" in text
        assert "transpose(" not in text  # the transpose of a transpose is the weight itself


def test_tiles_hold_the_checkpoints_bits(made: Made) -> None:
    """Every packed weight that comes from quantized tensors, against the values, bit by bit."""
    module, source = made.lowered.module, SafetensorsSource(made.folder)
    packed = WeightEvaluator(module, source)
    plain = WeightEvaluator(module, source, torch.float32)
    count = 0
    for weight in module.weights.values():
        tile = Tile.of(weight.type.encoding)
        if tile is None or tile.format in ("f32", "bf16", "f16"):
            continue
        index = weight.lo if weight.is_family else None
        (found,) = packed.stored(weight.ref(), index)
        assert weight.type.encoding is not None
        values = to_float((found,), packed.shape(weight.ref()), weight.type.encoding)
        assert torch.equal(values, plain.tensor(weight.ref(), index)), weight.name
        count += 1
    assert count >= 2


def test_logits_are_those_of_the_dequantized_model(made: Made) -> None:
    compiled = made.lowered.compile()
    ids = torch.randint(0, 96, (2, 19), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = made.model(ids).logits
    assert nmse(compiled(ids), want) < 1e-10
    if made.name not in ("gptq", "mxfp4"):
        return
    rounded = made.traced.lower("cpu", context=64).compile()  # rows of x in 8 bits
    assert 1e-9 < nmse(rounded(ids), want) < 1e-2


TO_QUANTIZE = PIPELINES["default"].split(",insert-copies")[0]
POLICIES = {  # checkpoint -> policies, and how experts' up projections are stored then
    "fp8": [("int8", "fp8(group=128)"), ("int4p(group=64)", "int4p(group=64)")],
    "compressed-tensors": [
        ("int8", "int4(group=32)"),
        ("experts=int8", "int8"),
        ("experts=keep,*=int4p(group=128)", "int4(group=32)"),
    ],
    "gptq": [("int8", "int4z(group=32)")],
    "awq": [("int4p(group=64)", "int4z(group=64)")],
    "mxfp4": [("int4p(group=32)", "mxfp4(group=32)"), ("experts=int8", "int8")],
}


def test_policies_leave_stored_integers_alone_unless_they_gain(made: Made) -> None:
    for policy, experts in POLICIES[made.name]:
        module = made.traced.lower("cpu", TO_QUANTIZE, context=64, quantize=policy).module
        op = next(op for op in module.walk() if op.name == "moe.grouped_mlp")
        assert str(module.weight_of(op.weight(3)).type.encoding) == experts, policy


def test_a_policy_may_round_what_is_stored(made: Made) -> None:
    if made.name not in ("fp8", "mxfp4"):
        return
    policy = "experts=int8" if made.name == "mxfp4" else "experts=int4p(group=32)"
    lowered = made.traced.lower("cpu", context=64, quantize=policy)
    ids = torch.randint(0, 96, (1, 9), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        error = nmse(lowered.compile()(ids), made.model(ids).logits)
    assert 1e-7 < error < 0.2


ON_GPU = {  # whether kernels of a GPU compute from the experts' encoding
    "fp8": True,
    "compressed-tensors": True,
    "mxfp4": False,
}


@pytest.mark.parametrize("where", ["cuda:0", "cpu"])
def test_beside_a_gpu(made: Made, where: str, tmp_path: Path) -> None:
    """Experts keep their bits where a kernel reads them, and become dense visibly elsewhere."""
    if made.name not in ON_GPU:
        return
    rules = tmp_path / "rules.yaml"
    rules.write_text(f"- match: {{class: moe.grouped_mlp}}\n  replace: {{device: '{where}'}}\n")
    machine = kt.hybrid(gpu="simulated")
    lowered = made.traced.lower(machine, context=64, activations="f32", rules=str(rules))
    op = next(op for op in lowered.module.walk() if op.name == "moe.grouped_mlp")
    keeps = where == "cpu" or ON_GPU[made.name]
    assert op.weight(3).name.endswith(".p" if keeps else ".dq")
    if not keeps:
        (notes,) = (r.notes for r in lowered.passes.records if r.name == "dequantize")
        assert any(n.startswith("no kernel on cuda:0 computes from") for n in notes)
    ids = torch.randint(0, 96, (2, 19), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert nmse(lowered.compile()(ids), made.model(ids).logits) < 1e-10


def test_halves_of_a_quantized_kv_b_take_no_bytes_on_a_gpu(made: Made) -> None:
    if made.name != "fp8":
        return
    lowered = made.traced.lower(kt.hybrid(gpu="simulated"), context=64)
    plan = Plan.build(lowered.module)
    views = weight_views(lowered.module, list(plan.uses()))
    assert {v.base for v in views.values()} == {
        f"layers[{i}].kv_b_proj.dq:stored@cuda:0" for i in (0, 1)
    }
    assert len(views) == 4
    (notes,) = (r.notes for r in lowered.passes.records if r.name == "dequantize")
    assert [n.rpartition(": ")[2] for n in notes] == ["@layers[0].kv_b_proj, @layers[1].kv_b_proj"]


HOT_AND_STREAMED = """\
- match: {class: moe.grouped_mlp}
  replace: {device: stream}
  phase: prefill
- match: {class: moe.grouped_mlp}
  replace: {device: hot, experts: 2}
"""


def test_fp8_experts_move_between_host_and_gpu_as_they_are(made: Made, tmp_path: Path) -> None:
    """Streamed for the prompt, beside hot ones in decode: the same tiles everywhere."""
    if made.name != "fp8":
        return
    rules = tmp_path / "rules.yaml"
    rules.write_text(HOT_AND_STREAMED)
    lowered = made.traced.lower(
        kt.hybrid(gpu="simulated"), context=64, activations="f32", rules=str(rules)
    )
    assert not [n for n in lowered.module.weights if "experts" in n and n.endswith(".dq")]
    compiled = lowered.compile()
    tiles = [u for u in compiled.runner.plan.uses() if "experts" in u.key and u.form == "tile"]
    assert {u.tile.format for u in tiles} == {"fp8"}
    on_host = [u.key for u in tiles if u.device == "cpu"]
    assert len(on_host) == 2  # the copy reads what the CPU's kernel does
    ids = torch.randint(0, 96, (1, 19), generator=torch.Generator().manual_seed(3))
    found = compiled.generate(ids[0].tolist(), max_new_tokens=4)
    with torch.no_grad():
        assert nmse(compiled(ids), made.model(ids).logits) < 1e-10
        text = torch.cat([ids[0], torch.tensor(found)])
        assert made.model(text[None, :-1]).logits[0, 18:].argmax(-1).tolist() == found
