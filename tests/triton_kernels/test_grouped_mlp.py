"""triton.grouped_mlp against the op's reference: decode and grouped forms, all activations."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ktgraph.ops.moe as moe
from ktgraph.triton_kernels import grouped_mlp as file
from ktgraph.triton_kernels.activations import GATED
from ktgraph.triton_kernels.grouped_gemm import GroupedConfig, Tile
from ktgraph.triton_kernels.registry import launcher

BOUNDS = {torch.float32: 1e-10, torch.float16: 1e-6, torch.bfloat16: 6e-5}
SIZES: dict[str, Any] = {"D": 40, "F": 24, "E": 7}


def make(
    tokens: int, top_k: int, dtype: torch.dtype, *, bias: bool = False, D: int, F: int, E: int
) -> list[Any]:
    """Fresh operands of the op; some pairs are skipped."""
    scores = torch.rand(tokens, E)
    ids = scores.argsort(-1)[:, :top_k].to(torch.int32)
    ids[torch.rand(ids.shape) < 0.15] = -1
    weights = torch.rand(tokens, top_k)
    x = torch.randn(tokens, D).to(dtype)
    w13 = (torch.randn(E, 2 * F, D) / D**0.5).to(dtype)
    w2 = (torch.randn(E, D, F) / F**0.5).to(dtype)
    b13 = torch.randn(E, 2 * F).to(dtype) if bias else None
    b2 = torch.randn(E, D).to(dtype) if bias else None
    return [x, ids, weights, w13, w2, b13, b2]


def check(
    operands: list[Any], device: torch.device, act: str = "silu", limit: float = 7.0, **extra: Any
) -> torch.Tensor:
    """Run the kernel on poisoned output and compare; returns what it wrote."""
    attrs: dict[str, Any] = {"act": act, "alpha": 1.702, "limit": limit}
    expected = moe.grouped_mlp(*operands, **attrs).float()
    moved = [None if t is None else move(t, device) for t in operands]
    out = torch.full_like(operands[0], float("nan")).to(device)
    launch: Callable[..., None] = launcher("moe.grouped_mlp", "triton.grouped_mlp")
    launch(*moved, out=(out,), **attrs, **extra)
    error = (out.cpu().float() - expected).square().sum() / expected.square().sum()
    assert float(error) <= BOUNDS[operands[0].dtype]
    return out.cpu()


def move(t: torch.Tensor, device: torch.device) -> torch.Tensor:
    """To a device, keeping strides and what lies between the rows."""
    return t.to(device) if t.is_contiguous() else t._base.to(device)[:, : t.shape[1]]  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 2, 7, 17, 65])
def test_parity(device: torch.device, tokens: int, dtype: torch.dtype) -> None:
    check(make(tokens, 3, dtype, **SIZES), device)


@pytest.mark.parametrize("act", GATED)
@pytest.mark.parametrize("tokens", [2, 40])
def test_activations_with_bias(device: torch.device, tokens: int, act: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        check(make(tokens, 2, dtype, bias=True, **SIZES), device, act, limit=0.5)


@pytest.mark.parametrize("tokens", [2, 40])
def test_odd_sizes(device: torch.device, tokens: int) -> None:
    """Rows that are not 16-byte aligned and no multiple of any block."""
    for dtype in (torch.float32, torch.bfloat16):
        check(make(tokens, 5, dtype, bias=True, D=33, F=19, E=5), device)


def test_wider_than_one_block(device: torch.device) -> None:
    """Several steps along both inner axes."""
    for tokens in (1, 33):
        check(make(tokens, 2, torch.bfloat16, D=1096, F=16, E=3), device)
        check(make(tokens, 2, torch.bfloat16, D=24, F=552, E=3), device)


@pytest.mark.parametrize("tokens", [2, 40])
def test_strided_x(device: torch.device, tokens: int) -> None:
    operands = make(tokens, 2, torch.float32, **SIZES)
    wide = torch.full((tokens, SIZES["D"] + 24), float("nan"))
    wide[:, : SIZES["D"]] = operands[0]
    operands[0] = wide[:, : SIZES["D"]]
    check(operands, device)


@pytest.mark.parametrize("tokens", [2, 40])
def test_mixed_dtypes(device: torch.device, tokens: int) -> None:
    """float32 activations over bf16 weights."""
    operands = make(tokens, 2, torch.float32, **SIZES)
    operands[3], operands[4] = operands[3].bfloat16(), operands[4].bfloat16()
    check(operands, device)


@pytest.mark.parametrize("tokens", [2, 40])
def test_every_pair_skipped(device: torch.device, tokens: int) -> None:
    operands = make(tokens, 2, torch.float32, **SIZES)
    operands[1].fill_(-1)
    out = torch.full_like(operands[0], float("nan")).to(device)
    launch: Callable[..., None] = launcher("moe.grouped_mlp", "triton.grouped_mlp")
    moved = [None if t is None else t.to(device) for t in operands]
    launch(*moved, out=(out,), act="silu", alpha=1.702, limit=7.0)
    assert torch.equal(out.cpu(), torch.zeros_like(operands[0]))


@pytest.mark.parametrize("block_m", [32, 64, 128])
def test_larger_tiles(device: torch.device, block_m: int) -> None:
    """Several blocks of an expert, some in part, and groups of row blocks that do not divide."""
    operands = make(110, 3, torch.bfloat16, D=72, F=40, E=5)
    tile = Tile(32, 32, 4, 2, group=3)
    check(operands, device, config=GroupedConfig(block_m, tile, tile))


@pytest.mark.parametrize("tokens", [2, 40])
def test_same_bits_and_no_influence_of_other_tokens(device: torch.device, tokens: int) -> None:
    operands = make(tokens, 3, torch.bfloat16, **SIZES)
    first = check(operands, device)
    assert torch.equal(first, check(operands, device))
    order = torch.randperm(tokens)
    shuffled = [t[order] for t in operands[:3]] + operands[3:]
    assert torch.equal(first[order], check(shuffled, device))


def test_decode_and_grouped_meet_at_the_threshold(device: torch.device) -> None:
    """One pair more than decode takes is the grouped form; both are right."""
    tokens = file.DECODE_PAIRS
    check(make(tokens, 1, torch.float32, **SIZES), device)
    check(make(tokens + 1, 1, torch.float32, **SIZES), device)
