"""Hot experts: how many slots, for which experts, at which price; rules and profiles that err."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hybrid_models import OPTIONS, gqa_layers, place
from placed_models import FRONT, context, small_target, v2_lite

from ktgraph.errors import MemoryBudgetError
from ktgraph.explain import explain
from ktgraph.ir.graph import Module
from ktgraph.ir.parser import parse_module
from ktgraph.ir.verify import verify
from ktgraph.pass_api import CompileOptions, reorder
from ktgraph.pipeline import Pipeline
from ktgraph.placement.decide import decide
from ktgraph.placement.decision import Decision, Settings
from ktgraph.placement.popularity import Popularity, PopularityError
from ktgraph.placement.rules import RuleError, parse_rules
from ktgraph.runtime.cache import CacheShape
from ktgraph.runtime.memory import memory_need
from ktgraph.runtime.plan import Plan
from ktgraph.target import load_target
from ktgraph.validate import Validator

HOT = "- match: {class: moe.grouped_mlp}\n  replace: {device: hot, experts: 3}\n"
FILL = "- match: {class: moe.grouped_mlp}\n  replace: {device: hot}\n"
LAYER_0 = (
    "- match: {name: 'layers.0.*gate_up', class: moe.*}\n  replace: {device: hot, experts: 5}\n"
)
SKEWED = {
    "layers[0].mlp.gate": [0, 0, 50, 1, 30, 0],
    "layers[1].mlp.gate": [40, 1, 0, 3, 0, 9],
}


def placed(rules: str, popularity: Popularity | None = None, **more: Any) -> tuple[Module, Any]:
    module = gqa_layers(2)
    options = OPTIONS
    if popularity is not None:
        options = replace(OPTIONS, popularity=popularity.path)
    return module, place(module, rules, options=options, **more)


def table(module: Module, name: str = "layers[].mlp.experts.slots") -> dict[str, Any]:
    made = module.weights[name].recipe
    assert made is not None
    return {k: str(v) if not isinstance(v, tuple) else v for k, v in made.attrs}


def profile(folder: Path, **counts: list[int]) -> Popularity:
    path = folder / "popularity.json"
    Popularity("gqa", 100, counts or SKEWED).save(path)
    return Popularity.load(path)


# -- the split -------------------------------------------------------------------------------------
@pytest.mark.parametrize("rules", [HOT, LAYER_0 + HOT])
def test_the_split_changes_round_off_alone(rules: str) -> None:
    """Every pass behind it too, and the text is canonical."""
    before = gqa_layers(2)
    after, _ = placed(rules)
    verify(after)
    assert str(parse_module(str(after))) == str(after)
    found = Validator().compare(before, after, reorder())
    assert (found.fault, found.error is not None) == ("", True)


def test_layers_may_have_different_numbers_of_slots() -> None:
    module, _ = placed(LAYER_0 + HOT)
    assert {k: v for k, v in module.dims.items() if k.startswith("HOT")} == {"HOT": 5, "HOT2": 3}
    splits = [op for op in module.functions["decode"].walk() if op.name == "moe.split_ids"]
    assert [str(op.weight(1)) for op in splits] == [
        "@layers[i].mlp.experts.slots",
        "@layers[i].mlp.experts.slots2",
    ]
    text = explain(module, "%routed")
    assert "5 of 6 experts have slots on cuda:0" in text
    assert "layers[1].mlp.experts.slots2: 0 1 2" in text


def test_the_host_starts_before_the_hot_experts_and_is_awaited_after_them() -> None:
    module, _ = placed(HOT)
    for func in module.functions.values():
        names = [op.name for op in func.walk()]
        post, wait = names.index("xfer.post"), names.index("xfer.await")
        between = [op for op in list(func.walk())[post:wait] if op.name == "moe.grouped_mlp"]
        assert [op.result.type.device for op in between] == ["cpu", None]


def test_a_profile_says_which_experts(tmp_path: Path) -> None:
    module, ctx = placed(HOT, profile(tmp_path))
    assert table(module)["hot"] == ("2 4 3", "0 5 3")
    shares = [op.attrs["share"] for op in module.functions["decode"].walk() if "share" in op.attrs]
    assert sorted(shares, key=str) == [0.0094, 0.9906]  # (81 / 81 + 52 / 53) / 2 on the GPU
    assert "cpu, 3 hot on cuda:0 (99%)" in ctx.artifacts["placement.txt"]


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_streamed_layers_cross_without_what_has_slots(quantize: str | None) -> None:
    stream = "- match: {class: moe.grouped_mlp}\n  replace: {device: stream}\n  phase: prefill\n"
    module = gqa_layers(2)
    place(module, stream + HOT, options=replace(OPTIONS, quantize=quantize))
    (copy,) = [op for op in module.functions["prefill"].walk() if op.name == "xfer.copy"]
    assert copy.attrs["share"] == 0.5
    assert not any(op.name == "moe.split_ids" for op in module.functions["prefill"].walk())


# -- budgets ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("gpu_memory", [198 << 10, 206 << 10, 230 << 10, 240 << 10])
def test_slots_fill_the_budget_and_no_more(gpu_memory: int) -> None:
    module, _ = placed(FILL, gpu_memory=gpu_memory)
    target = small_target(gpu_memory, kind="simulated")
    size, one = OPTIONS.page_size, 2 * 3 * 20 * 48 * 2  # bytes of an expert in each of two layers
    rows = CacheShape(size, (OPTIONS.cache_rows or 0) // size, OPTIONS.context)
    need = memory_need(Plan.build(module), rows, 2).on("cuda:0")
    held = need.of("weights") + need.of("cache") + need.of("activations") + need.of("workspace")
    left = target.device("cuda:0").memory - held
    assert 0 <= left < one + 16 * (48 + 4) * 4  # beside what the split's values may take
    assert any(".hot as bf16" in t.name for t in need.terms)


def test_no_room_for_one_expert_of_each_layer() -> None:
    with pytest.raises(MemoryBudgetError, match=r"one hot expert in each of 2 layers.*say device"):
        placed(FILL, gpu_memory=178 << 10)


def test_slots_that_do_not_fit_are_one_error() -> None:
    with pytest.raises(MemoryBudgetError, match=r"(.|\n)*slots of hot experts"):
        placed(HOT, gpu_memory=40 << 10)


def v2(popularity: Popularity | None, gpu_memory: int = 8 << 30) -> Decision:
    settings = Settings(
        CompileOptions(quantize="int8", context=2048, cache_rows=2048),
        gpu_memory=gpu_memory,
        popularity=popularity,
    )
    return decide(v2_lite(), load_target("rtx4090-24g+xeon"), settings)


def test_a_skewed_profile_makes_experts_hot_and_decode_faster() -> None:
    """Eight experts of a layer get nine of ten choices: better than whole layers on the GPU."""
    counts = [[90 if e % 8 == layer % 8 else 1 for e in range(64)] for layer in range(1, 27)]
    names = [f"layers[{layer}].mlp.gate" for layer in range(1, 27)]
    found = v2(Popularity("v2", 1, dict(zip(names, counts, strict=True))))
    assert {layer.slots for layer in found.hot.values()} != {0}
    assert found.used("cuda:0") <= 8 << 30
    before = v2(None)
    assert found.seconds("decode") < 0.8 * before.seconds("decode")
    assert found.request_seconds < before.request_seconds


def test_with_a_flat_profile_whole_layers_are_as_good() -> None:
    names = [f"layers[{layer}].mlp.gate" for layer in range(1, 27)]
    flat = v2(Popularity("v2", 1, {n: [1] * 64 for n in names}))
    assert flat.request_seconds <= v2(None).request_seconds


# -- what cannot be --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("replace", "message"),
    [
        ("{device: cpu, experts: 3}", "r.yaml:2: experts says how many are hot: .*device: hot"),
        ("{device: hot, experts: 0}", "r.yaml:2: experts must be a whole number above 0, got '0'"),
        ("{device: hot, experts: many}", "experts must be a whole number above 0, got 'many'"),
        ("{device: hot, experts: [1]}", "r.yaml:2: experts must be a text"),
    ],
)
def test_malformed_numbers(replace: str, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        parse_rules(f"- match: {{class: moe.*}}\n  replace: {replace}", "r.yaml")


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (HOT.replace("3", "7"), "experts: 7, but a layer has 6: expected 1..6"),
        ("- match: {class: nn.linear}\n  replace: {device: hot}", "only routed experts can be hot"),
        (
            HOT + "  phase: decode\n" + HOT.replace("3", "2"),
            "3 hot experts, .* asks for 2 of the same layer: its slots serve every phase",
        ),
    ],
)
def test_rules_that_cannot_be_kept(rules: str, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        placed(rules)


def test_hot_needs_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(HOT, encoding="utf-8")
    target = load_target("rtx4090-24g+xeon")
    ctx = context(type(target)("cpu", (target.cpu,), "cpu"), rules=str(tmp_path / "r.yaml"))
    with pytest.raises(RuleError, match="device hot is not there; devices: cpu"):
        v2_lite(f"{FRONT},place", ctx)


# -- profiles --------------------------------------------------------------------------------------
def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = profile(tmp_path)
    assert (found.model, found.tokens, dict(found.counts)) == ("gqa", 100, SKEWED)
    assert found.hottest("layers[1].mlp.gate", 6, 4) == [0, 5, 3, 1]
    assert found.share("layers[1].mlp.gate", 6, [0, 5]) == 49 / 53
    assert (tmp_path / "popularity.json").read_text().count("\n") == 8  # a line for each router


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"layers[0].mlp.gate": [1] * 6}, r"another model \(gqa\): @layers\[1\].*no such router"),
        (
            {"layers[0].mlp.gate": [1] * 8, "layers[1].mlp.gate": [1] * 8},
            "chooses among 6 experts here, and the profile has 8 experts there",
        ),
    ],
)
def test_a_profile_of_another_model(
    counts: dict[str, list[int]], message: str, tmp_path: Path
) -> None:
    """Also where everything fits the GPU, and nothing must be hot."""
    for rules in (HOT, "[]"):
        with pytest.raises(PopularityError, match=message):
            placed(rules, profile(tmp_path, **counts))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "popularity file .*p.json: "),
        ("[1]", "it is no popularity profile"),
        ('{"format": 7}', "its format is 7, expected 'ktgraph.popularity 1'"),
        ('{"format": "ktgraph.popularity 1"}', "model or tokens is missing"),
        (
            '{"format": "ktgraph.popularity 1", "model": "m", "tokens": 1, "counts": {"g": [-1]}}',
            "the counts of g are no list of whole numbers",
        ),
    ],
)
def test_a_damaged_profile(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(PopularityError, match=message):
        Popularity.load(path)


def test_a_profile_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PopularityError, match=r"none\.json: No such file"):
        Popularity.load(tmp_path / "none.json")


def test_the_pipeline_goes_on_from_the_text() -> None:
    """A module that `place` has split is lowered from its text as it would be without it."""
    module = gqa_layers(2)
    ctx = place(module, HOT, pipeline=f"{FRONT},place")
    again = parse_module(str(module))
    rest = "quantize,insert-copies,overlap,pack-weights,plan-memory,lower"
    for each in (module, again):
        for step in Pipeline.of(rest).steps:
            step.instance.run(each, ctx)
    assert str(module) == str(again)
