"""Cost, memory, timelines and explanations of a placed module."""

import json
import re
from pathlib import Path

import pytest
from placed_models import FRONT, HYBRID, context, v2_lite

from ktgraph.analysis import AnalysisError, cost_analysis, memory_analysis
from ktgraph.cli import main
from ktgraph.cost import Call, op_cost
from ktgraph.explain import ExplainError, explain
from ktgraph.ir.graph import Module
from ktgraph.ir.types import Encoding
from ktgraph.pass_api import PassContext
from ktgraph.target import load_target
from ktgraph.timeline import Event, lane_shares, lanes_html, predicted_events, write_chrome_trace
from ktgraph.triton_kernels.packed_forms import UNPACK_REACH
from ktgraph.weights.encodings import parse_encoding, shape_nbytes

TARGET = load_target("rtx4090-24g+xeon")


@pytest.fixture(scope="module")
def placed() -> tuple[Module, PassContext]:
    ctx = context()
    return v2_lite(f"{FRONT},{HYBRID}", ctx), ctx


def test_costs_by_hand() -> None:
    module = v2_lite()
    call = Call.decode(4095)
    experts = next(o for o in module.functions["decode"].walk() if o.name == "moe.grouped_mlp")
    found = op_cost(module, experts, call, call.bindings(module))
    d, f, k, e = 2048, 1408, 6, 64
    assert found.flops == 6 * k * d * f
    touched = e * (1 - (1 - 1 / e) ** k)
    rows = d * 2 + k * 4 + k * 4
    assert found.read == pytest.approx(rows + touched * 3 * d * f * 2)
    name = experts.weight(3).name
    less = op_cost(module, experts, call, call.bindings(module), encodings={name: Encoding("int8")})
    assert less.read < found.read
    assert found.seconds(TARGET, "cpu") == pytest.approx(
        (found.read + found.written) / (0.85 * 230e9) + 5e-6  # 0.85: what the kernel reaches
    )


@pytest.mark.parametrize("encoding", ["fp8(group=128)", "int4(group=64)", "mxfp4(group=32)"])
def test_a_gpu_unpacks_weights_for_many_tokens(encoding: str) -> None:
    """What its kernels read packed is read, written dense, and read again; and then multiplied."""
    module = v2_lite()
    experts = next(o for o in module.functions["prefill"].walk() if o.name == "moe.grouped_mlp")
    encodings = {experts.weight(n).name: parse_encoding(encoding) for n in (3, 4)}
    gpu = TARGET.device("cuda:0")

    def parts(tokens: int, device: str = "cuda:0") -> dict[str, float]:
        call = Call.prefill(tokens)
        found = op_cost(module, experts, call, call.bindings(module), encodings=encodings)
        return found.parts(TARGET, device)

    matrices = [(64, 2816, 2048), (64, 2048, 1408)]
    dense = 2 * 64 * 3 * 2048 * 1408
    packed = sum(shape_nbytes(shape, parse_encoding(encoding)) for shape in matrices)
    unpacking = (packed + dense) / (gpu.bandwidth_at() * UNPACK_REACH)
    if encoding.startswith("mxfp4"):  # no kernel: `dequantize` runs before
        unpacking = 0.0
    assert parts(2048).get("memory", 0.0) == pytest.approx(unpacking)  # bound by compute
    read = parts(128)["memory"] - unpacking
    assert read > dense / gpu.bandwidth_at() or not unpacking
    assert (
        parts(42)["memory"] < packed / (0.7 * gpu.bandwidth_at()) * 1.01
    )  # 252 pairs: as they are
    assert "memory" not in parts(2048, "cpu")


def test_overlap_is_time_saved(placed: tuple[Module, PassContext]) -> None:
    found = cost_analysis(placed[0], TARGET).at(T=1, S=4096)
    assert found.func.name == "decode"
    assert found.saved > 0
    assert found.seconds + found.saved == pytest.approx(found.serial_seconds)
    assert max(t.seconds for t in found.by_lane()) <= found.seconds
    assert found.unknown == []
    assert "overlap saves" in found.table()
    assert {t.lane for t in found.by_lane()} == {
        "cuda:0", "cpu",
    }  # fmt: skip


def test_sizes_that_cannot_be_are_refused(placed: tuple[Module, PassContext]) -> None:
    costs = cost_analysis(placed[0], TARGET)
    assert costs.at(T=300, S=400).func.name == "prefill"
    with pytest.raises(AnalysisError, match="S >= T"):
        costs.at(T=5, S=4)
    with pytest.raises(AnalysisError, match="no phase 'train'; phases: prefill, decode"):
        costs.at(phase="train")


def test_memory_by_device_and_kind(placed: tuple[Module, PassContext]) -> None:
    found = memory_analysis(placed[0])
    assert found.fits(TARGET)
    assert found.of("cuda:0", "kv") == 27 * 576 * 2 * 16 * 4096
    assert found.of("cpu", "kv") == 0
    experts = 3 * 2048 * 1408 * 64 * 2 * 26
    both = sum(t.nbytes for t in found.terms if "experts" in t.name and t.kind == "weights")
    assert both == experts
    assert found.of("cpu", "pinned") > 0
    assert "largest:" in found.table()


def test_timelines_have_a_lane_for_each_device(
    placed: tuple[Module, PassContext], tmp_path: Path
) -> None:
    cost = cost_analysis(placed[0], TARGET).at(T=1, S=4096)
    events = predicted_events("decode", cost.predicted)
    write_chrome_trace(tmp_path / "t.json", events)
    rows = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {r["args"]["name"] for r in rows if r["name"] == "thread_name"}
    assert names == {"cuda:0", "cpu"}  # mailboxes take their turn on the GPU's stream
    bars = [r for r in rows if r["ph"] == "X"]
    assert max(r["ts"] + r["dur"] for r in bars) == pytest.approx(cost.seconds * 1e6)
    page = lanes_html("a <model>", events)
    assert page.count("<rect ") == len(bars)
    assert "a &lt;model&gt;" in page
    assert "http" not in page.replace("http://www.w3.org", "")


def test_shares_of_lanes() -> None:
    """0 1 2 3 4 5: a works 0-2 and 1-3, b works 2-4, c works 3-5."""
    spans = [("a", 0.0, 2.0), ("a", 1.0, 2.0), ("b", 2.0, 2.0), ("c", 3.0, 2.0)]
    found = lane_shares([Event("k", "op", "p", *span) for span in spans])
    assert found.span == 5.0
    assert dict(found.busy) == {"a": 3.0, "b": 2.0, "c": 2.0}
    assert [found.idle(lane) for lane in "abc"] == pytest.approx([0.4, 0.6, 0.6])
    assert found.together == 2.0  # a with b, then b with c
    assert found.text() == (
        "a works 3000 ms, idle 40%; b works 2000 ms, idle 60%; c works 2000 ms, idle 60%; "
        "two or more at once 2000 ms, 40%"
    )


def test_explanations(placed: tuple[Module, PassContext]) -> None:
    module, ctx = placed
    name = next(
        f"%{o.result.name}" for o in module.functions["decode"].walk()
        if o.name == "moe.grouped_mlp" and o.result.type.device == "cpu"
    )  # fmt: skip
    text = explain(module, name, TARGET, ctx.options, ctx.artifacts["placement.txt"])
    decode = text.split("\n\n")[1]
    assert "  runs on cpu\n" in decode
    post, back = (
        next(o for o in module.functions["decode"].walk() if o.name == f"xfer.{kind}")
        for kind in ("post", "await")
    )
    sent = ", ".join(f"%{r.name}" for r in post.results)
    assert f"  its operands come by xfer.post ({sent})\n" in decode
    assert f"  its result goes back by xfer.await (%{back.result.name})\n" in decode
    assert re.search(r"  meanwhile cuda:0 computes %\S+ \(nn\.\w+\)", decode)
    assert "103.8 MFLOP, 99.85 MB: 1.04 FLOP per byte" in decode
    assert "cpu: 515.7 µs, bound by memory (ridge 157 FLOP per byte), chosen" in decode
    assert "cuda:0 is full" in decode
    assert "not cpu.grouped_mlp: " in decode
    assert "lies on cpu" in explain(module, "@layers[20].mlp.experts.down_proj.cpu", TARGET)
    assert "never moves" in explain(module, "%o_lat", TARGET)
    assert "crosses from cuda:0 to cpu" in explain(module, "xfer.post", TARGET)
    with pytest.raises(ExplainError, match=r"did you mean .*%routed"):
        explain(module, "%ruted")


def test_streamed_experts_are_priced_with_their_copy(tmp_path: Path) -> None:
    """Weights of one layer over the link, then the op: what the runner-up is compared with."""
    rules = "- match: {class: moe.grouped_mlp}\n  replace: {device: stream}\n  phase: prefill\n"
    (tmp_path / "r.yaml").write_text(rules)
    ctx = context(rules=str(tmp_path / "r.yaml"))
    module = v2_lite(f"{FRONT},{HYBRID}", ctx)
    routed = next(o for o in module.functions["prefill"].walk() if o.name == "moe.grouped_mlp")
    text = explain(module, f"%{routed.result.name}", TARGET, ctx.options).split("\n\n")[0]
    copied = TARGET.link("cpu", "cuda:0").seconds(3 * 2048 * 1408 * 64 * 2)
    found = re.search(r"and ([\d.e+]+) µs before it for its weights over cpu -> cuda:0", text)
    assert found is not None
    assert float(found[1]) == pytest.approx(copied * 1e6, rel=1e-3)
    own = re.search(r"cuda:0: ([\d.e+]+) µs", text)
    other = re.search(r"  cpu: ([\d.e+]+) µs, .* ([-+][\d.e+]+) µs", text)
    assert own is not None
    assert other is not None
    whole = float(own[1]) + copied * 1e6
    assert float(other[2]) == pytest.approx(float(other[1]) - whole, rel=1e-2)


def test_what_a_call_waits_for_adds_up(placed: tuple[Module, PassContext]) -> None:
    found = cost_analysis(placed[0], TARGET).at(T=1, S=4096)
    assert sum(x.seconds for x in found.limits) == pytest.approx(found.seconds)
    assert found.limits == sorted(found.limits, key=lambda x: -x.seconds)
    assert {x.kind for x in found.limits} == {"memory", "launch", "link"}
    assert str(found.limits[0]) in ("cuda:0 memory bandwidth", "cpu memory bandwidth")


def test_the_command_explains_a_dump(
    placed: tuple[Module, PassContext], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m.ktir").write_text(str(placed[0]))
    (tmp_path / "placement.txt").write_text(placed[1].artifacts["placement.txt"])
    asked = ["explain", str(tmp_path / "m.ktir"), "%shared", "--target", TARGET.name]
    assert main(asked) == 0
    assert "placement.txt:" in capsys.readouterr().out
