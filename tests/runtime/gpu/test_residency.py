"""Hot experts: the split is exact wherever experts are, and slots change without a new capture.

What runs a model runs on a simulated GPU, and again on a real one where there is one.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hybrid_models import (
    DEFERRED,
    HOT,
    HOT_EXPERTS,
    OPTIONS,
    PIPELINE,
    Hybrid,
    bind,
    follow,
    gqa_layers,
    greedy,
    make_hybrid,
    place,
    plan_of,
)
from lowered_models import MODELS, nmse, prompts

import ktgraph as kt
from ktgraph.errors import UnsupportedInputError
from ktgraph.ir.graph import Module
from ktgraph.ir.parser import parse_module
from ktgraph.ops.moe import grouped_mlp, split_ids
from ktgraph.runtime.errors import ExecutionError
from ktgraph.runtime.gpu.adaptation import exchanged
from ktgraph.runtime.gpu.cuda import CudaDevice
from ktgraph.runtime.gpu.device import Fetch, GpuDevice, Step
from ktgraph.runtime.gpu.phase import BoundPhase
from ktgraph.runtime.gpu.simulated import SimulatedDevice
from ktgraph.runtime.packed import packed_weights
from ktgraph.runtime.plan import Plan
from ktgraph.runtime.runner import Runner
from ktgraph.weights.evaluate import WeightEvaluator
from ktgraph.weights.sources import RandomSource

LIMIT = 1e-10  # NMSE in float32
DOWN = "layers[0].mlp.experts.down_proj.q.p:tile"


NewDevice = Callable[[], GpuDevice]


@pytest.fixture(params=["simulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def new_device(request: pytest.FixtureRequest) -> NewDevice:
    """Makes GPUs of one kind."""
    return SimulatedDevice if request.param == "simulated" else CudaDevice


def count_captures(device: GpuDevice) -> list[int]:
    """A list that grows by the number of steps of every graph that the device captures."""
    found: list[int] = []
    capture = device.capture

    def counted(steps: Sequence[Step]) -> Step:
        found.append(len(steps))
        return capture(steps)

    device.capture = counted  # type: ignore[method-assign]
    return found


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
def test_prefill_chunk_decode(model: str, experts: str, new_device: NewDevice) -> None:
    pair = make_hybrid(model, HOT_EXPERTS[experts], device=new_device())
    assert max(follow(pair, [15, 2, 6, 1], [1, 4, 2, 3])) <= LIMIT


@pytest.mark.parametrize("experts", HOT_EXPERTS)
@pytest.mark.parametrize("quantize", ["int8", "int4(group=32)", "fp8"])
def test_quantized_experts(quantize: str, experts: str, new_device: NewDevice) -> None:
    """Bytes move as they are, into slots and from slots into buffers of streamed layers."""
    policy = f"experts={quantize}"
    pair = make_hybrid("gqa", HOT_EXPERTS[experts], device=new_device(), quantize=policy)
    forms = {u.key.partition(":")[2] for u in pair.runner.plan.uses() if "expert" in u.key}
    assert forms == {"tile", "tile@cuda:0", "stored@cuda:0"}
    for layer in (0, 1):
        pair.executor.set_residency(layer, [5, 2])
    assert max(follow(pair, [9, 3], [1, 2])) <= LIMIT


def test_deferred_experts_beside_hot_ones(new_device: NewDevice) -> None:
    """Of the lightest choices, those on the host come a layer later; hot ones do not."""
    pair = make_hybrid(gqa_layers(3), HOT, device=new_device(), pipeline=DEFERRED, defer=1)
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
def test_any_residency_gives_the_same_logits(
    model: str, experts: str, new_device: NewDevice
) -> None:
    """The interpreter computes with the first experts hot; the runner with others every second
    step, and in between while they are on their way."""
    pair = make_hybrid(model, HOT_EXPERTS[experts], device=new_device())
    rng = random.Random(1)
    seqs = [pair.open() for _ in range(3)]
    errors: list[float] = []
    calls = [(7, 12, 1), (1, 1, 1), (1, 1, 1), (1, 1, 1), (3, 1, 5), (2, 2, 1), (1, 1, 1)]
    for step, lengths in enumerate(calls):
        texts = prompts(*lengths, seed=step)
        errors.append(pair.forward(list(zip(seqs, texts, strict=True)), "all"))
        if step % 2 == 0:
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


def test_biases_move_with_their_experts(new_device: NewDevice) -> None:
    pair = make_hybrid(with_biases(), HOT, device=new_device())
    for layer in (0, 1):
        pair.executor.set_residency(layer, [5, 3, 1])
    assert len(pair.executor.residency.layers[0].stacks) == 4
    assert max(follow(pair, [9, 3], [1, 2])) <= LIMIT


def test_resident_experts_do_not_cross_when_their_layer_is_streamed(new_device: NewDevice) -> None:
    plan = plan_of("gqa", HOT_EXPERTS["hot, streamed prefill"], quantize="int8")
    runner = bind(plan.module, OPTIONS, new_device())
    executor: Any = runner.executor
    runner.set_residency(0, [4, 1])
    runner.settle_residency()
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


def test_swaps_do_not_capture_again(new_device: NewDevice) -> None:
    """Tokens of a long greedy run stay, and so does the number of graphs."""
    module = plan_of("gqa", HOT).module
    found: list[list[int]] = []
    for swaps in (False, True):
        device, rng = new_device(), random.Random(2)
        captured = count_captures(device)
        runner = bind(module, OPTIONS, device)
        if swaps:
            forward = runner.forward

            def swapping(*args: Any, runner: Runner = runner, **more: Any) -> Any:
                every_residency(runner, rng)  # noqa: B023
                return forward(*args, **more)  # noqa: B023

            runner.forward = swapping  # type: ignore[method-assign]
        found.append(greedy(runner, 24))
        runner.executor.close()
        assert len(captured) == 4  # one for each number of sequences
    assert found[0] == found[1]
    assert len(set(found[0])) > 4


def test_experts_keep_their_slots_and_the_table_is_right(new_device: NewDevice) -> None:
    runner = bind(plan_of("mla", HOT).module, OPTIONS, new_device())
    assert runner.residency == {1: [0, 1, 2]}
    runner.set_residency(1, [2, 5])
    assert runner.residency == {1: [5, 2]}  # 2 stays where it is
    runner.settle_residency()
    executor: Any = runner.executor
    table = executor.weights.tensors[executor.residency.layers[1].table.key]
    assert table.tolist() == [-1, -1, 2, -1, -1, 0]
    runner.set_residency(1, [5])  # nothing is copied, and yet there is a table to wait for
    runner.settle_residency()
    assert table.tolist() == [-1] * 5 + [0]
    runner.set_residency(1, [])
    assert runner.residency == {1: []}
    runner.forward([(runner.open(), [3])])
    assert table.tolist() == [-1] * 6
    runner.executor.close()


STORED = [  # slots that are packed, dense, packed and streamed, dense for want of a kernel
    ("hot", "int4(group=32)"),
    ("hot", None),
    ("hot, streamed prefill", "int8"),
    ("hot", "mxfp4"),
]


@pytest.mark.parametrize(("experts", "quantize"), STORED)
def test_the_checkpoint_is_read_once(
    experts: str, quantize: str | None, new_device: NewDevice
) -> None:
    """Slots are filled from the host's stack, with the numbers that the checkpoint would give."""
    module = MODELS["gqa"]()
    pipeline = PIPELINE.replace("pack-weights", "dequantize,pack-weights")
    place(module, HOT_EXPERTS[experts], pipeline, replace(OPTIONS, quantize=quantize))
    runner = bind(module, OPTIONS, new_device())
    plan, held = runner.plan, runner.executor.weights.tensors
    slots = [u for u in plan.held() if ".hot" in u.key]
    assert len(slots) == 4
    assert not {u.key for u in slots} & {u.key for u in plan.loaded()}
    evaluator = WeightEvaluator(module, RandomSource(module), cache_nbytes=0)
    for use, wanted in packed_weights(slots, evaluator):
        assert torch.equal(held[use.key].cpu().reshape(-1), wanted.reshape(-1))
    runner.executor.close()


def test_slots_of_another_encoding_are_read_from_the_checkpoint() -> None:
    """Its own bytes: the host's would be rounded twice; and experts do not move."""
    lines = str(plan_of("gqa", HOT, quantize="int8").module).split("\n")
    dense = [x.replace("int8", "f32") if ".hot" in x and "weight" in x else x for x in lines]
    module = parse_module("\n".join(dense))
    slots = [u for u in Plan.build(module).loaded() if ".hot" in u.key]
    assert [str(u.type.encoding) for u in slots] == ["tile.f32(gate_up=yes)", "tile.f32"] * 2
    runner = bind(module, OPTIONS)
    with pytest.raises(UnsupportedInputError, match="are stored differently, so experts cannot"):
        runner.set_residency(1, [4])
    with pytest.raises(UnsupportedInputError, match="are stored differently, so experts cannot"):
        runner.adapt_residency(8)  # at once, not in the middle of a text
    assert runner.residency[1] == [0, 1, 2]
    runner.executor.close()


def changing(new_device: NewDevice) -> tuple[Hybrid, Any, torch.Tensor]:
    """A model with a decode step behind it, its sequence, and the table of layer 1."""
    pair = make_hybrid("mla", HOT, device=new_device())
    seq = pair.open()
    for tokens in ([3, 1, 4], [1], [5]):
        assert pair.forward([(seq, tokens)]) <= LIMIT
    key = pair.executor.residency.layers[1].table.key
    return pair, seq, pair.executor.weights.tensors[key]


def test_a_change_runs_behind_one_call(new_device: NewDevice) -> None:
    """Experts that leave are struck at once, new ones enter in front of the second call."""
    pair, seq, table = changing(new_device)
    pair.executor.set_residency(1, [2, 5, 4])
    assert pair.runner.residency == {1: [5, 4, 2]}
    seen: list[list[int]] = []
    for token in (1, 2, 3):
        assert pair.forward([(seq, [token])]) <= LIMIT
        seen.append(table.tolist())
    assert seen == [[-1, -1, 2, -1, -1, -1], *[[-1, -1, 2, -1, 1, 0]] * 2]
    pair.executor.close()


def test_a_second_change_of_a_layer_comes_behind_the_first(new_device: NewDevice) -> None:
    pair, seq, table = changing(new_device)
    for experts in ([5], [4, 3], [3, 0, 5]):
        pair.executor.set_residency(1, experts)
    for token in (1, 2, 3):
        assert pair.forward([(seq, [token])]) <= LIMIT
    assert sorted(pair.runner.residency[1]) == [0, 3, 5]
    assert [table[e] >= 0 for e in range(6)] == [True, False, False, True, False, True]
    pair.executor.close()


def test_slots_on_their_way_are_not_read() -> None:
    """Until the copy was waited for they hold poison, and the call in between is right."""
    pair, seq, _ = changing(SimulatedDevice)
    executor = pair.executor
    executor.set_residency(1, [2, 5, 4])
    assert pair.forward([(seq, [1])]) <= LIMIT
    layer = executor.residency.layers[1]
    first = layer.stacks[0]
    slots = executor.weights.tensors[first.slots.key].view(3, -1)
    assert slots.float().isnan().all(-1).tolist() == [True, True, False]
    assert pair.forward([(seq, [1])]) <= LIMIT
    assert not slots.float().isnan().any()
    executor.close()


def test_a_table_written_before_its_copies_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, seq, _ = changing(SimulatedDevice)

    def hasty(self: SimulatedDevice, copy: Fetch) -> Step:
        return lambda: None

    pair.executor.set_residency(1, [5, 4, 3])
    monkeypatch.setattr(SimulatedDevice, "fetched", hasty)
    logits = [pair.runner.forward([(seq, [1])]) for _ in range(2)]
    assert not logits[0].isnan().any()
    assert logits[1].isnan().all()
    pair.executor.close()


@pytest.mark.parametrize("calls", [0, 1])
def test_a_failed_call_loses_no_change(
    calls: int, new_device: NewDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure drops what was under way, in the call behind which it runs or in the second."""
    pair, seq, table = changing(new_device)
    pair.executor.set_residency(1, [2, 5, 4])
    for _ in range(calls):
        assert pair.forward([(seq, [1])]) <= LIMIT

    def failing(self: BoundPhase, *given: object) -> None:
        raise ExecutionError("as if an op had failed")

    with monkeypatch.context() as patched:
        patched.setattr(BoundPhase, "run", failing)
        with pytest.raises(ExecutionError, match="as if"):
            pair.runner.forward([(seq, [1])])
    for token in (1, 2):
        assert pair.forward([(seq, [token])]) <= LIMIT
    assert table.tolist() == [-1, -1, 2, -1, 1, 0]
    pair.executor.close()


def test_an_interrupted_change_is_no_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C behind the launch of its copies: the slots no longer hold the experts of before."""
    pair, seq, _ = changing(SimulatedDevice)
    device = pair.executor.device
    run = device.run

    def interrupted(steps: Sequence[Step]) -> None:
        monkeypatch.setattr(device, "run", run)
        run(steps)
        raise KeyboardInterrupt

    monkeypatch.setattr(device, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pair.executor.set_residency(1, [5, 4, 3])
    pair.executor.set_residency(1, [0, 1, 2])
    for token in (1, 2, 3):
        assert pair.forward([(seq, [token])]) <= LIMIT
    assert sorted(pair.runner.residency[1]) == [0, 1, 2]
    pair.executor.close()


def test_a_failure_right_behind_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """The change before it, whose copies had not been waited for, is not lost."""
    pair, seq, _ = changing(SimulatedDevice)

    def failing(self: BoundPhase, *given: object) -> None:
        raise ExecutionError("as if an op had failed")

    pair.executor.set_residency(1, [5, 1, 2])
    pair.executor.set_residency(1, [5, 4, 2])
    with monkeypatch.context() as patched:
        patched.setattr(BoundPhase, "run", failing)
        with pytest.raises(ExecutionError, match="as if"):
            pair.runner.forward([(seq, [1])])
    assert pair.forward([(seq, [*range(20)])], "all") <= LIMIT
    pair.executor.close()


def test_a_copy_that_does_not_end_keeps_no_thread_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing says so, and the threads that watch mailboxes stop all the same."""
    pair, _, _ = changing(SimulatedDevice)
    executor, closed = pair.executor, list[int]()
    pair.executor.set_residency(1, [5, 4, 3])
    close = executor.mailboxes.close
    monkeypatch.setattr(executor.mailboxes, "close", lambda: (closed.append(1), close()))
    monkeypatch.setattr(executor.device, "finish", lambda *given: False)
    with pytest.raises(ExecutionError, match="copies of hot experts did not end in time"):
        executor.close()
    assert closed
    with pytest.raises(ExecutionError, match="this executor was closed"):
        executor.set_residency(1, [0])


def test_slots_follow_what_is_chosen(new_device: NewDevice) -> None:
    """One token again and again: its experts take the slots; texts stay as they were."""
    runner = bind(plan_of("mla", HOT).module, OPTIONS, new_device())
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
    for _ in range(2):  # behind the first of these the experts move
        seq = runner.open()
        after = runner.forward([(seq, [7, 7, 7, 7])])
        runner.close(seq)
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
