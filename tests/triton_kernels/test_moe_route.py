"""moe.route against its reference: the same ids, and weights within f32 rounding."""

from typing import Any

import pytest
import torch

from ktgraph.ops import op_def
from ktgraph.triton_kernels import moe_route
from ktgraph.triton_kernels.counters import counters
from ktgraph.triton_kernels.registry import launcher
from tests.triton_kernels.close import DTYPES, check, poisoned, strided

ROUTE = launcher("moe.route", "triton.moe_route")
PLAIN = dict(
    top_k=2,
    score="softmax",
    renorm=False,
    scale=1.0,
    groups=1,
    topk_groups=1,
    group_score="max",
    mask="zero",
)


def _route(*operands: torch.Tensor | None, **attrs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    attrs = PLAIN | attrs
    x = operands[0]
    assert x is not None
    shape = (x.shape[0], attrs["top_k"])
    out = tuple(poisoned(*shape, dtype=d, device=x.device) for d in (torch.int32, torch.float32))
    ROUTE(*operands, out=out, **attrs)
    return out[0].cpu(), out[1].cpu()


def _check(*operands: torch.Tensor | None, **attrs: Any) -> None:
    ids, weights = _route(*operands, **attrs)
    wanted = op_def("moe.route").reference(
        *(None if x is None else x.cpu() for x in operands), **(PLAIN | attrs)
    )
    assert torch.equal(ids, wanted[0])
    check(weights, wanted[1], 0.0)


def _inputs(
    tokens: int, cols: int, experts: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(tokens, cols).to(device, dtype)
    return strided(x), (2 * torch.randn(experts, cols) / cols**0.5).to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("score", moe_route.SCORES)
@pytest.mark.parametrize(
    ("tokens", "cols", "experts", "top_k"),
    [
        (1, 48, 170, 2),
        (2, 250, 60, 4),
        (3, 1000, 9, 9),
        (4, 64, 7, 6),
        (5, 64, 7, 6),
        (17, 100, 40, 3),
    ],
)
def test_plain(
    tokens: int,
    cols: int,
    experts: int,
    top_k: int,
    score: str,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    x, gate = _inputs(tokens, cols, experts, dtype, device)
    _check(x, gate, None, None, top_k=top_k, score=score)
    _check(x, gate, None, None, top_k=top_k, score=score, renorm=True, scale=2.5)


@pytest.mark.parametrize("tokens", [2, 17])
@pytest.mark.parametrize("score", moe_route.SCORES)
@pytest.mark.parametrize("group_score", moe_route.GROUP_SCORES)
@pytest.mark.parametrize("mask", moe_route.MASKS)
def test_groups_and_biases(
    mask: str, group_score: str, score: str, tokens: int, device: torch.device
) -> None:
    x, gate = _inputs(tokens, 72, 18, torch.bfloat16, device)
    bias, select_bias = (torch.randn(18, device=device) for _ in range(2))
    attrs = dict(score=score, groups=6, topk_groups=3, group_score=group_score, mask=mask)
    _check(x, gate, select_bias, None, top_k=6, renorm=True, scale=16.0, **attrs)
    _check(x, gate, select_bias.bfloat16(), bias, top_k=4, **attrs)


@pytest.mark.parametrize("tokens", [2, 18])
@pytest.mark.parametrize("mask", moe_route.MASKS)
def test_more_experts_than_the_groups_hold(mask: str, tokens: int, device: torch.device) -> None:
    """Masked experts are chosen last, those with the lowest ids first; padding never is."""
    x, gate = _inputs(tokens, 40, 15, torch.float32, device)
    _check(x, gate, None, None, top_k=12, groups=5, topk_groups=2, mask=mask)
    _check(x, gate, torch.full([15], -2.0, device=device), None, top_k=15, groups=3, mask=mask)


@pytest.mark.parametrize("tokens", [3, 20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_go_to_the_lower_id(tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    """Small whole numbers, so that equal logits are equal in any order of summation."""
    x, gate = (torch.randint(-2, 3, (n, 96)).to(device, dtype) for n in (tokens, 5))
    repeated = gate.repeat(7, 1)
    _check(x, repeated, None, None, top_k=35, score="softmax_after_topk")
    ids, weights = _route(x, torch.zeros_like(repeated), None, None, top_k=4, renorm=True)
    assert torch.equal(ids, torch.arange(4).expand(tokens, 4).int())
    assert torch.equal(weights, torch.full_like(weights, 0.25))


def test_zeros_of_both_signs_tie(device: torch.device) -> None:
    x = torch.ones(1, 4, device=device)
    bias = torch.tensor([-0.0, 0.0, -1.0], device=device)
    gate = torch.zeros(3, 4, device=device)
    ids, _ = _route(x, -gate, None, bias, top_k=3, score="softmax_after_topk")
    assert ids.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("gate_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [4, 21])
def test_dtypes_may_differ(tokens: int, gate_dtype: torch.dtype, device: torch.device) -> None:
    x, gate = _inputs(tokens, 130, 24, torch.float32, device)
    x = x.bfloat16() if gate_dtype == torch.float32 else x
    _check(x, gate.to(gate_dtype), None, None, top_k=3)


@pytest.mark.parametrize(("tokens", "cols"), [(2, 7168), (1, 9000), (33, 2050)])
def test_wide_rows(tokens: int, cols: int, device: torch.device) -> None:
    x, gate = _inputs(tokens, cols, 24, torch.bfloat16, device)
    _check(x, gate, None, None, top_k=4, score="sigmoid", renorm=True)


def test_the_counter_is_left_at_zero(device: torch.device) -> None:
    x, gate = _inputs(3, 64, 16, torch.float32, device)
    for _ in range(3):
        _check(x, gate, None, None)
        assert not counters(1, x.device).any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_two_streams_at_once(device: torch.device) -> None:
    """Two models on one GPU: neither counts the programs of the other."""
    x, gate = _inputs(4, 7168, 256, torch.bfloat16, device)
    attrs = PLAIN | dict(top_k=8)
    streams = [torch.cuda.Stream() for _ in range(2)]
    outs = [
        [
            tuple(poisoned(4, 8, dtype=d, device=x.device) for d in (torch.int32, torch.float32))
            for _ in range(200)
        ]
        for _ in streams
    ]
    torch.cuda.synchronize()
    for pair in zip(*outs, strict=True):
        for stream, out in zip(streams, pair, strict=True):
            with torch.cuda.stream(stream):
                ROUTE(x, gate, None, None, out=out, **attrs)
    torch.cuda.synchronize()
    (first, _) = outs[0][0]
    assert (first < 256).all()
    for ids, _ in (out for one in outs for out in one):
        assert torch.equal(ids, first)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("tokens", [1, 4, 40])
def test_many_replays_of_a_graph_agree(tokens: int, device: torch.device) -> None:
    """The last program must see all logits, in each of many replays on new inputs."""
    x, gate = _inputs(tokens, 7168, 256, torch.bfloat16, device)
    out = tuple(poisoned(tokens, 8, dtype=d, device=x.device) for d in (torch.int32, torch.float32))
    attrs = PLAIN | dict(top_k=8)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        ROUTE(x, gate, None, None, out=out, **attrs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        ROUTE(x, gate, None, None, out=out, **attrs)
    for _ in range(50):
        x.copy_(torch.randn(x.shape))
        graph.replay()
        logits = x.double() @ gate.double().T
        # 4 roundings to float32 of the largest logit; a softmax changes by a quarter of that
        bound = float(logits.abs().max()) * 2**-24
        scores = logits.softmax(-1)
        wanted = scores.topk(8, dim=-1).values
        chosen = scores.gather(1, out[0].long())  # near-ties may come in another order
        assert float((chosen - wanted).abs().max()) <= bound
        assert float((out[1].double() - chosen).abs().max()) <= bound


def test_unknown_names_are_refused(device: torch.device) -> None:
    x, gate = _inputs(1, 8, 4, torch.float32, device)
    for name in ("score", "group_score", "mask"):
        with pytest.raises(ValueError, match="median"):
            _route(x, gate, None, None, **{name: "median"})
