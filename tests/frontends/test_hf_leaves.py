"""Leaf ops: probes find the right formula, patches are undone, what is not recognised is said."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

from ktgraph.frontends import leaf_ops, probes
from ktgraph.frontends.errors import UnsupportedModelError
from ktgraph.frontends.hf import trace_hf_full
from ktgraph.frontends.hf_build import real_buffers
from ktgraph.frontends.hf_leaves import leaf_ops_in
from ktgraph.frontends.router_probe import probe_router


def _state_of(model: nn.Module) -> dict[str, Any]:
    """Everything that patches touch."""
    space = sys.modules[type(model).__module__]
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    return {
        "functions": {n: f for n, f in vars(space).items() if n.startswith("apply_rotary")},
        "instances": {n: sorted(m.__dict__) for n, m in model.named_modules()},
        "configs": [dict(c.__dict__) for c in configs.values()],
        "tensors": {n: (id(p), p.device) for n, p in model.named_parameters()},
    }


@pytest.mark.parametrize("name", ["deepseek_v2", "qwen3_moe"])
def test_tracing_leaves_the_model_alone(name: str, kit: Any) -> None:
    model = kit.build(name)
    model.config._experts_implementation = "eager"
    ids = torch.randint(3, 96, (2, 5))
    before, logits = _state_of(model), kit.eager(model, ids)
    trace_hf_full(model, witnesses=False)
    assert _state_of(model) == before
    chosen = (model.config._attn_implementation, model.config._experts_implementation)
    assert chosen == ("eager", "eager")
    assert torch.equal(kit.eager(model, ids), logits)


def test_patches_nest_and_are_undone_after_an_error(kit: Any) -> None:
    model = copy.deepcopy(kit.build("qwen3_moe"))
    before = _state_of(model)
    buffers = real_buffers(model, dict(model.named_buffers()))

    def fail_inside() -> None:
        with leaf_ops_in(model, buffers) as report:
            assert model.config._attn_implementation == "ktgraph"
            assert report.replaced["model.layers.0.mlp.gate"] == "route (softmax)"
            with leaf_ops_in(model, buffers):
                raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail_inside()
    assert _state_of(model) == before


ROUTERS = {
    "deepseek_v2": ("softmax", False, 1.0, 1, "max"),
    "deepseek_v2_grouped": ("softmax", False, 2.5, 4, "max"),
    "deepseek_v3": ("sigmoid", True, 2.5, 4, "top2sum"),
    "qwen3_moe": ("softmax", True, 1.0, 1, "max"),
    "qwen2_moe": ("softmax", False, 1.0, 1, "max"),
    "mixtral": ("softmax", True, 1.0, 1, "max"),
    "glm4_moe": ("sigmoid", True, 1.0, 1, "max"),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_router_formula(name: str, kit: Any) -> None:
    with torch.device("meta"):
        model = tf.AutoModelForCausalLM.from_config(kit.config(name))
    found = [probe_router(m) for m in model.modules() if "Router" in type(m).__name__]
    assert found
    for router in found:
        assert router is not None
        got = (router.score, router.renorm, router.scale, router.groups, router.group_score)
        assert got == ROUTERS[name]
        assert router.top_k == 3


def test_router_with_many_experts_is_told_apart() -> None:
    """Inputs must not resemble the weights, or softmax saturates and renorm does not show."""
    config = tf.Qwen3MoeConfig(
        hidden_size=512, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
        num_hidden_layers=1, vocab_size=32, moe_intermediate_size=8,
    )  # fmt: skip
    with torch.device("meta"):
        model = tf.AutoModelForCausalLM.from_config(config)
    router = probe_router(model.model.layers[0].mlp.gate)
    assert router is not None
    assert router.renorm


class OddRouter(nn.Module):
    """Squares its scores: no known formula."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, 16))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = x @ self.weight.t()
        weights, ids = logits.softmax(-1).square().topk(2, -1)
        return logits, weights, ids


class OddRMSNorm(nn.Module):
    """Has a weight and an eps, but centres first."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(16))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(x, (16,), self.weight, None, self.eps)


def test_probes_refuse_other_formulas() -> None:
    assert probe_router(OddRouter()) is None
    assert probes.probe_norm(OddRMSNorm()) is None


def test_norm_rounding_order(kit: Any) -> None:
    gpt, qwen = kit.build("gpt_oss").model.norm, kit.build("qwen3_moe").model.norm
    assert probes.probe_norm(gpt) == probes.Norm(1e-5, cast_first=False)
    assert probes.probe_norm(qwen) == probes.Norm(1e-6, cast_first=True)


# ---------------------------------------------------------------- errors


def test_dynamic_rope_is_refused_by_name(kit: Any) -> None:
    config = kit.config("qwen3_moe")
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(UnsupportedModelError, match=r"rotary_emb.*rope type 'dynamic'.*yarn"):
        trace_hf_full(config)


def test_not_a_causal_language_model() -> None:
    with pytest.raises(UnsupportedModelError, match="ViTConfig"):
        trace_hf_full(tf.ViTConfig())


def test_data_dependent_code_is_blamed_on_its_line(
    kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as source

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x
        return self.down_proj(self.up_proj(x))

    monkeypatch.setattr(source.DeepseekV2MLP, "forward", forward)
    with pytest.raises(UnsupportedModelError) as error:
        trace_hf_full(kit.config("deepseek_v2"), witnesses=False)
    text = str(error.value)
    assert "DeepseekV2ForCausalLM cannot be traced" in text
    assert "model.layers.0.mlp (DeepseekV2MLP)" in text
    assert "test_hf_leaves.py:" in text
    assert "if x.sum() > 0" in text
    assert "next:" in text


def test_unknown_operator_names_its_place(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen3_moe import modeling_qwen3_moe as source

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.erfinv(x)

    monkeypatch.setattr(source.Qwen3MoeRMSNorm, "forward", forward)
    with pytest.raises(UnsupportedModelError, match=r"input_layernorm.*erfinv.*no import rule"):
        trace_hf_full(kit.config("qwen3_moe"), witnesses=False)


def test_gpt_oss_gates_round_as_transformers(kit: Any) -> None:
    """In bfloat16 the order of the products shows."""
    experts = kit.build("gpt_oss", torch.bfloat16).model.layers[0].mlp.experts
    both = (torch.randn(50, 48) * 5).bfloat16()
    got = leaf_ops.gated(both[..., ::2], both[..., 1::2], "swiglu_clamped")
    assert torch.equal(got, experts._apply_gate(both))
