"""Plans of small models: what they say, that it is what `kt.compile` would do, and bad input."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

import ktgraph as kt
from ktgraph.analysis import cost_analysis
from ktgraph.cli import main
from ktgraph.cost import Call
from ktgraph.errors import UnsupportedInputError
from ktgraph.model_input import read_model
from ktgraph.placement.lanes import OpTimes
from ktgraph.planner import Forecast, ModelPlan, WhatIfError
from ktgraph.planner.holdings import ROUTED, spans
from ktgraph.target import Disk, Target, TargetError, load_target

TINY = Path(__file__).resolve().parents[2] / "examples/models/tiny-deepseek-v2"
HYBRID = load_target("rtx4090-24g+xeon")
MIB = 1 << 20


def host(memory: int) -> Target:
    """A host alone; the disk is slow enough to be seen."""
    cpu = replace(HYBRID.cpu, memory=memory, threads=2)
    return Target("host", (cpu,), "cpu", disk=Disk(1e8, 1e-4))


def small(gpu_memory: int) -> Target:
    """The described machine with as much GPU memory beside the scratch of kernels."""
    return HYBRID.with_device(replace(HYBRID.gpus[0], memory=(1 << 30) + gpu_memory))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder without weights: the config alone."""
    folder = tmp_path_factory.mktemp("tiny")
    shutil.copy(TINY / "config.json", folder / "config.json")
    return folder / "config.json"


@pytest.fixture(scope="module")
def traced(config: Path) -> kt.Traced:
    return kt.trace(config)


@pytest.fixture(scope="module")
def planned(traced: kt.Traced) -> ModelPlan:
    what_if = ["ram=30MiB", "ram=1MiB", "disk=x2,ram=30MiB", "batch=4", "gpu=rtx4090-24g+xeon"]
    return kt.plan(traced, host(64 * MIB), what_if=what_if, context=128)


def test_memory_is_what_compile_reserves(planned: ModelPlan, traced: kt.Traced) -> None:
    base = planned.base
    assert base.need is not None
    options: dict[str, Any] = {"context": 128, "max_batch": 1}
    lowered = traced.lower(host(64 * MIB), **options)
    assert base.need.total == lowered.memory_need().total
    assert str(base.module) == lowered.as_text()
    weights = sum(h.nbytes for h in base.holdings)
    assert weights == base.need.of("weights")
    analysed = lowered.memory_analysis()
    assert analysed.of("cpu", "weights") == pytest.approx(weights, rel=1e-3)  # norms as stored


def test_speed_is_the_cost_models_and_its_limits_add_up(planned: ModelPlan) -> None:
    base = planned.base
    assert base.module is not None
    assert base.decode is not None
    assert base.prefill is not None
    assert base.prompt is not None
    found = cost_analysis(base.module, base.target).at(T=1, S=128)
    assert base.decode.seconds == found.seconds
    assert base.decode.speed == pytest.approx(1 / found.seconds)
    for phase in (base.prefill, base.prompt, base.decode):
        assert sum(x.seconds for x in phase.limits) == pytest.approx(phase.seconds)
        assert phase.bound.seconds == max(x.seconds for x in phase.limits)
    assert base.prompt.tokens == 64
    assert (base.prefill.tokens, base.decode.rows) == (128, 128)


def test_a_batch_shares_weights(planned: ModelPlan) -> None:
    four = planned.what_if("batch=4")
    assert four.decode is not None
    assert planned.base.decode is not None
    assert (four.decode.tokens, four.decode.rows) == (4, 4 * 128)
    assert planned.base.decode.speed < four.decode.speed < 4 * planned.base.decode.speed
    assert four.options.max_batch == 4


def experts_read(found: Forecast) -> tuple[float, int]:
    """Bytes of experts that a decode step touches, and how many layers read some."""
    assert found.module is not None
    decode = found.module.functions["decode"]
    times = OpTimes(found.module, found.target, Call.decode(127))
    cost = [times.host_experts(op) for op in decode.walk() if op.name == "moe.grouped_mlp"]
    (body,) = [op for op in decode.walk() if op.body is not None]
    layers = body.int_attr("hi") - body.int_attr("lo") + 1
    return cost[0] * layers, layers


def test_disk_is_the_third_tier(planned: ModelPlan) -> None:
    """By hand: a layer waits for the disk once, and for the share of its experts that RAM lacks."""
    base, short = planned.base, planned.what_if("ram=30MiB")
    assert (base.fits, base.disk) == (True, None)
    assert not short.fits
    assert short.refusal.startswith("cpu has 30 MiB, and this needs ")
    assert "@layers[].mlp.experts" in short.refusal
    assert short.disk is not None
    assert base.need is not None
    missing = base.need.total - 30 * MIB
    experts = sum(h.nbytes for h in base.holdings if h.what == ROUTED)
    assert short.disk.nbytes == missing
    assert short.disk.share == pytest.approx(missing / experts)
    touched, layers = experts_read(base)
    assert short.disk.a_token == pytest.approx(short.disk.share * touched)
    assert short.decode is not None
    assert base.decode is not None
    wait = layers * 1e-4 + short.disk.a_token / 1e8
    assert short.decode.seconds == pytest.approx(base.decode.seconds + wait)
    assert short.decode.bound.kind == "disk"
    faster = planned.what_if("disk=x2,ram=30MiB")
    assert faster.decode is not None
    assert base.decode.seconds < faster.decode.seconds < short.decode.seconds


def test_more_than_experts_missing_is_refused_without_speeds(planned: ModelPlan) -> None:
    found = planned.what_if("ram=1MiB")
    assert (found.fits, found.disk, found.decode) == (False, None, None)
    assert found.need is not None


def test_places_of_a_hybrid_machine(traced: kt.Traced) -> None:
    found = kt.plan(traced, small(30 * MIB), context=128).base
    assert found.fits
    routed = [h for h in found.holdings if h.what == ROUTED]
    assert {h.device for h in routed} == {"cuda:0", "cpu"}
    assert sorted(n for h in routed for n in h.layers) == [1, 2, 3, 4]
    assert found.need is not None
    for device in ("cpu", "cuda:0"):
        here = sum(h.nbytes for h in found.holdings if h.device == device)
        terms = found.need.on(device).terms
        assert here == sum(t.nbytes for t in terms if t.kind == "weights")
    assert {h.what for h in found.holdings} == {
        ROUTED, "shared experts", "dense MLP", "attention", "router", "embedding", "output head",
        "norms and tables",
    }  # fmt: skip
    assert found.decode is not None
    assert {x.kind for x in found.decode.limits} <= {"memory", "compute", "launch", "link"}


def test_a_gpu_that_is_too_small_says_the_least(traced: kt.Traced) -> None:
    found = kt.plan(traced, HYBRID, gpu_memory="512MiB", context=128)
    assert not found.fits
    assert found.base.decode is None
    assert "which is the least that does" in found.base.refusal
    assert "does not fit: kt.compile refuses it" in str(found)


def test_what_is_printed(planned: ModelPlan) -> None:
    text = str(planned)
    for part in (
        "million weights, 5 layers",
        "weights as stored, computed in f32, context 128, batch 1",
        "target host: described",
        "fits: cpu ",
        "speed, predicted",
        "where weights live",
        "routed experts      1..4  24.01 MiB  bf16       cpu     cpu",
        "what if",
        "from disk",
    ):
        assert part in text
    assert max(map(len, text.splitlines())) <= 110


def test_spans() -> None:
    assert [spans(x) for x in ((), (3,), (0, 1, 2), (0, 4, 5, 9))] == [
        "-",
        "3",
        "0..2",
        "0, 4..5, 9",
    ]


# -- what may be given -----------------------------------------------------------------------------
def test_a_file_a_folder_and_a_config_are_one(traced: kt.Traced, config: Path) -> None:
    given = transformers.AutoConfig.from_pretrained(TINY)
    from_config = kt.trace(given)
    assert str(from_config.ir) == str(traced.ir)
    assert read_model(config.parent).card.max_context == from_config.given.card.max_context == 1024
    assert [read_model(g).card.name for g in (config, config.parent)] == [config.parent.name] * 2
    with pytest.raises(UnsupportedInputError, match="traced from a config, which has no weights"):
        traced.lower("cpu").compile()
    with pytest.raises(UnsupportedInputError, match="the model was traced in 'auto'"):
        kt.plan(traced, host(MIB), dtype="bf16")


def test_bad_input_is_one_message(config: Path, traced: kt.Traced, tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    unknown = tmp_path / "unknown.json"
    unknown.write_text(json.dumps({"model_type": "no_such_model"}))

    def refused(match: str, error: type[Exception], *args: Any, **options: Any) -> None:
        with pytest.raises(error, match=match):
            kt.plan(*args, **options)

    bad = UnsupportedInputError
    refused(r"gone\.json: no such file", bad, tmp_path / "gone.json")
    refused(r"broken\.json: not valid JSON", bad, broken)
    refused(r"unknown\.json: transformers .* cannot read it as a config", bad, unknown)
    refused("a model of type int", bad, 3)
    refused("unknown target 'rtx'", TargetError, config, "rtx")
    refused("batch=0: expected a whole number", bad, config, "cpu", batch=0)
    refused("unknown option 'contxt'", bad, config, "cpu", contxt=3)
    refused("int3", bad, config, "cpu", quantize="int3")
    refused("was made for", bad, traced, "cpu", context=1 << 20)
    refused("did you mean ram", WhatIfError, config, "cpu", what_if="rma=3GiB")
    refused("has no GPU", WhatIfError, config, host(MIB), gpu_memory="2GiB")


def test_the_command(config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "host.toml").write_text(host(64 * MIB).to_toml())
    asked = ["plan", str(config), "--target", str(tmp_path / "host.toml"), "--context", "64"]
    short = [*asked, "--ram", "30MiB", "--what-if", "ram=+34MiB", "--what-if", "dram=x2"]
    assert main(short) == 1
    shown = capsys.readouterr().out
    assert "does not fit: kt.compile refuses it" in shown
    (fits,) = [x for x in shown.splitlines() if x.strip().startswith("ram=+34MiB")]
    assert fits.split()[1] == "yes"
    assert "dram=x2" in shown
    assert main([*asked, "--what-if", "ram"]) == 2
    assert "expected key=value" in capsys.readouterr().err
