"""The static check of who touches which bytes: silent on healthy plans, and not on broken ones."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hybrid_models import (
    EXPERTS,
    FRONT,
    HYBRID,
    OPTIONS,
    bind,
    gqa_layers,
    make_hybrid,
    move_behind,
    place,
    plan_of,
    two_groups,
)
from lowered_models import MODELS, prompts

from ktgraph.ir import parse_module
from ktgraph.ir.graph import Module
from ktgraph.runtime import arena
from ktgraph.runtime.errors import ExecutionError
from ktgraph.runtime.gpu import streaming
from ktgraph.runtime.gpu.ordering import faults
from ktgraph.runtime.gpu.parts import cut
from ktgraph.runtime.plan import Plan

UNMOVED = f"{FRONT},{HYBRID}".replace(",overlap", "")
PLANNED = "pack-weights,plan-memory,lower"


def faults_of(plan: Plan) -> list[str]:
    return [f for p in plan.phases for f in faults(plan.module, p, cut(p))]


def both_at_once() -> Module:
    """Both posts, then both answers: two mailboxes compute at the same time."""
    module = two_groups()
    place(module, "cpu", UNMOVED)
    move_behind(module, "l1.routed", "l1.ids2.cpu")
    return module


def first_answer_behind_the_second_post() -> Module:
    """The second mailbox may compute before the first answer is taken."""
    module = both_at_once()
    move_behind(module, "l1.routed.cuda0", "l1.routed")
    place(module, "cpu", PLANNED)
    return module


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("model", ["mla", "gqa", "two groups"])
def test_healthy_plans(model: str, experts: str) -> None:
    module = two_groups() if model == "two groups" else MODELS[model]()
    assert faults_of(plan_of(module, experts)) == []


@pytest.mark.parametrize("layers", [1, 2, 3, 5])
def test_healthy_streams(layers: int) -> None:
    assert faults_of(plan_of(gqa_layers(layers), "streamed")) == []


def test_a_post_over_an_answer_that_is_unread() -> None:
    """The executor refuses the plan on the simulated device, with both lines."""
    module = both_at_once()
    place(module, "cpu", PLANNED)
    text = str(module)
    start, end = text.index("func @decode"), len(text)
    offset = re.search(r'"l1\.routed:(\d+):', text[start:])
    assert offset is not None
    planted = re.sub(r'"l1\.ids2\.cpu:\d+:', f'"l1.ids2.cpu:{offset[1]}:', text[start:end])
    assert planted != text[start:end]
    broken = parse_module(text[:start] + planted)
    (first, *_) = faults_of(Plan.build(broken))
    assert "bytes of cpu" in first
    assert "%l1.routed = moe.grouped_mlp" in first
    assert "%l1.ids2.cpu, %l1.wts2.cpu = xfer.post" in first
    with pytest.raises(ExecutionError, match="may touch the same bytes of cpu") as caught:
        bind(broken, OPTIONS)
    assert first in str(caught.value)


def test_operands_of_the_host_live_until_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that rule the second post writes over what the first mailbox reads."""
    module = both_at_once()
    move_behind(module, "l1.routed", "l1.h.1.cpu")
    place(module, "cpu", PLANNED)
    assert faults_of(Plan.build(module)) == []
    lives: Any = arena._Lives  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(lives, "_keep_until_answered", lambda *args: None)
    place(module, "cpu", "plan-memory,lower")
    found = faults_of(Plan.build(module))
    assert any("%l1.routed = moe" in f and "= xfer.post %l1.ids2" in f for f in found)


def test_answers_have_their_bytes_from_the_post_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that rule the second mailbox writes over the first answer, which is being taken."""
    module = first_answer_behind_the_second_post()
    move_behind(module, "l1.routed.cuda0", "l1.ids2.cpu")
    move_behind(module, "l1.routed", "l1.h.1.cpu")
    place(module, "cpu", "plan-memory,lower")
    assert faults_of(Plan.build(module)) == []
    lives: Any = arena._Lives  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(lives, "_posted", lambda self, step, position, result: position)
    place(module, "cpu", "plan-memory,lower")
    found = faults_of(Plan.build(module))
    assert any("%l1.routed.cuda0 = xfer.await" in f and "%l1.routed2 = moe" in f for f in found)


def test_what_runs_beside_the_main_stream_has_bytes_of_its_own() -> None:
    """The routed experts read their ids before the shared one writes there, but in the text."""
    text = str(plan_of("mla", "resident").module)
    start = text.index("func @decode")
    offset = re.search(r'"l1\.ids:(\d+):', text[start:])
    assert offset is not None
    planted = re.sub(r'"l1\.shared:\d+:', f'"l1.shared:{offset[1]}:', text[start:])
    assert planted != text[start:]
    found = faults_of(Plan.build(parse_module(text[:start] + planted)))
    assert any("= moe.grouped_mlp" in f and "= nn.swiglu" in f for f in found)


@pytest.mark.parametrize("make", [both_at_once, first_answer_behind_the_second_post])
def test_crossing_answers_are_right(make: Any) -> None:
    pair = make_hybrid(make(), "cpu", pipeline=PLANNED)
    seqs = [pair.open(), pair.open()]
    assert pair.forward(list(zip(seqs, prompts(5, 9), strict=True)), "all") <= 1e-10
    for _ in range(5):
        assert pair.forward([(seq, [7]) for seq in seqs]) <= 1e-10
    pair.executor.close()


def test_a_mailbox_that_nobody_waits_for() -> None:
    plan = plan_of("mla", "cpu")
    phase = plan.phase("decode")
    parts = cut(phase)
    answered = max(parts.box_of)
    del parts.box_of[answered]
    found = faults(plan.module, phase, parts)
    assert any("nothing waits for mailbox 0" in f for f in found)
    assert any("bytes of cpu" in f and "xfer.await" in f for f in found)


def test_a_third_buffer_would_be_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that restart one layer too early write over weights that are being read."""
    plan = plan_of(gqa_layers(5), "streamed")
    phase = plan.phase("decode")
    healthy = streaming.readers

    def early(phase: Any, item: Any) -> list[int]:
        return [n - 3 for n in healthy(phase, item)][:1] + healthy(phase, item)[:0]

    monkeypatch.setattr("ktgraph.runtime.gpu.ordering.readers", early)
    assert any("bytes of buffer 0" in f for f in faults(plan.module, phase, cut(phase)))
