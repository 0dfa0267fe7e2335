"""Policies: what a line of text decides, and the errors it can cause."""

import pytest
from small_models import gqa_moe, mla_moe

from ktgraph.ir.graph import Module
from ktgraph.pass_api import PassContext
from ktgraph.passes.mla_absorb import MlaAbsorb
from ktgraph.passes.specialize_phases import SpecializePhases
from ktgraph.weights.policy import Policy, PolicyError


def decided(module: Module, text: str) -> dict[str, str]:
    """Weight -> its encoding, "keep", or the budget."""
    found = Policy.parse(text).decide(module)
    return {d.use.name: str(d.encoding or d.budget or "keep") for d in found}


def test_int4_gives_the_output_head_int8() -> None:
    found = decided(mla_moe(), "int4(group=64)")
    assert found["lm_head"] == "int8"
    assert found["layers[].o_proj"] == "int4(group=64)"
    assert found["layers[1].mlp.experts.down_proj"] == "int4(group=64)"
    assert decided(gqa_moe(), "int4")["embed_tokens"] == "int8"  # tied: the head's use of it


def test_only_matrices_are_considered() -> None:
    """No norm, bias, router, table or kv_b appears, in either form of the attention."""
    module = mla_moe()
    for step in (SpecializePhases(), MlaAbsorb(form="absorbed")):
        step.run(module, PassContext())
    names = set(decided(module, "int8"))
    assert names == {
        "layers[].q_proj", "layers[].kv_a", "layers[].o_proj", "layers[0].mlp.w13",
        "layers[0].mlp.down_proj", "layers[1].mlp.experts.gate_up_proj",
        "layers[1].mlp.experts.down_proj", "layers[1].mlp.shared.gate_proj",
        "layers[1].mlp.shared.up_proj", "layers[1].mlp.shared.down_proj", "lm_head",
    }  # fmt: skip


def test_the_first_match_wins_and_keep_excludes() -> None:
    found = decided(mla_moe(), r"\.experts=int4(group=64),shared|lm_head=keep,*=int8")
    assert found["layers[1].mlp.experts.down_proj"] == "int4(group=64)"
    assert found["layers[1].mlp.shared.up_proj"] == "keep"
    assert found["lm_head"] == "keep"
    assert found["layers[].q_proj"] == "int8"


def test_patterns_see_what_a_weight_is_made_from() -> None:
    found = decided(mla_moe(), r"mlp\.gate_proj=int8")
    assert found["layers[0].mlp.w13"] == "int8"
    assert found["layers[].q_proj"] == "keep"


def test_a_budget_is_for_what_no_pattern_takes() -> None:
    found = decided(mla_moe(), "lm_head=keep,budget=0.01")
    assert found["lm_head"] == "keep"
    assert found["layers[].q_proj"] == "0.01"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the policy is empty"),
        ("int5", "unknown encoding int5 .did you mean"),
        ("q_proj=int4(group=33)", "group must be one of 32, 64, 128"),
        ("o_prj=int8", "'o_prj' matches no weight; close names: @layers.*o_proj"),
        ("kv_b=int8", None),
        ("norm=int8", "matches no weight"),
        ("(=int8", "closes nothing|not closed"),
        ("[=int8", "not closed|is no pattern"),
        ("*proj=int8", "is no pattern.*regular expressions, found anywhere in a name"),
        ("experts:int8", "'experts:int8' is no encoding; write pattern=encoding"),
        ("int8,experts=int4", "'experts=int4' never holds"),
        ("q_proj=int8,q_proj=int4", "'q_proj=int4' never holds"),
        ("int8(group=16)", "group must be one of 0, 32, 64, 128"),
        ("bf16", "bf16 is no quantized encoding; write one of int4"),
        ("tile.int8", "tile.int8 is no quantized encoding"),
        ("*=gguf.q4_k", "gguf.q4_k is read from a GGUF file, nothing here quantizes to it"),
        ("budget=2", "an NMSE between 0 and 1, got '2'"),
        ("budget=x", "an NMSE between 0 and 1"),
    ],
)
def test_errors(text: str, message: str | None) -> None:
    with pytest.raises(PolicyError, match=message):
        decided(mla_moe(), text)


def test_weights_that_are_never_quantized_cannot_be_asked_for() -> None:
    module = mla_moe()
    gate = module.weights["layers[1].mlp.gate"]
    op = next(o for o in module.walk() if o.name == "nn.linear")
    op.set_operand(1, gate.ref())
    with pytest.raises(PolicyError, match=r"never quantized: @layers\[1\].mlp.gate .a router"):
        decided(module, r"mlp\.gate$=int8")
