"""`torch.compile(model, backend="ktgraph")`: equal to eager, whatever part of a graph is lifted."""

from __future__ import annotations

import tomllib
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from torch._dynamo.backends import registry

import ktgraph as kt
from ktgraph import dynamo_backend
from ktgraph.dynamo_backend import EagerPartsWarning, WeightsChangedError
from ktgraph.runtime import packed

REPO = Path(__file__).resolve().parents[2]
transformers: Any = hf  # its stubs do not know configs' fields


class Mlp(nn.Module):
    """A norm, which stays eager, before a gated MLP and a residual."""

    def __init__(self, width: int = 24, inner: int = 40) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return self.down(F.silu(self.gate(h)) * self.up(h) * 0.5) + x


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No graphs nor warnings of another test."""
    cast("Any", torch.compiler).reset()
    dynamo_backend._said.clear()
    with torch.no_grad():
        yield


def compiled(model: Any, **more: Any) -> Any:
    options = {"threads": 1, **more.pop("options", {})}
    compile: Any = torch.compile
    return compile(model, backend=dynamo_backend.backend, options=options, **more)


def silently(call: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EagerPartsWarning)
        return call()


def nmse(got: Tensor, want: Tensor) -> float:
    return float((got - want).double().square().sum() / want.double().square().sum())


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many weights each call of `load_weights` packed."""
    calls: list[int] = []
    load = packed.load_weights

    def count(uses: Any, *args: Any) -> Any:
        calls.append(len(uses))
        return load(uses, *args)

    monkeypatch.setattr(packed, "load_weights", count)
    return calls


def test_equal_at_every_size_and_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch)
    model = Mlp().eval()
    fast = compiled(model)
    inputs = [torch.randn(s) for s in ((2, 3, 24), (2, 5, 24), (1, 600, 24), (7, 1, 24))]
    with pytest.warns(EagerPartsWarning) as said:
        found = [fast(x) for x in inputs]
    for got, x in zip(found, inputs, strict=True):
        assert nmse(got, model(x)) <= 1e-10
    assert calls == [5]  # three matrices, two biases: for all shapes
    text = str(said[0].message)
    assert "7 operators run compiled, in 1 regions; these 1 run eagerly" in text
    assert "LayerNorm: layer_norm x 1" in text


def test_a_dynamic_axis_needs_one_graph() -> None:
    model, graphs = Mlp().eval(), list[int]()

    def count(graph: Any, examples: Any) -> Any:
        graphs.append(1)
        return dynamo_backend.backend(graph, examples, options={"threads": 1})

    fast = torch.compile(model, backend=count)
    for length in (5, 9, 30):
        x = torch.randn(2, length, 24)
        dynamo: Any = torch._dynamo
        dynamo.mark_dynamic(x, 1)
        assert nmse(silently(lambda x=x: fast(x)), model(x)) <= 1e-10
    assert len(graphs) == 1


def test_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["entry-points"]
    value = declared["torch_dynamo_backends"]["ktgraph"]
    registry._lazy_import()
    entry = EntryPoint("ktgraph", value, "torch_dynamo_backends")
    monkeypatch.setitem(registry._BACKENDS, "ktgraph", entry)
    monkeypatch.setattr(registry, "_COMPILER_FNS", dict(registry._COMPILER_FNS))
    registry._COMPILER_FNS.pop("ktgraph", None)
    model, x = Mlp().eval(), torch.randn(2, 3, 24)
    compile: Any = torch.compile
    fast = compile(model, backend="ktgraph", options={"threads": 1})
    assert nmse(silently(lambda: fast(x)), model(x)) <= 1e-10


def test_bfloat16() -> None:
    model = Mlp().eval().bfloat16()
    x = torch.randn(2, 6, 24).bfloat16()
    got = silently(lambda: compiled(model)(x))
    assert got.dtype == torch.bfloat16
    assert nmse(got.float(), model.float()(x.float())) < 1e-4


def test_quantized() -> None:
    model, x = Mlp(64, 96).eval(), torch.randn(3, 64)
    got = silently(lambda: compiled(model, options={"quantize": "int8"})(x))
    assert 0 < nmse(got - x, model(x) - x) < 1e-3


def test_several_results_and_two_groups_of_axes() -> None:
    """Activations of other leading axes are other regions, also where they meet in one graph."""
    a, b = nn.Linear(24, 16), nn.Linear(8, 8, bias=False)

    def function(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        wide = a(x)
        heads = b(wide.reshape(2, 5, 2, 8).transpose(1, 2))
        return wide, torch.relu(wide + wide), heads.sum(-1)

    x = torch.randn(2, 5, 24)
    got = silently(lambda: compiled(function)(x))
    for found, want in zip(got, function(x), strict=True):
        assert nmse(found, want) <= 1e-10


def test_writes_in_place_keep_their_order() -> None:
    a, b = nn.Linear(6, 6), nn.Linear(6, 6)

    def function(x: Tensor) -> tuple[Tensor, ...]:
        h = a(x)
        early = b(h)
        h.mul_(3.0)
        view = h[:, :3]
        view += 1.0
        other = a(x)
        late = b(F.relu(other, inplace=True))
        torch.add(h, 1.0, out=h)
        return early, b(h), late, other

    x = torch.randn(4, 6)
    got = silently(lambda: compiled(function)(x))
    for found, want in zip(got, function(x), strict=True):
        assert nmse(found, want) <= 1e-10


def test_what_cannot_be_lifted_runs_eagerly() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.softmax(x, -1).cumsum(-1)

    x = torch.randn(3, 5)
    with pytest.warns(EagerPartsWarning, match=r"0 operators run compiled[^:]*these 2 run eagerly"):
        assert torch.equal(compiled(function)(x), function(x))


def test_with_gradients_all_of_it_runs_eagerly() -> None:
    model = Mlp()
    with torch.enable_grad():
        x = torch.randn(2, 3, 24, requires_grad=True)
        with pytest.warns(EagerPartsWarning, match="require gradients.*no_grad"):
            compiled(model)(x).sum().backward()
    assert x.grad is not None
    assert all(p.grad is not None for p in model.parameters())


def test_weights_that_change_are_noticed() -> None:
    model, x = Mlp().eval(), torch.randn(2, 3, 24)
    fast = compiled(model)
    silently(lambda: fast(x))
    model.up.weight.mul_(2.0)
    with pytest.raises(WeightsChangedError, match=r"up\.weight was changed after torch.compile"):
        fast(x)
    cast("Any", torch.compiler).reset()
    assert nmse(silently(lambda: fast(x)), model(x)) <= 1e-10


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"options": {"quantise": "int8"}}, "unknown option 'quantise'; known: quantize"),
        ({"options": {"threads": 9999}}, "threads=9999: this process may run on 1 to"),
        ({"options": {"quantize": "int9"}}, "quantize 'int9': unknown encoding"),
        ({"options": {"threads": 0}}, "threads=0: expected a whole number above 0"),
        ({"mode": "max-autotune", "options": {}}, "has no modes|may not be|mode"),
    ],
)
def test_options_that_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        compiled(Mlp().eval(), **given)(torch.randn(2, 24))


def test_with_patched_experts_a_model_is_one_graph() -> None:
    config = transformers.Qwen3MoeConfig(
        vocab_size=97, hidden_size=40, intermediate_size=48, num_hidden_layers=1, head_dim=12,
        num_attention_heads=4, num_key_value_heads=2, moe_intermediate_size=24, num_experts=6,
        num_experts_per_tok=3, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    prompts = [torch.randint(97, (1, n)) for n in (4, 9)]
    want = [model(p, use_cache=False).logits for p in prompts]
    kt.patch(model, threads=1)
    fast = compiled(model, fullgraph=True)
    with pytest.warns(EagerPartsWarning) as said:
        found = [fast(prompt, use_cache=False).logits for prompt in prompts]
    for got, logits in zip(found, want, strict=True):
        assert nmse(got, logits) <= 1e-10
    assert "Qwen3MoeRMSNorm: " in str(said[0].message)
    assert "moe_block" not in str(said[0].message)
