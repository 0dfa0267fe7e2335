"""Measured timelines of plans that use a GPU: every instruction once, on its lane, in order."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

import ktgraph as kt
from ktgraph.measured import timeline_events
from ktgraph.runtime.executor import ExecutionError, TraceEvent
from ktgraph.runtime.gpu.executor import GpuExecutor
from ktgraph.timeline import Event, lane_shares

GPUS = ["simulated", pytest.param("auto", marks=pytest.mark.gpu)]
_ON_CPU = "- match: {class: moe.grouped_mlp}\n  replace: {device: cpu}\n"
_STREAMED = (
    "- match: {class: moe.grouped_mlp}\n  replace: {device: stream}\n  phase: prefill\n" + _ON_CPU
)
PROMPT = list(range(5, 29))


@pytest.fixture(scope="module")
def traced() -> kt.Traced:
    return kt.trace(Path(__file__).parents[2] / "examples" / "models" / "tiny-deepseek-v2")


def compiled(
    traced: kt.Traced, gpu: str, folder: Path, rules: str = _ON_CPU, quantize: str | None = None
) -> kt.Compiled:
    (folder / "rules.yaml").write_text(rules)
    target = kt.hybrid(gpu_memory="4GiB", cpu_threads=1, gpu=gpu)
    rules_file = str(folder / "rules.yaml")
    lowered = traced.lower(
        target, rules=rules_file, quantize=quantize, context=96, max_batch=2, max_tokens=32
    )
    return lowered.compile()


def gpu_executor(exe: kt.Compiled) -> GpuExecutor:
    executor = exe.runner.executor
    assert isinstance(executor, GpuExecutor)
    return executor


def check_lanes(events: list[TraceEvent]) -> None:
    """No lane does two things at once, and each await follows an answer of the CPU."""
    for lane in {e.lane for e in events}:
        mine = sorted((e for e in events if e.lane == lane), key=lambda e: e.start)
        assert all(a.end <= b.start + 2e-6 for a, b in pairwise(mine)), lane
    posts, awaits, answers = (
        [e for e in events if e.kernel == kernel]
        for kernel in ("cuda.post", "cuda.await", "cpu.grouped_mlp")
    )
    assert len(posts) == len(awaits) == len(answers)
    slack = 50e-6  # the clocks of the two sides agree to some microseconds
    for post, answer, receive in zip(posts, answers, awaits, strict=True):
        assert post.start - slack <= answer.start
        assert answer.end <= receive.start + slack


@pytest.mark.parametrize("gpu", GPUS)
def test_a_measured_step_is_the_step(traced: kt.Traced, gpu: str, tmp_path: Path) -> None:
    exe = compiled(traced, gpu, tmp_path)
    runner = exe.runner
    want = exe.generate(PROMPT, 4, eos=())
    seq = runner.open()
    first = runner.measure([(seq, PROMPT)])  # at a size that never ran
    assert runner.length(seq) == len(PROMPT)
    check_lanes(first)
    plan = runner.plan.phase(first[0].phase)
    assert sorted(e.kernel for e in first) == sorted(i.kernel for i in plan.instructions)
    runner.truncate(seq, len(PROMPT) - 1)
    found = [int(runner.forward([(seq, PROMPT[-1:])]).argmax())]
    for _ in range(3):
        runner.truncate(seq, runner.length(seq))
        decode = runner.measure([(seq, [found[-1]])])
        check_lanes(decode)
        assert {e.phase for e in decode} == {"decode"}
        runner.truncate(seq, runner.length(seq) - 1)
        found.append(int(runner.forward([(seq, [found[-1]])]).argmax()))
    assert found == want
    runner.close(seq)
    gpu_executor(exe).close()


def test_a_prefill_in_two_calls_is_one_timeline(traced: kt.Traced, tmp_path: Path) -> None:
    exe = compiled(traced, "simulated", tmp_path)
    seq = exe.runner.open()
    events = exe.runner.measure([(seq, [7] * 40)])  # 32 tokens are the most of a call
    check_lanes(events)
    count = len(exe.runner.plan.phase("prefill").instructions)
    assert len(events) == 2 * count
    assert max(e.end for e in events[:count]) <= min(e.start for e in events[count:]) + 1e-9
    gpu_executor(exe).close()


def test_streamed_weights_have_a_lane(traced: kt.Traced, tmp_path: Path) -> None:
    exe = compiled(traced, "simulated", tmp_path, _STREAMED, quantize="experts=int8")
    seq = exe.runner.open()
    events = exe.runner.measure([(seq, PROMPT)])
    link = [e for e in events if e.lane == "cpu -> cuda:0"]
    assert len(link) == 4  # layers with experts
    assert {e.kernel for e in link} == {"cuda.stream_weights"}
    assert all(e.seconds > 0 for e in link)
    readers = [e for e in events if "grouped_mlp" in e.kernel]
    assert all(copy.end <= use.start + 1e-9 for copy, use in zip(link, readers, strict=True))
    gpu_executor(exe).close()


def test_a_simulated_gpu_takes_modelled_time(traced: kt.Traced, tmp_path: Path) -> None:
    exe = compiled(traced, "simulated", tmp_path)
    events = timeline_events(exe.runner, exe.cost_analysis(), 24)
    by_phase: dict[str, list[Event]] = {}
    for event in events:
        by_phase.setdefault(event.phase, []).append(event)
    assert list(by_phase) == [
        "prefill, measured", "prefill, predicted", "decode, measured", "decode, predicted"
    ]  # fmt: skip
    for phase in ("prefill", "decode"):
        measured = lane_shares(by_phase[f"{phase}, measured"])
        predicted = lane_shares(by_phase[f"{phase}, predicted"])
        assert measured.busy["cuda:0"] == pytest.approx(predicted.busy["cuda:0"])
        assert measured.busy["cpu"] > 0
        assert measured.together > 0  # shared experts beside routed ones
    copies = [e for e in by_phase["decode, measured"] if e.category == "copy"]
    assert {e.name for e in copies} == {"cuda.post", "cuda.await"}
    exe.runner.executor.close()


def test_timeline_files(traced: kt.Traced, tmp_path: Path) -> None:
    exe = compiled(traced, "simulated", tmp_path)
    exe.timeline(tmp_path / "t.json", tokens=8)
    rows = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    lanes = {r["args"]["name"] for r in rows if r["name"] == "thread_name"}
    assert {"cuda:0", "cpu"} <= lanes
    exe.timeline(tmp_path / "t.html", tokens=8)
    page = (tmp_path / "t.html").read_text()
    assert page.count("two or more at once") == 4
    assert page.count("cuda:0 works ") == 4
    assert "@decode, measured" in page
    trace = exe.runner.timeline([(exe.runner.open(), [1, 2, 3])])
    assert {e["tid"] for e in trace["traceEvents"]} == {"cuda:0", "cpu"}
    exe.runner.executor.close()


def test_a_failure_while_measured_leaves_a_runner_that_works(
    traced: kt.Traced, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exe = compiled(traced, "simulated", tmp_path)
    want = exe.generate(PROMPT, 4, eos=())
    seq = exe.runner.open()
    with monkeypatch.context() as patch:
        patch.setattr(gpu_executor(exe).mailboxes, "check", _failing)
        with pytest.raises(ExecutionError, match="the CPU's share of @prefill: broken"):
            exe.runner.measure([(seq, PROMPT)])
    assert exe.runner.length(seq) == 0
    assert exe.runner.executor.trace is None
    exe.runner.close(seq)
    assert exe.generate(PROMPT, 4, eos=()) == want
    exe.runner.executor.close()


def _failing() -> None:
    raise RuntimeError("broken")


@pytest.mark.parametrize("gpu", GPUS)
def test_an_interrupted_call_ends_before_the_next_begins(
    traced: kt.Traced, gpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the host waits: the GPU is in the middle of the step, and goes on."""
    exe = compiled(traced, gpu, tmp_path)
    want = exe.generate(PROMPT, 4, eos=())
    device = gpu_executor(exe).device

    def interrupted(look: object, patience: float) -> bool:
        device.is_done()  # works until the first answer of the CPU is missing
        raise KeyboardInterrupt

    for ids in ([9] * 30, [3]):  # a prefill, and a step that is one graph
        seq = exe.runner.open()
        with monkeypatch.context() as patch:
            patch.setattr(device, "finish", interrupted)
            with pytest.raises(KeyboardInterrupt):
                exe.runner.forward([(seq, ids)])
        exe.runner.close(seq)
        assert exe.generate(PROMPT, 4, eos=()) == want
    exe.runner.executor.close()


def test_the_experts_explanation_names_hand_overs_and_kernels(
    traced: kt.Traced, tmp_path: Path
) -> None:
    exe = compiled(traced, "simulated", tmp_path)
    for text in exe.explain("%routed").split("\n\n"):
        assert "  runs on cpu\n" in text
        assert (
            "  its operands come by cuda.post (%post_attention_norm.cpu, %ids.1.cpu, "
            "%weights.cpu)\n  its result goes back by cuda.await (%routed.cuda0)\n"
            "  meanwhile cuda:0 computes %down_proj (triton.swiglu)\n"
        ) in text
        assert "not triton.grouped_mlp: it is for cuda" in text
        assert text.count("not torch.reference") == 1
    exe.runner.executor.close()
