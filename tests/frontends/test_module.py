"""trace_module: any module becomes a graph that computes what it does; the rest is named."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plain_modules import Block, Capacity, Dense, MoeLayer, Net, Unique, WhereLoop, nmse
from torch import Tensor, nn

from ktgraph.drive import one_thread
from ktgraph.errors import UnsupportedInputError
from ktgraph.frontends.errors import UnsupportedModelError
from ktgraph.frontends.module import ModuleTrace, OpaqueCallWarning, trace_module
from ktgraph.ir.interp import Interpreter
from ktgraph.ir.parser import parse_module
from ktgraph.weights.evaluate import WeightEvaluator
from ktgraph.weights.sources import ModelSource


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with one_thread(), torch.no_grad():
        yield


def ops(trace: ModuleTrace) -> list[str]:
    return [op.name for op in trace.module.walk()]


def silent(model: nn.Module, *args: Any, **kwargs: Any) -> ModuleTrace:
    """The trace, with no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return trace_module(model, args, kwargs)


def run(trace: ModuleTrace, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What the graph computes for these arguments."""
    tensors = trace.form.tensors(args, kwargs)
    weights = WeightEvaluator(trace.module, ModelSource(model, trace.constants))
    return trace.form.results(Interpreter(trace.module, weights).run("main", tensors))


# ---------------------------------------------------------------- MoE layers


@pytest.mark.parametrize("layer", [WhereLoop, Dense], ids=lambda c: c.__name__)
def test_a_layer_becomes_a_router_and_experts(layer: type[MoeLayer]):
    net = Net(layer()).eval()
    trace = silent(net, torch.randint(100, (2, 5)))
    assert ops(trace) == [
        "nn.embedding", "nn.layer_norm", "tensor.reshape", "moe.route", "moe.experts",
        "tensor.reshape", "tensor.add", "nn.linear",
    ]  # fmt: skip
    assert list(trace.lifted) == ["moe"]
    assert trace.module.syms.keys() == {"b", "s"}
    for shape in ((2, 5), (3, 7), (1, 1)):
        ids = torch.randint(100, shape)
        assert nmse(run(trace, net, ids), net(ids)) < 1e-10


def test_a_layer_alone_keeps_the_width_of_its_weights():
    layer = WhereLoop().eval()
    trace = silent(layer, torch.randn(2, 5, 32))
    assert [str(a.type) for a in trace.module.functions["main"].args] == ["f32[b, s, 32]"]
    x = torch.randn(3, 1, 32)
    assert nmse(run(trace, layer, x), layer(x)) < 1e-10


def test_the_text_says_where_expert_weights_come_from_and_parses_back():
    text = str(silent(Net(WhereLoop()).eval(), torch.randint(100, (2, 5))).module)
    assert str(parse_module(text)) == text
    for line in (
        'weight @moe.experts.w1 : f32[8, 48, 32] from "moe.experts.*.w1.weight"',
        "weight @moe.experts.w13 : f32[8, 96, 32] = concat(@moe.experts.w1, @moe.experts.w3) {axis = 1}",  # noqa: E501
        'func @main(%x: i64[b, s]) {example = ["b=2", "s=5"]} -> (f32[b, s, 100]) {',
    ):
        assert line in text


class _Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(32, 40)
        self.down = nn.Linear(20, 32)

    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.both(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class _Interleaved(_Fused):
    def forward(self, x: Tensor) -> Tensor:
        h = self.both(x)
        return self.down(F.silu(h[..., ::2]) * h[..., 1::2])


@pytest.mark.parametrize("expert", [_Fused, _Interleaved])
def test_fused_experts_with_biases_and_a_shared_one(expert: type[nn.Module]):
    class Layer(Unique):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([expert() for _ in range(4)])
            self.gate = nn.Linear(32, 4)
            self.shared = expert()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.shared(x)

    layer = Layer().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OpaqueCallWarning)  # slices with a step of the shared one
        trace = trace_module(layer, (torch.randn(2, 5, 32),))
    assert list(trace.lifted) == [""]
    assert "moe.experts" in ops(trace)
    x = torch.randn(4, 3, 32)
    assert nmse(run(trace, layer, x), layer(x)) < 1e-10


def test_what_is_not_a_sum_of_experts_stays_a_call_and_is_named_with_file_and_line():
    net = Net(Capacity()).eval()
    with pytest.warns(OpaqueCallWarning) as found:
        trace = trace_module(net, (torch.randint(100, (2, 5)),))
    message = str(found[0].message)
    assert re.search(r"moe \(Capacity\), .*plain_modules\.py:\d+: `for e in ids\.unique", message)
    assert "not lifted to moe.grouped_mlp: it is no weighted sum of its top-k experts" in message
    assert ops(trace).count("torch.call") == 1
    assert not trace.lifted
    ids = torch.randint(100, (4, 9))
    assert nmse(run(trace, net, ids), net(ids)) < 1e-10


# ---------------------------------------------------------------- other modules


def test_a_transformer_block_has_ops_for_all_of_it():
    trace = silent(Block().eval(), torch.randn(2, 5, 32))
    assert {"nn.layer_norm", "nn.linear", "attn.attend", "nn.act"} <= set(ops(trace))
    assert "torch.call" not in ops(trace)


class _Odd(nn.Module):
    """Operators without an op, writes into slices, constants, several results."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, x: Tensor, *, mask: Tensor) -> dict[str, Tensor]:
        y = torch.zeros_like(x)
        y[:, :1] = x[:, :1] * 2
        y.add_(x)
        z = self.conv(y.transpose(1, 2)).transpose(1, 2)
        z = z / z.norm(dim=-1, keepdim=True) - torch.tensor(1.5)
        return {"out": z * mask[..., None].float(), "best": z.argmax(-1)}


def test_operators_without_an_op_are_called_and_named():
    model = _Odd().eval()
    x, mask = torch.randn(2, 5, 8), torch.rand(2, 5) > 0.5
    with pytest.warns(OpaqueCallWarning) as found:
        trace = trace_module(model, (x,), {"mask": mask})
    message = str(found[0].message)
    assert re.search(r"conv \(Conv1d\).*: aten.conv1d.default", message)
    assert re.search(r"the model \(_Odd\), .*test_module\.py:\d+: .*aten.slice_scatter", message)
    x, mask = torch.randn(3, 7, 8), torch.rand(3, 7) > 0.5
    got, want = run(trace, model, x, mask=mask), model(x, mask=mask)
    assert nmse(got["out"], want["out"]) < 1e-10
    assert torch.equal(got["best"], want["best"])
    assert list(trace.constants) == ["constants.lifted_tensor_0"]


def test_a_module_with_a_result_of_unknown_size_is_left_to_torch_as_a_whole():
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[x.sum(-1) > 0].sum(0)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.inner(x))

    model, x = Outer().eval(), torch.randn(9, 8)
    with pytest.warns(OpaqueCallWarning, match=r"inner \(Inner\)"):
        trace = trace_module(model, (x,))
    assert ops(trace) == ["torch.call", "nn.linear"]
    assert nmse(run(trace, model, x), model(x)) < 1e-10


def test_a_module_that_branches_on_values_at_its_root_is_one_call():
    class Root(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, None]:
            return (x * 2 if x.sum() > 0 else x - 1), None

    model, x = Root(), torch.randn(4, 8)
    with pytest.warns(OpaqueCallWarning, match=r"the model itself \(Root\)"):
        trace = trace_module(model, (x,))
    assert ops(trace) == ["torch.call"]
    for x in (torch.ones(5, 8), -torch.ones(5, 8)):
        got, nothing = run(trace, model, x)
        assert nothing is None
        assert torch.equal(got, model(x)[0])


def test_sizes_that_change_the_graph_are_fixed():
    class Sized(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * len(str(x.shape[0] * 0 + 7)) + (x.shape[1] // 2)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OpaqueCallWarning)
        trace = trace_module(Sized(), (torch.randn(4, 6),))
    x = torch.randn(4, 6)
    assert torch.equal(run(trace, Sized(), x), Sized()(x))


def test_narrow_weights_keep_their_dtype():
    net = Net(WhereLoop()).eval().to(torch.bfloat16)
    trace = silent(net, torch.randint(100, (2, 5)))
    assert trace.module.weights["moe.experts.w13"].type.dtype == "bf16"
    assert trace.module.functions["main"].body.returns[0].tensor.dtype == "bf16"


def test_tied_weights_are_declared_once():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(20, 8)
            self.head = nn.Linear(8, 20, bias=False)
            self.head.weight = self.emb.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.emb(ids))

    trace = silent(Tied(), torch.randint(20, (2, 3)))
    assert list(trace.module.weights) == ["emb"]


# ---------------------------------------------------------------- what is refused


def test_models_that_cannot_be_traced_say_what_to_do():
    x = torch.randn(2, 4)
    with torch.device("meta"):
        nowhere = nn.Linear(4, 4)
    noisy = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train()
    for model, args, why in [
        (nn.Linear(4, 4), (3,), "example_inputs hold no tensor"),
        (nowhere, (x,), "on the meta device.*load its weights first"),
        (noisy, (x,), r"1 \(Dropout\) is in training mode.*module.eval\(\)"),
    ]:
        with pytest.raises(UnsupportedInputError, match=why):
            trace_module(model, args)


def test_inputs_that_the_module_itself_refuses_show_its_own_error_and_line():
    with pytest.raises(
        UnsupportedInputError, match=r"fails on its example_inputs.*mat1 and mat2"
    ) as found:
        trace_module(nn.Sequential(nn.Linear(4, 4)).eval(), (torch.randn(2, 5),))
    assert "Give inputs that the module itself takes" in str(found.value)


def test_a_module_that_gives_other_results_each_time_is_not_believed():
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * self.calls

    with pytest.raises(UnsupportedModelError, match="gives other results than the module"):
        trace_module(Counter(), (torch.randn(2, 4),))
