"""Deferred experts on the simulated GPU: two hand-overs a layer, one awaited in the next layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hybrid_models import (
    DEFERRED,
    EXPERTS,
    OPTIONS,
    bind,
    follow,
    gqa_layers,
    greedy,
    make_hybrid,
    place,
)
from lowered_models import prompts

from ktgraph.ir.graph import Module
from ktgraph.runtime import arena
from ktgraph.runtime.errors import ExecutionError
from ktgraph.runtime.gpu.ordering import faults
from ktgraph.runtime.gpu.parts import AWAIT, cut
from ktgraph.runtime.plan import Plan

LIMIT = 1e-10  # NMSE in float32
TOP_K = 2
# layers by place of their experts: GPU first, in between, and two runs of layers on the CPU
MIXED = "".join(
    f"- match: {{name: '^model.layers.({layers}).mlp.experts', class: moe.grouped_mlp}}\n"
    f"  replace: {{device: {device}}}\n"
    for layers, device in (("0|3", "cuda:0"), ("1|2|4|5", "cpu"))
)


def deferred(layers: int = 4, experts: str = "cpu", n: int = 1) -> Module:
    """A lowered model of `layers` layers of experts."""
    module = gqa_layers(layers)
    place(module, experts, DEFERRED, replace(OPTIONS, defer=n))
    return module


@pytest.mark.parametrize(
    ("experts", "n", "boxes"), [("cpu", 1, 5), ("cpu", TOP_K, 3), ("streamed prefill", 1, 5)]
)
def test_ragged_batches(experts: str, n: int, boxes: int) -> None:
    """Each layer but the last hands over twice: once for what it awaits, once for the next."""
    pair = make_hybrid(gqa_layers(3), experts, pipeline=DEFERRED, defer=n)
    parts = pair.executor.parts["decode"]
    assert parts.can_capture
    assert len(parts.boxes) == boxes
    assert len(pair.executor.parts["prefill"].boxes) == (3 if experts == "cpu" else 0)
    assert max(follow(pair, [5, 2, 6, 1], [1, 3, 1, 1])) <= LIMIT


def test_layers_on_the_gpu_in_between() -> None:
    """A layer on the GPU takes what the one before hands on, and hands nothing on itself."""
    pair = make_hybrid(gqa_layers(6), MIXED, pipeline=DEFERRED, defer=1)
    assert len(pair.executor.parts["decode"].boxes) == 2 + 2 + 2 + 1
    assert max(follow(pair, [5, 2, 6, 1], [1, 3, 1, 1])) <= LIMIT


def test_quantized_experts() -> None:
    pair = make_hybrid(
        gqa_layers(3), "cpu", pipeline=DEFERRED, defer=1, quantize="experts=int4(group=32)"
    )
    assert max(follow(pair, [5, 3], [1, 2])) <= LIMIT


def test_the_answer_is_awaited_behind_the_next_post() -> None:
    """The GPU runs the next layer's attention, and asks for its experts, before it waits."""
    phase = Plan.build(deferred()).phase("decode")
    boxes = cut(phase).box_of
    posts = {boxes[i.step]: i.step for i in phase.instructions if i.kernel == "cuda.post"}
    awaits = {boxes[i.step]: i.step for i in phase.instructions if i.kernel == AWAIT}
    for layer in range(3):
        now, late = 2 * layer, 2 * layer + 1
        assert posts[now] < posts[late] < awaits[now] < posts[now + 2] < awaits[late]
        names = [op.op.name for op in phase.flat.ops[awaits[now] : awaits[late]]]
        assert "attn.sdpa" in names
        assert awaits[late] < awaits[now + 2]


def test_graphs_give_the_same_tokens() -> None:
    module = deferred(2)
    found: list[list[int]] = []
    for capture in (False, True):
        runner = bind(module, OPTIONS, capture=capture)
        found.append(greedy(runner, 6))
        runner.executor.close()
    assert found[0] == found[1]
    assert len(set(found[0])) > 4


@pytest.mark.parametrize("layers", [2, 3, 6])
@pytest.mark.parametrize("experts", ["cpu", MIXED], ids=["cpu", "mixed"])
def test_healthy_plans(layers: int, experts: str) -> None:
    if experts == MIXED and layers < 6:
        experts = MIXED.replace("0|3", "0").replace("1|2|4|5", "1|2")
    plan = Plan.build(deferred(layers, experts))
    assert [f for p in plan.phases for f in faults(plan.module, p, cut(p))] == []


def test_memory_of_two_layers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the arena's rule the next layer's post writes over what the CPU works on."""
    module = deferred()
    lives: Any = arena._Lives  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(lives, "_keep_until_answered", lambda *args: None)
    place(module, "cpu", "plan-memory,lower")
    plan = Plan.build(module)
    found = [f for p in plan.phases for f in faults(plan.module, p, cut(p))]
    assert any("bytes of cpu" in f and ".late = moe.grouped_mlp" in f for f in found)


def test_an_answer_that_is_never_awaited() -> None:
    """A copy in the await's place would read the answer before it is there."""
    module = deferred()
    for op in module.functions["decode"].walk():
        if op.name == "xfer.await" and "late" in op.result.name:
            op.name, op.via = "xfer.copy", "cuda.copy"
            op.attrs.clear()
    with pytest.raises(ExecutionError, match="nothing waits for mailbox 1"):
        bind(module, OPTIONS)


def test_a_failure_is_one_error_and_the_next_step_is_right() -> None:
    pair = make_hybrid(gqa_layers(3), "cpu", pipeline=DEFERRED, defer=1)
    seqs = [pair.open(), pair.open()]
    pair.forward(list(zip(seqs, prompts(5, 2), strict=True)))
    for _ in range(2):
        pair.forward([(seq, [4]) for seq in seqs])
    boxes: Any = pair.executor.mailboxes
    asked = boxes.set_sizes
    boxes.set_sizes = lambda tokens, rows: asked(10**6, rows)
    with pytest.raises(ExecutionError, match=r"the CPU's share of @decode"):
        pair.runner.forward([(seq, [6]) for seq in seqs])
    del boxes.set_sizes
    for _ in range(2):
        assert pair.forward([(seq, [6]) for seq in seqs]) <= LIMIT
    pair.executor.close()


def test_resident_experts_are_never_deferred() -> None:
    assert "lossy" not in deferred(3, EXPERTS["resident"]).functions["decode"].attrs
