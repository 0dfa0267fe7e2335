"""kt.compile of plain modules: eager's results, on the CPU and the simulated GPU; dumps; errors."""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from plain_modules import SPELLINGS, Block, Capacity, MoeLayer, Net, SoftmaxFirst, WhereLoop, nmse
from torch import nn

import ktgraph as kt
from ktgraph import module_stages
from ktgraph.drive import one_thread
from ktgraph.errors import UnsupportedInputError
from ktgraph.frontends.module import OpaqueCallWarning
from ktgraph.ir.parser import parse_file, parse_module
from ktgraph.pass_manager import PassManager
from ktgraph.recorded import read_recorded
from ktgraph.runtime.executor import Executor
from ktgraph.stages import FallbackWarning
from ktgraph.target import TargetError

SIMULATED = kt.hybrid(gpu="simulated")
TARGETS = {"cpu": "cpu", "simulated": SIMULATED}
BOUND = 1e-10


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with one_thread(), torch.no_grad():
        yield


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(100, shape)


def compiled(model: nn.Module, example: Any, target: str = "cpu", **options: Any) -> Any:
    """The compiled module, without an unexpected warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        return kt.compile(model.eval(), TARGETS[target], example_inputs=example, **options)


def names(exe: Any) -> list[str]:
    return [op.name for op in exe.module.walk()]


# ---------------------------------------------------------------- MoE layers


@pytest.mark.parametrize("layer", SPELLINGS, ids=lambda c: c.__name__)
def test_every_spelling_equals_eager_and_holds_a_grouped_mlp(layer: type[MoeLayer]):
    net = Net(layer())
    exe = compiled(net, ids(2, 5), validate=int(layer is WhereLoop))  # all have one graph
    assert "moe.route" in names(exe)
    assert "moe.grouped_mlp" in names(exe)
    assert "torch.call" not in names(exe)
    for shape in ((2, 5), (3, 7), (1, 1)):
        x = ids(*shape)
        assert nmse(exe(x), net(x)) < BOUND
    assert str(parse_module(str(exe.module))) == str(exe.module)


@pytest.mark.parametrize("experts", ["cuda:0", "cpu"])
def test_a_layer_runs_beside_the_simulated_gpu(experts: str, tmp_path: Path):
    rules = tmp_path / "rules.yaml"
    rules.write_text(f"- match: {{class: moe.grouped_mlp}}\n  replace: {{device: {experts}}}\n")
    net = Net(SoftmaxFirst())
    exe = compiled(net, ids(2, 5), "simulated", rules=str(rules), validate=1)
    (routed,) = (op for op in exe.module.walk() if op.name == "moe.grouped_mlp")
    assert (routed.result.type.device or "cuda:0") == experts
    for shape in ((2, 5), (1, 1), (4, 9)):
        x = ids(*shape)
        assert nmse(exe(x), net(x)) < BOUND


def test_more_tokens_than_one_call_holds_take_several():
    net = Net(WhereLoop())
    exe = compiled(net, ids(2, 5), max_tokens=16)
    x = ids(7, 11)
    assert nmse(exe(x), net(x)) < BOUND


def test_weights_may_be_quantized():
    net = Net(WhereLoop())
    exe = compiled(net, ids(2, 5), quantize="experts=int8")
    x = ids(4, 9)
    assert 1e-12 < nmse(exe(x), net(x)) < 1e-2
    with pytest.raises(kt.KtgraphError, match="exact"):
        kt.compile(net, "cpu", example_inputs=ids(2, 5), quantize="experts=int8", exact=True)


# ---------------------------------------------------------------- calls left to torch


@pytest.mark.parametrize("target", TARGETS)
def test_what_stays_with_torch_runs_at_its_place(target: str):
    block = Block(mlp=Capacity())
    with pytest.warns(
        OpaqueCallWarning, match=r"mlp \(Capacity\), .*plain_modules.py:\d+"
    ) as found:
        exe = compiled(block, torch.randn(2, 5, 32), target, validate=1)
    assert Path(found[0].filename) == Path(__file__)
    (call,) = (op for op in exe.module.walk() if op.name == "torch.call")
    assert call.result.type.device == (None if target == "cpu" else "cpu")
    for shape in ((2, 5, 32), (3, 7, 32), (1, 2, 32)):
        x = torch.randn(shape)
        assert nmse(exe(x), block(x)) < BOUND
    assert "no cost rule: FLOPs unknown" in exe.explain("%mlp")
    assert (
        "without a cost rule (FLOPs not counted): torch.call"
        in exe.cost_analysis().at(T=10).table()
    )
    assert str(parse_module(str(exe.module))) == str(exe.module)


def test_ids_beside_a_call_are_embedded_natively():
    net = Net(Capacity())
    with pytest.warns(OpaqueCallWarning):
        exe = compiled(net, ids(2, 5))
    assert next(op.via for op in exe.module.walk()) == "cpu.embedding"
    for shape in ((2, 5), (3, 1)):
        x = ids(*shape)
        assert nmse(exe(x), net(x)) < BOUND


def test_a_rule_cannot_put_a_call_on_the_gpu(tmp_path: Path):
    rules = tmp_path / "rules.yaml"
    rules.write_text("- match: {class: torch.call}\n  replace: {device: cuda:0}\n")
    with (
        pytest.warns(OpaqueCallWarning),
        pytest.raises(kt.KtgraphError, match=r"torch\.call runs on the cpu"),
    ):
        compiled(Block(mlp=Capacity()), torch.randn(2, 5, 32), "simulated", rules=str(rules))


def test_a_dump_goes_on_and_runs_once_its_module_is_bound(tmp_path: Path):
    """The text alone goes through every pass; to run it, the name must mean a module."""

    class Custom(Block):
        pass

    block = Custom(mlp=Capacity())
    with pytest.warns(OpaqueCallWarning):
        exe = compiled(block, torch.randn(2, 5, 32), dump=tmp_path)
    x = torch.randn(2, 5, 32)
    want = exe(x)
    (folder,) = tmp_path.iterdir()
    (lowered,) = folder.glob("*-lower.ktir")
    recorded = read_recorded(folder / "00-import.ktir")
    assert 'module = "Custom/mlp"' in str(recorded.module)
    weights = {k: v.clone() for k, v in block.state_dict().items()}
    del exe, block
    gc.collect()

    assert recorded.rest is not None
    report = PassManager().run(recorded.module, recorded.rest, recorded.context(), validate=1)
    assert "not run" in report.records[1].how
    assert recorded.module.structural_hash() == parse_file(lowered).structural_hash()

    again = Custom(mlp=Capacity()).eval()
    again.load_state_dict(weights)
    kt.bind_module("Custom", again)
    report = PassManager().run(
        parse_file(folder / "00-import.ktir"), "default", recorded.context(), validate=1
    )
    assert report.records[1].error == 0
    assert torch.equal(again(x), Custom.forward(again, x))
    assert nmse(want, again(x)) < BOUND


# ---------------------------------------------------------------- other modules


class _TwoTowers(nn.Module):
    """Keyword arguments, a constant, several results, one of them of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 8), nn.Linear(6, 8)

    def forward(self, x: torch.Tensor, other: dict[str, torch.Tensor], scale: float) -> Any:
        y = self.left(x) * scale + self.right(other["y"])
        return {"sum": y, "pair": (torch.relu(y), scale)}


@pytest.mark.parametrize("target", TARGETS)
def test_arguments_and_results_keep_their_form(target: str):
    model = _TwoTowers()
    example = (torch.randn(3, 6), {"y": torch.randn(3, 6)}, 0.5)
    exe = compiled(model, example, target)
    args = (torch.randn(11, 6), {"y": torch.randn(11, 6)}, 0.5)
    got, want = exe(*args), model(*args)
    assert nmse(got["sum"], want["sum"]) < BOUND
    assert nmse(got["pair"][0], want["pair"][0]) < BOUND
    assert got["pair"][1] == 0.5


def test_sizes_that_mix_tokens_are_compiled_anew_and_the_last_are_kept(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(module_stages, "_KEPT", 1)
    block = Block()
    exe = compiled(block, torch.randn(2, 5, 32))
    assert "@main is compiled for b = 2, s = 5" in str(exe.passes)
    for n in (1, 3, 3, 1):
        x = torch.randn(1, n, 32)
        assert nmse(exe(x), block(x)) < BOUND


class _Steps(nn.Module):
    """A Python loop over the sequence: another length is another graph."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros_like(x[:, 0])
        for step in range(x.shape[1]):
            h = torch.sigmoid(self.cell(h)) + x[:, step]
        return h


def test_another_length_of_a_python_loop_is_traced_anew():
    model = _Steps()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        exe = kt.compile(model.eval(), "cpu", example_inputs=torch.randn(2, 3, 16))
    for shape in ((2, 3, 16), (5, 3, 16), (2, 6, 16), (2, 6, 16)):
        x = torch.randn(shape)
        assert nmse(exe(x), model(x)) < BOUND


def test_traces_that_are_let_go_end_their_executors(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ktgraph.module_stages._KEPT", 1)
    closed: list[Executor] = []
    monkeypatch.setattr(Executor, "close", lambda self: closed.append(self))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        exe = kt.compile(_Steps().eval(), "cpu", example_inputs=torch.randn(2, 3, 16))
    exe(torch.randn(2, 4, 16))
    assert not closed
    exe(torch.randn(2, 5, 16))
    assert len(closed) == 1


class _Rotated(nn.Module):
    """Tables made of positions and a buffer, a causal mask of -inf, matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.freqs: torch.Tensor
        self.register_buffer("freqs", 100.0 ** -(torch.arange(4) / 4), persistent=False)
        self.q = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, d = x.shape
        angles = torch.arange(s)[:, None] * self.freqs[None]
        cos, sin = angles.cos()[None, :, None], angles.sin()[None, :, None]
        left, right = self.q(x).view(b, s, 2, 8).chunk(2, -1)
        q = torch.cat([left * cos - right * sin, right * cos + left * sin], -1).transpose(1, 2)
        seen = torch.tril(torch.ones(s, s, dtype=torch.bool))
        scores = (q @ q.transpose(-1, -2)).masked_fill(~seen, float("-inf"))
        return (scores.softmax(-1) @ q).transpose(1, 2).reshape(b, s, d)


_IMAGE = nn.Sequential(
    nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
    nn.Linear(4 * 9, 5),
)  # fmt: skip
_ENCODER = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)


@pytest.mark.parametrize(
    ("model", "shape", "other", "target"),
    [
        (nn.Sequential(nn.Linear(6, 10), nn.SiLU(), nn.Linear(10, 3)), (6,), (6,), "cpu"),
        (nn.LayerNorm(6), (2, 3, 4, 6), (5, 1, 2, 6), "cpu"),
        (_IMAGE, (2, 3, 6, 6), (4, 3, 6, 6), "simulated"),  # only the batch can vary
        (_ENCODER, (2, 5, 16), (3, 1, 16), "cpu"),
        (_Rotated(), (2, 5, 16), (1, 9, 16), "simulated"),
    ],
    ids=["mlp", "norm", "image", "encoder", "rotated"],
)
def test_modules_of_many_kinds(
    model: nn.Module, shape: tuple[int, ...], other: tuple[int, ...], target: str
):
    model.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of what stays with torch
        exe = kt.compile(model, TARGETS[target], example_inputs=torch.randn(shape), validate=1)
        for sizes in (shape, other):
            x = torch.randn(sizes)
            assert nmse(exe(x), model(x)) < BOUND


def test_stages_can_be_asked():
    traced = kt.trace(Net(WhereLoop()).eval(), example_inputs=ids(2, 5))
    assert traced.lifted == {"moe": "top 2 of 8 experts (softmax_after_topk, silu)"}
    assert traced.opaque == {}
    lowered = traced.lower("cpu", "default,-fuse-norms")
    assert "moe.grouped_mlp" in lowered.diff("moe-group")
    exe = lowered.compile()
    x = ids(3, 4)
    assert [e.kernel for e in exe.measure(x)] == [op.via for op in exe.module.walk()]
    assert exe.memory_analysis().of("cpu", "weights") > 0
    assert re.search(r"cpu\.grouped_mlp", exe.explain("%routed"))


# ---------------------------------------------------------------- bad input


def test_errors_name_the_argument_and_what_was_expected():
    exe = compiled(Net(WhereLoop()), ids(2, 5))
    other = compiled(Block(), torch.randn(2, 5, 32))
    for call, why in [
        (lambda: exe(torch.randn(2, 5)), r"%x is \[2, 5\] torch.float32, expected i64\[b, s\]"),
        (lambda: exe(ids(5)), r"%x is \[5\] torch.int64, expected i64\[b, s\]"),
        (lambda: exe(ids(0, 5)), r"%x is \[0, 5\].*b in 1\.\."),
        (
            lambda: other(torch.randn(2, 5, 31)),
            r"expected f32\[b, s, 32\] with b in .*: RuntimeError: .*normalized_shape=\[32\]",
        ),
        (lambda: exe(ids(2, 5), ids(2, 5)), "called with 2 tensors and 0 other values, but comp"),
        (lambda: exe([ids(2, 5)]), "give the arguments that the example_inputs had"),
        (lambda: exe.save("x.ktplan"), "causal language models only"),
    ]:
        with pytest.raises(UnsupportedInputError, match=why):
            call()
    towers = compiled(_TwoTowers(), (torch.randn(3, 6), {"y": torch.randn(3, 6)}, 0.5))
    with pytest.raises(UnsupportedInputError, match="called with other constants"):
        towers(torch.randn(3, 6), {"y": torch.randn(3, 6)}, 0.25)


def test_more_threads_than_cpus_are_refused():
    with pytest.raises(TargetError, match="threads=9999: this process may run on 1 to"):
        kt.compile(nn.Linear(4, 4).eval(), "cpu", example_inputs=torch.randn(2, 4), threads=9999)


def test_what_is_no_module_or_has_no_example_is_refused():
    x = torch.randn(2, 4)
    for call, why in [
        (lambda: kt.compile(nn.Linear(4, 4)), r"kt.compile\(module, example_inputs=\(x,\)\)"),
        (lambda: kt.compile("folder", example_inputs=x), "go with a torch module, this is a str"),
        (
            lambda: kt.trace(nn.Linear(4, 4), example_inputs=cast("Any", 3)),
            "example_inputs of type int",
        ),
        (
            lambda: kt.trace(nn.Linear(4, 4), example_inputs=x, dtype="bf16"),
            "a plain module computes in its own dtypes",
        ),
    ]:
        with pytest.raises(UnsupportedInputError, match=why):
            call()  # pyright: ignore[reportUnknownVariableType]
