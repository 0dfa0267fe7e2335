"""How a phase is cut: what a mailbox computes, what the host runs, and what may be captured."""

from __future__ import annotations

import pytest
from hybrid_models import (
    EXPERTS,
    FRONT,
    HYBRID,
    OPTIONS,
    bind,
    make_hybrid,
    move_behind,
    place,
    plan_of,
    two_groups,
)
from lowered_models import MODELS, prompts

from ktgraph.ir.graph import Module
from ktgraph.runtime.arena import PlanError
from ktgraph.runtime.gpu.parts import Parts, cut
from ktgraph.runtime.kernels_cpu import REFERENCE
from ktgraph.runtime.plan import Plan

SUM_ON_THE_HOST = EXPERTS["cpu"] + "- match: {class: tensor.add3}\n  replace: {device: cpu}\n"
LIMIT = 1e-10


def cut_of(plan: Plan, phase: str = "decode") -> Parts:
    return cut(plan.phase(phase))


def kernels(parts: Parts) -> list[list[str]]:
    return [[i.kernel for i in box] for box in parts.boxes]


def run_on_reference(module: Module, *names: str) -> None:
    """Let ops of these names run on their torch reference."""
    for op in module.walk():
        if op.name in names:
            op.via = REFERENCE


def test_all_on_the_gpu_is_one_part() -> None:
    parts = cut_of(plan_of("mla", "resident"))
    assert (parts.can_capture, parts.boxes, parts.box_of) == (True, [], {})


def test_a_mailbox_for_each_layer() -> None:
    plan = plan_of("gqa", "cpu")
    parts = cut_of(plan)
    assert parts.can_capture
    assert kernels(parts) == [["cpu.grouped_mlp"]] * 2
    assert sorted(parts.box_of.values()) == [0, 0, 1, 1]  # a post and an await
    (part,) = parts.order
    assert "cpu.grouped_mlp" not in [i.kernel for i in part.items]
    names = {step: plan.phase("decode").flat.ops[step].op.name for step in parts.box_of}
    assert sorted(names.values()) == ["xfer.await"] * 2 + ["xfer.post"] * 2


def test_what_an_earlier_post_brought_may_be_read() -> None:
    """The second choice of experts reads the rows that went with the first."""
    parts = cut_of(plan_of(two_groups(), "cpu"))
    assert parts.can_capture
    assert kernels(parts) == [["cpu.grouped_mlp"]] * 2


def test_the_host_waits_for_the_mailboxes_that_it_reads() -> None:
    """A sum on the CPU, of two answers and a value that was copied."""
    parts = cut_of(plan_of(two_groups(), SUM_ON_THE_HOST))
    assert [p.kind for p in parts.order] == ["gpu", "native", "gpu"]
    assert [p.awaits for p in parts.order] == [[], [0, 1], []]
    assert not parts.can_capture
    assert sorted(parts.box_of.values()) == [0, 1]  # the posts: no await takes an answer


@pytest.mark.parametrize("rules", [EXPERTS["cpu"], SUM_ON_THE_HOST])
def test_two_answers_at_once_are_right(rules: str) -> None:
    pair = make_hybrid(two_groups(), rules)
    seqs = [pair.open(), pair.open()]
    assert pair.forward(list(zip(seqs, prompts(5, 9), strict=True)), "all") <= LIMIT
    for _ in range(3):
        assert pair.forward([(seq, [7]) for seq in seqs]) <= LIMIT
    pair.executor.close()


@pytest.mark.parametrize(("names", "count"), [(["nn.embedding"], 1), (["attn.sdpa"], 2)])
def test_fallbacks_on_the_gpu_are_parts_of_their_own(names: list[str], count: int) -> None:
    """Also where the first op is one: the call's inputs are there before it."""
    pair = make_hybrid("gqa", "cpu")
    healthy = pair.runner
    run_on_reference(pair.reference.module, *names)
    parts = cut_of(Plan.build(pair.reference.module))
    python = [p for p in parts.order if p.kind == "python"]
    assert [len(p.items) for p in python] == [1] * count
    assert not parts.can_capture
    assert parts.order[0].kind == "gpu"
    pair.runner = bind(pair.reference.module, OPTIONS)
    seqs = [pair.open(), pair.open()]
    assert pair.forward(list(zip(seqs, prompts(5, 9), strict=True)), "all") <= LIMIT
    for _ in range(3):
        assert pair.forward([(seq, [7]) for seq in seqs]) <= LIMIT
    for runner in (healthy, pair.runner):
        runner.executor.close()


def test_a_python_kernel_between_post_and_await_is_refused() -> None:
    module = MODELS["mla"]()
    place(module, "cpu")
    run_on_reference(module, "moe.grouped_mlp")
    with pytest.raises(
        PlanError, match=r"must be a native kernel.*\n  in: %l1\.routed = moe\.grouped_mlp"
    ):
        cut_of(Plan.build(module))


def test_streamed_weights_are_for_kernels_of_the_gpu() -> None:
    module = MODELS["mla"]()
    place(module, "streamed")
    run_on_reference(module, "moe.grouped_mlp")
    with pytest.raises(
        PlanError, match=r"streamed to the GPU.*\n  in: %l1\.routed = moe\.grouped_mlp"
    ):
        cut_of(Plan.build(module))


def test_an_await_takes_one_answer() -> None:
    module = two_groups()
    place(module, "cpu", f"{FRONT},{HYBRID}".replace(",overlap", ""))
    func = module.functions["decode"]
    first, second = (o for o in func.walk() if o.name == "xfer.await")
    move_behind(module, first.results[0].name, "l1.routed2")
    first.set_operands([*first.operands, *second.operands])
    first.results.append(second.results[0])
    func.body.ops.remove(second)
    place(module, "cpu", "pack-weights,plan-memory,lower")
    with pytest.raises(PlanError, match=r"one mailbox\n  in: %l1.routed.cuda0"):
        cut_of(Plan.build(module))
