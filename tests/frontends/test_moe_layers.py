"""Hand-written MoE layers: found by their parts, believed only when they compute the formula."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from plain_modules import SPELLINGS, Capacity, FeedForward, MoeLayer, Net, Unique, WhereLoop
from torch import Tensor, nn

from ktgraph.drive import one_thread
from ktgraph.frontends.moe_layers import candidates, lift
from ktgraph.frontends.moe_probe import MoeForm, NotLiftedError, nmse


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with one_thread():
        yield


def _form(layer: nn.Module, shape: tuple[int, ...] = (2, 5, 32)) -> MoeForm:
    found = candidates(layer)
    assert list(found) == [""]
    return lift(found[""], [((torch.randn(shape),), {})])


@pytest.mark.parametrize("layer", SPELLINGS, ids=lambda c: c.__name__)
def test_every_spelling_is_one_formula(layer: type[MoeLayer]):
    form = _form(layer().eval())
    assert str(form) == "top 2 of 8 experts (softmax_after_topk, silu)"
    assert form.scale == 1.0


def test_layers_are_found_inside_a_model_and_nothing_else_is():
    model = nn.Sequential(Net(WhereLoop()), nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]))
    assert list(candidates(model)) == ["0.moe"]


# ---------------------------------------------------------------- other formulas


class _Fused(nn.Module):
    """Gate and up in one linear, with biases."""

    def __init__(self, dim: int, order: str, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 40, bias=bias)
        self.down = nn.Linear(20, dim, bias=bias)
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.order == "interleaved":
            gate, up = h[..., ::2], h[..., 1::2]
        else:
            gate, up = h.chunk(2, -1)
        gate, up = (up, gate) if self.order == "up_first" else (gate, up)
        return self.down(F.gelu(gate, approximate="tanh") * up)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("order", ["gate_first", "up_first", "interleaved"])
def test_fused_experts_of_every_order(order: str, bias: bool):
    layer = Unique()
    layer.experts = nn.ModuleList([_Fused(32, order, bias) for _ in range(8)])
    form = _form(layer.eval())
    assert (form.expert.order, form.expert.act, len(form.expert.biases)) == (
        order, "gelu_tanh", 2 * bias,
    )  # fmt: skip


class _Router(nn.Module):
    """DeepSeek-V3's: sigmoid scores, a bias for the choice, weights that sum to 2.5."""

    def __init__(self, dim: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, dim) * dim**-0.5)
        self.correction: Tensor
        self.register_buffer("correction", torch.randn(experts) * 0.3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.linear(x, self.weight).sigmoid()
        ids = (scores + self.correction).topk(3, -1).indices
        weights = scores.gather(-1, ids)
        return 2.5 * weights / weights.sum(-1, keepdim=True), ids


class _WithShared(MoeLayer):
    """A router of its own, and a shared expert beside the routed ones."""

    def __init__(self) -> None:
        super().__init__()
        del self.gate
        self.router = _Router(32, 8)
        self.shared = FeedForward(32)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, ids = self.router(flat)
        y = torch.zeros_like(flat)
        for e in ids.unique().tolist():
            token, slot = torch.where(ids == e)
            y.index_add_(0, token, self.experts[e](flat[token]) * weights[token, slot, None])
        return y.view_as(x) + self.shared(x)


def test_a_router_of_its_own_with_scale_and_shared_expert():
    form = _form(_WithShared().eval())
    assert (form.top_k, form.score, form.renorm) == (3, "sigmoid", True)
    assert (form.select, form.extras) == ("router.correction", ("shared",))
    assert form.scale == pytest.approx(2.5, abs=1e-5)


@pytest.mark.parametrize("shape", [(6, 32), (2, 5, 32), (1, 2, 3, 32)])
def test_tokens_of_any_rank(shape: tuple[int, ...]):
    assert _form(WhereLoop().eval(), shape).top_k == 2


def test_narrow_weights_are_probed_in_float32():
    layer = WhereLoop().eval().to(torch.bfloat16)
    found = candidates(layer)[""]
    form = lift(found, [((torch.randn(2, 5, 32, dtype=torch.bfloat16),), {})])
    assert form.top_k == 2
    assert layer.gate.weight.dtype == torch.bfloat16


# ---------------------------------------------------------------- what is refused, and why


class _Noisy(Unique):
    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = super().route(x)
        return weights * (1 + 1e-3 * torch.rand(1)), ids


class _Skewed(Unique):
    """Almost the formula: weights are squared."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = super().route(x)
        return weights.square(), ids


class _Threshold(Unique):
    """The formula, but a token that is far from zero keeps its first expert only."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = super().route(x)
        far = x.norm(dim=-1, keepdim=True) > 20
        return torch.where(far, weights * torch.tensor([1.0, 0.0]), weights), ids


@pytest.mark.parametrize("layer", [Capacity, _Noisy, _Skewed, _Threshold], ids=lambda c: c.__name__)
def test_what_computes_something_else_is_not_lifted(layer: type[MoeLayer]):
    with pytest.raises(NotLiftedError, match=r"closest formula: NMSE \d.*allowed 1e-10"):
        _form(layer().eval())


def test_one_expert_that_differs_is_seen():
    layer = Unique().eval()
    layer.experts[5].forward = lambda x: x  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(NotLiftedError, match="no gated MLPs"):
        _form(layer)


def test_plain_mlps_as_experts_are_named():
    layer = Unique().eval()
    layer.experts = nn.ModuleList(
        [nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32)) for _ in range(8)]
    )
    with pytest.raises(NotLiftedError, match=r"Sequential: 0.weight \[48, 32\].*no gated MLPs"):
        _form(layer)


def test_how_it_is_called_matters():
    found = candidates(WhereLoop().eval())[""]
    x = torch.randn(2, 5, 32)
    for calls, why in [
        ([((x, x), {})], "more than one tensor"),
        ([((), {"x": x})], "more than one tensor"),
        ([], "not called"),
        ([((x[0, 0],), {})], r"tokens \[..., D\]"),
    ]:
        with pytest.raises(NotLiftedError, match=why):
            lift(found, calls)  # pyright: ignore[reportArgumentType]


def test_a_failure_of_the_layer_on_new_tokens_is_told():
    class Picky(Unique):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] == 1:
                raise ValueError("one is not enough")
            return super().forward(x)

    with pytest.raises(NotLiftedError, match="on random tokens it fails: ValueError: one is not"):
        _form(Picky().eval())


def test_nmse_of_other_shapes_is_infinite():
    assert nmse(torch.zeros(2), torch.zeros(3)) == float("inf")
    assert nmse(None, torch.zeros(3)) == float("inf")
