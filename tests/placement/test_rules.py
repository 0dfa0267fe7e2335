"""YAML rules: reading, matching, errors with file and line, and what they do to a module."""

from pathlib import Path

import pytest
from placed_models import FRONT, context, v2_lite

from ktgraph.ir.parser import parse_module
from ktgraph.ir.types import Encoding
from ktgraph.ir.verify import verify
from ktgraph.pass_api import RuleEvent
from ktgraph.pass_report import is_at_layer
from ktgraph.placement.report import layers_of, layers_text
from ktgraph.placement.rules import RuleError, match_rules, parse_rules, read_rules

GOOD = r"""
- match:
    name: '^model\.layers\.(1|2)\.mlp\.experts$'
  replace: {device: cuda:0}
- match: {class: moe.grouped_mlp}
  replace: {device: cpu, encoding: int4(group=64)}
  phase: decode
"""


def test_a_rule_is_read() -> None:
    first, second = parse_rules(GOOD, "r.yaml")
    assert (first.where, first.device, first.op_class) == ("r.yaml:2", "cuda:0", None)
    assert second.encoding == Encoding("int4", (("group", 64),))
    assert (second.op_class, second.phase) == ("moe.grouped_mlp", "decode")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "- match: {name: a}\n  replase: {device: cpu}",
            r"r.yaml:2: unknown key 'replase'.*replace",
        ),
        ("- match: {name: a}", "r.yaml:1: the rule has no replace"),
        ("\n- match: {name: '(a'}\n  replace: {device: cpu}", "r.yaml:2: .* no regular expression"),
        ("- match: {name: a}\n  replace: {encoding: int5}", "r.yaml:2: .*int5"),
        ("- match: {name: a}\n  replace: {device: cpu}\n  phase: train", "r.yaml:3: phase"),
        ("match: {name: a}", "r.yaml:1: expected a list"),
        ("- match: {name: [a\n", r"r.yaml:\d+: "),
        ("- match: {}\n  replace: {device: cpu}", "r.yaml:1: match needs"),
        ("- match: a\n  replace: {device: cpu}", "r.yaml:1: match must be a mapping"),
    ],
)
def test_malformed_rules_say_where(text: str, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        parse_rules(text, "r.yaml")


def test_a_missing_file_is_named() -> None:
    with pytest.raises(RuleError, match=r"nowhere\.yaml: No such file"):
        read_rules("nowhere.yaml")


def test_the_first_match_holds_for_each_layer() -> None:
    module = v2_lite()
    rules = parse_rules(GOOD, "r.yaml")
    held = match_rules(module, rules, ["cuda:0", "cpu"])
    layers = {
        (layer, module.function_of(op).name): rule.where
        for (op, layer), rule in held.items()
        if op.name == "moe.grouped_mlp"
    }
    assert layers[1, "decode"] == layers[2, "prefill"] == "r.yaml:2"
    assert layers[3, "decode"] == "r.yaml:5"
    assert (3, "prefill") not in layers


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("{class: moe.gruoped}", "matches nothing; close names: moe.grouped_mlp"),
        ("{name: 'layers.*expertz'}", "matches nothing; close names: .*experts"),
        (
            "{name: 'mlp.experts', class: nn.linear}",
            "ops with such names are .*not of class nn.lin",
        ),
    ],
)
def test_a_rule_that_matches_nothing_is_an_error(rule: str, message: str) -> None:
    rules = parse_rules(f"- match: {rule}\n  replace: {{device: cpu}}", "r.yaml")
    with pytest.raises(RuleError, match=rf"r.yaml:1 .*{message}"):
        match_rules(v2_lite(), rules)


def test_a_device_that_is_not_there_is_an_error() -> None:
    rules = parse_rules("- match: {class: moe.*}\n  replace: {device: cuda:1}", "r.yaml")
    with pytest.raises(RuleError, match=r"r.yaml:1: device cuda:1 is not there; devices: cpu"):
        match_rules(v2_lite(), rules, ["cpu"])


def test_rules_place_and_quantize_layers_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(GOOD.replace("  phase: decode\n", ""))
    ctx = context(rules=str(file))
    module = v2_lite(f"{FRONT},place,quantize,insert-copies", ctx)
    verify(module)
    experts = [op for op in module.functions["decode"].walk() if op.name == "moe.grouped_mlp"]
    assert [op.result.type.device for op in experts] == [None, "cpu"]
    kinds = [module.weight_of(op.weight(3)).type for op in experts]
    assert [str(k.encoding or "") for k in kinds] == ["", "int4(group=64)"]
    assert f"rule {file}:2" in ctx.artifacts["placement.txt"]
    assert module.weight_of(experts[1].weight(3)).lo == 3


def test_a_phase_rule_makes_a_twin(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("- match: {name: 'lm_head'}\n  replace: {device: cpu}\n  phase: decode\n")
    ctx = context(rules=str(file), quantize="int8")
    module = v2_lite(f"{FRONT},place,insert-copies", ctx)
    verify(module)
    heads = {f.name: f.body.ops[-1] for f in module.functions.values()}
    assert "@lm_head" in str(heads["prefill"])
    assert heads["decode"].name == "xfer.copy"
    assert module.weights["lm_head.cpu"].type.device == "cpu"


def test_the_cache_lies_on_one_device(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    rule = "- match: {{name: 'layers.{}.self_attn$', class: kv.*}}\n  replace: {{device: {}}}\n"
    file.write_text(rule.format(1, "cpu") + rule.format(2, "cuda:0"))
    with pytest.raises(RuleError, match="the cache is one state and lies on one device"):
        v2_lite(f"{FRONT},place", context(rules=str(file)))
    file.write_text(rule.format(1, "cpu"))
    module = v2_lite(f"{FRONT},place,insert-copies", context(rules=str(file)))
    verify(module)
    assert all(a.type.device == "cpu" for a in module.functions["decode"].args if a.name == "kv")


PAIRS = """\
ktgraph.ir 1
module @pairs
dim D = 12
sym T in 1..64
weight @layers[i in 0..3].w : f32[D, D] from "model.layers.{i}.w"

func @main(%x: f32[T, D]) -> (f32[T, D]) {
  %x.n = repeat i in 0..1 (%x.i = %x) {
    %a = nn.linear %x.i, @layers[2*i].w : f32[T, D] loc "model.layers.{2*i}"
    %b = nn.linear %a, @layers[2*i+1].w : f32[T, D] loc "model.layers.{2*i+1}"
    yield %b
  } : f32[T, D]
  return %x.n
}
"""


def test_layers_that_alternate_go_by_their_own_numbers() -> None:
    """A turn of the repeat is a pair of layers; rules, reports and questions name the layer."""
    module = parse_module(PAIRS)
    for name in (r"^model\.layers\.3$", r"^layers\[3\]\.w$", r"^model\.layers\.3\.w$"):
        rules = parse_rules(f"- match: {{name: '{name}'}}\n  replace: {{device: cpu}}", "r.yaml")
        held = match_rules(module, rules)
        assert [(op.results[0].name, turn) for op, turn in held] == [("b", 1)]
    first, second = (op for op in module.walk() if op.name == "nn.linear")
    assert layers_text(layers_of(first, [0, 1])) == "0, 2"
    assert layers_text(layers_of(second, [0, 1, 2])) == "1, 3 .. 5"
    for layer, wanted in ((2, first), (3, second)):
        found = [
            o for o in (first, second) if is_at_layer(RuleEvent("r", "matched", str(o)), layer)
        ]
        assert found == [wanted]
