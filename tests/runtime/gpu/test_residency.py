"""Hot experts: the split is exact wherever experts are, and slots change without a new capture."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hybrid_models import (
    DEFERRED,
    HOT,
    HOT_EXPERTS,
    OPTIONS,
    bind,
    follow,
    gqa_layers,
    greedy,
    make_hybrid,
    plan_of,
)
from lowered_models import nmse, prompts

import ktgraph as kt
from ktgraph.errors import UnsupportedInputError
from ktgraph.ir.graph import Module
from ktgraph.ir.parser import parse_module
from ktgraph.ops.moe import grouped_mlp, split_ids
from ktgraph.runtime.executor import ExecutionError
from ktgraph.runtime.gpu.adaptation import exchanged
from ktgraph.runtime.gpu.device import Step
from ktgraph.runtime.gpu.simulated import SimulatedDevice
from ktgraph.runtime.runner import Runner

LIMIT = 1e-10  # NMSE in float32
DOWN = "layers[0].mlp.experts.down_proj.q.p:tile"


class CountingDevice(SimulatedDevice):
    captures = 0

    def capture(self, steps: Sequence[Step]) -> Step:
        self.captures += 1
        return super().capture(steps)


@pytest.mark.parametrize("slots", [0, 1, 4, 9])
@pytest.mark.parametrize("tokens", [1, 2, 7, 33])
def test_both_sides_together_are_the_whole(tokens: int, slots: int) -> None:
    rng = torch.Generator().manual_seed(tokens + slots)
    x = torch.randn(tokens, 16, generator=rng, dtype=torch.float64)
    w13 = torch.randn(9, 24, 16, generator=rng, dtype=torch.float64)
    w2 = torch.randn(9, 16, 12, generator=rng, dtype=torch.float64)
    ids = torch.rand(tokens, 9, generator=rng).argsort(-1)[:, :3].to(torch.int32)
    ids[0, 0] = -1
    weights = torch.rand(tokens, 3, generator=rng)
    hot = torch.randperm(9, generator=rng)[:slots]
    table = torch.full((9,), -1, dtype=torch.int32)
    table[hot] = torch.arange(slots, dtype=torch.int32)
    attrs: dict[str, Any] = {"act": "silu", "alpha": 1.7, "limit": 7.0}
    whole = grouped_mlp(x, ids, weights, w13, w2, **attrs)
    here, there = split_ids(ids, table)
    assert torch.equal((here >= 0).int() + (there >= 0).int(), (ids >= 0).int())
    total = grouped_mlp(x, here, weights, w13[hot], w2[hot], **attrs)
    total = total + grouped_mlp(x, there, weights, w13, w2, **attrs)
    assert nmse(total, whole) < 1e-28


@pytest.mark.parametrize("experts", HOT_EXPERTS)
@pytest.mark.parametrize("model", ["mla", "gqa"])
def test_prefill_chunk_decode(model: str, experts: str) -> None:
    pair = make_hybrid(model, HOT_EXPERTS[experts])
    assert max(follow(pair, [15, 2, 6, 1], [1, 4, 2, 3])) <= LIMIT


@pytest.mark.parametrize("experts", HOT_EXPERTS)
@pytest.mark.parametrize("quantize", ["int8", "int4(group=32)", "fp8"])
def test_quantized_experts(quantize: str, experts: str) -> None:
    """Bytes move as they are, into slots and from slots into buffers of streamed layers."""
    pair = make_hybrid("gqa", HOT_EXPERTS[experts], quantize=f"experts={quantize}")
    forms = {u.key.partition(":")[2] for u in pair.runner.plan.uses() if "expert" in u.key}
    assert forms == {"tile", "tile@cuda:0", "stored@cuda:0"}
    for layer in (0, 1):
        pair.executor.set_residency(layer, [5, 2])
    assert max(follow(pair, [9, 3], [1, 2])) <= LIMIT


def test_deferred_experts_beside_hot_ones() -> None:
    """Of the lightest choices, those on the host come a layer later; hot ones do not."""
    pair = make_hybrid(gqa_layers(3), HOT, pipeline=DEFERRED, defer=1)
    decode = pair.runner.module.functions["decode"]
    assert "lossy" in decode.attrs
    names = [op.name for op in decode.walk()]
    assert "moe.by_weight" not in names  # the router sorted them
    assert max(follow(pair, [9, 3], [1, 2])) <= LIMIT


def every_residency(runner: Runner, rng: random.Random) -> None:
    """Give each layer's slots to other experts: none, some, as many as there are slots."""
    for layer in runner.residency:
        runner.set_residency(layer, rng.sample(range(6), rng.randint(0, 3)))


@pytest.mark.parametrize("experts", HOT_EXPERTS)
@pytest.mark.parametrize("model", ["mla", "gqa"])
def test_any_residency_gives_the_same_logits(model: str, experts: str) -> None:
    """The interpreter computes with the first experts hot; the runner with others at every step."""
    pair, rng = make_hybrid(model, HOT_EXPERTS[experts]), random.Random(1)
    seqs = [pair.open() for _ in range(3)]
    errors: list[float] = []
    for step, lengths in enumerate([(7, 12, 1), (1, 1, 1), (1, 1, 1), (3, 1, 5), (1, 1, 1)]):
        texts = prompts(*lengths, seed=step)
        errors.append(pair.forward(list(zip(seqs, texts, strict=True)), "all"))
        every_residency(pair.runner, rng)
    pair.executor.close()
    assert max(errors) <= LIMIT


def with_biases() -> Module:
    """The model gqa_moe with biases of experts, one of them stored in bf16."""
    text = str(gqa_layers(2))
    stacks = "@layers[i].mlp.experts.gate_up_proj, @layers[i].mlp.experts.down_proj"
    biases = "@layers[i].mlp.experts.gate_up_bias, @layers[i].mlp.experts.down_bias"
    family = "weight @layers[i in 0..1].mlp.experts"
    declared = (
        f'{family}.gate_up_bias : f32[E, 2*F] from "l.{{i}}.gate_up_bias"\n'
        f'{family}.down_bias : f32[E, D]<bf16> from "l.{{i}}.down_bias"\n'
    )
    text = text.replace(stacks, f"{stacks}, {biases}")
    return parse_module(text.replace("weight @norm", f"{declared}weight @norm"))


def test_biases_move_with_their_experts() -> None:
    pair = make_hybrid(with_biases(), HOT)
    for layer in (0, 1):
        pair.executor.set_residency(layer, [5, 3, 1])
    assert len(pair.executor.residency.layers[0].stacks) == 4
    assert max(follow(pair, [9, 3], [1, 2])) <= LIMIT


def test_resident_experts_do_not_cross_when_their_layer_is_streamed() -> None:
    runner = bind(
        plan_of("gqa", HOT_EXPERTS["hot, streamed prefill"], quantize="int8").module, OPTIONS
    )
    executor: Any = runner.executor
    runner.set_residency(0, [4, 1])
    (use,) = {
        u.key: u for u in runner.plan.phase("prefill").uses() if u.key == DOWN and u.form == "tile"
    }.values()
    source = executor.weights.tensors[use.key]
    target = torch.zeros_like(source)
    pairs = executor.residency.stack_of(use).parts(source, target)()
    host = source.data_ptr()
    crossing = [a for a, _ in pairs if host <= a.data_ptr() < host + source.nbytes]
    assert [len(a) for a in crossing] == [1, 2, 1]  # experts 0; 2 and 3; 5
    for a, b in pairs:
        b.copy_(a)
    assert torch.equal(target, source)
    runner.executor.close()


def test_swaps_do_not_capture_again() -> None:
    """Tokens of a long greedy run stay, and so does the number of graphs."""
    module = plan_of("gqa", HOT).module
    found: list[list[int]] = []
    for swaps in (False, True):
        device, rng = CountingDevice(), random.Random(2)
        runner = bind(module, OPTIONS, device)
        if swaps:
            forward = runner.forward

            def swapping(*args: Any, runner: Runner = runner, **more: Any) -> Any:
                every_residency(runner, rng)  # noqa: B023
                return forward(*args, **more)  # noqa: B023

            runner.forward = swapping  # type: ignore[method-assign]
        found.append(greedy(runner, 24))
        runner.executor.close()
        assert device.captures == 4  # one for each number of sequences
    assert found[0] == found[1]
    assert len(set(found[0])) > 4


def test_experts_keep_their_slots_and_the_table_is_right() -> None:
    runner = bind(plan_of("mla", HOT).module, OPTIONS)
    assert runner.residency == {1: [0, 1, 2]}
    runner.set_residency(1, [2, 5])
    assert runner.residency == {1: [5, 2]}  # 2 stays where it is
    executor: Any = runner.executor
    key = executor.residency.layers[1].table.key
    assert executor.weights.tensors[key].tolist() == [-1, -1, 2, -1, -1, 0]
    runner.set_residency(1, [])
    assert runner.residency == {1: []}
    runner.executor.close()


def test_slots_follow_what_is_chosen() -> None:
    """One token again and again: its experts take the slots; texts stay as they were."""
    device = CountingDevice()
    runner = bind(plan_of("mla", HOT).module, OPTIONS, device)
    with runner.counting_experts() as counts:
        for _ in range(4):
            seq = runner.open()
            before = runner.forward([(seq, [7, 7, 7, 7])])
            runner.close(seq)
    chosen = counts.popularity("").counts["layers[1].mlp.gate"]
    runner.set_residency(1, [])
    runner.adapt_residency(8)
    for _ in range(2):
        seq = runner.open()
        assert runner.residency == {1: []}  # the first look is after 8 tokens
        after = runner.forward([(seq, [7, 7, 7, 7])])
        runner.close(seq)
    (hot,) = runner.residency.values()
    wanted = sorted((e for e in range(6) if chosen[e]), key=lambda e: -chosen[e])[:3]
    assert sorted(hot, key=lambda e: -chosen[e]) == wanted
    assert nmse(after, before) < LIMIT
    with pytest.raises(UnsupportedInputError, match="counted already"), runner.counting_experts():
        pass
    runner.adapt_residency(None)
    with pytest.raises(UnsupportedInputError, match="every=0: expected a whole number"):
        runner.adapt_residency(0)
    runner.executor.close()


@pytest.mark.parametrize(
    ("hot", "counts", "wanted"),
    [
        ([0, 1], [5, 5, 5, 5], [0, 1]),  # as hot as the others: nothing moves
        ([0, 1], [5, 1, 2, 6], [0, 3]),
        ([0, 1], [5, 6, 7, 7], [0, 1]),  # not clearly hotter
        ([3], [0, 0, 0, 4], [3]),  # a free slot waits for an expert that is chosen
        ([], [0, 1, 0, 4], [3, 1]),
        ([2, 1], [9, 0, 0, 8], [3, 0]),
    ],
)
def test_exchanges(hot: list[int], counts: list[int], wanted: list[int]) -> None:
    assert exchanged(hot, 2, counts) == wanted


@pytest.mark.parametrize(
    ("layer", "experts", "message"),
    [
        (0, [1], r"layer 0 has no slots .*layers that have: 1"),
        (1, [0, 1, 2, 3], "4 experts for 3 slots"),
        (1, [2, 6], r"6 is no expert: expected 0\.\.5"),
        (1, [-1], "-1 is no expert"),
        (1, [True], "True is no expert"),
        (1, [4, 4], "expert 4 is given twice"),
    ],
)
def test_what_cannot_be_resident(layer: int, experts: list[int], message: str) -> None:
    runner = bind(plan_of("mla", HOT).module, OPTIONS)
    with pytest.raises(UnsupportedInputError, match=message):
        runner.set_residency(layer, experts)
    assert runner.residency == {1: [0, 1, 2]}
    runner.executor.close()
    with pytest.raises(ExecutionError, match="was closed"):
        runner.set_residency(1, [3])


def test_a_plan_without_slots_says_so() -> None:
    runner = bind(
        plan_of("mla", "- match: {class: moe.grouped_mlp}\n  replace: {device: cpu}").module,
        OPTIONS,
    )
    assert runner.residency == {}
    with pytest.raises(UnsupportedInputError, match="layers that have: none"):
        runner.set_residency(1, [0])
    with pytest.raises(UnsupportedInputError, match="no layer has slots"):
        runner.adapt_residency(8)
    runner.executor.close()


def test_the_trained_model_keeps_its_text_while_experts_move(
    tiny_deepseek: Path, tmp_path: Path
) -> None:
    """As the CPU target writes it, with a swap between two pieces, after a save and a load."""
    wanted = json.loads((tiny_deepseek / "reference.json").read_text())["greedy_float32"][0]
    rules = tmp_path / "rules.yaml"
    rules.write_text(HOT_EXPERTS["hot, streamed prefill"], encoding="utf-8")
    target = kt.hybrid(gpu="simulated", cpu_threads=2)
    exe = kt.compile(tiny_deepseek, target, dtype="f32", rules=rules, context=64, max_batch=2)
    layers, rng, found = sorted(exe.residency), random.Random(3), list[int]()
    for token in exe.generate(wanted["prompt_ids"], max_new_tokens=16, stream=True):
        found.append(token)
        exe.set_residency(rng.choice(layers), rng.sample(range(16), 3))
    assert found == wanted["ids"][:16]
    exe.save(tmp_path / "m.ktplan")
    again = kt.load(tmp_path / "m.ktplan")
    assert again.residency == exe.residency
    assert again.residency != {layer: [0, 1, 2] for layer in layers}
    logits = [e.logits(wanted["prompt_ids"]) for e in (exe, again)]
    assert torch.equal(*logits)
    for one in (exe, again):
        one.runner.executor.close()
    cpu = kt.compile(tiny_deepseek, "cpu", context=64, max_batch=2, threads=2)
    assert nmse(logits[0], cpu.logits(wanted["prompt_ids"])) < LIMIT
