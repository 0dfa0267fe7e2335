"""triton.batched_linear against the op's reference, with weights in both orientations."""

from collections.abc import Callable

import pytest
import torch

import ktgraph.ops.nn as nn
import ktgraph.triton_kernels.batched_linear as file
from ktgraph.triton_kernels.registry import launcher

BOUNDS = {torch.float32: 1e-10, torch.float16: 2e-7, torch.bfloat16: 1e-5}
DTYPES = list(BOUNDS)
assert file.FEW_TOKENS == 16


def check(x: torch.Tensor, w: torch.Tensor, device: torch.device) -> None:
    """Inputs between NaN columns, a poisoned strided output."""
    expected = nn.batched_linear(x, w.cpu()).float()
    tokens, heads, depth = x.shape
    given = torch.full((tokens, heads, depth + 8), float("nan"), dtype=x.dtype, device=device)
    given[..., :depth] = x.to(device)
    wide = torch.full((tokens, heads, w.shape[1] + 8), float("nan"), dtype=x.dtype, device=device)
    out = wide[..., : w.shape[1]]
    launch: Callable[..., None] = launcher("nn.batched_linear", "triton.batched_linear")
    launch(given[..., :depth], w.to(device), out=(out,))
    error = (out.cpu().float() - expected).square().sum() / expected.square().sum()
    assert float(error) <= BOUNDS[x.dtype]
    assert wide[..., w.shape[1] :].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 7, 16, 17, 65])
def test_parity(device: torch.device, tokens: int, dtype: torch.dtype) -> None:
    check(torch.randn(tokens, 3, 136).to(dtype), torch.randn(3, 40, 136).to(dtype), device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 9, 18])
def test_weight_as_a_transposed_view(device: torch.device, tokens: int, dtype: torch.dtype) -> None:
    """The absorbed query matrix: kv_b's rows are the inner axis."""
    kv_b = torch.randn(2, 32 + 24, 72).to(device, dtype)
    check(torch.randn(tokens, 2, 32).to(dtype), kv_b[:, :32].transpose(1, 2), device)
    check(torch.randn(tokens, 2, 72).to(dtype), kv_b[:, 32:], device)


@pytest.mark.parametrize("tokens", [1, 16, 18])
def test_odd_sizes(device: torch.device, tokens: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        check(torch.randn(tokens, 5, 19).to(dtype), torch.randn(5, 33, 19).to(dtype), device)


def test_large_tiles(device: torch.device) -> None:
    """Enough rows for the tiles of many heads."""
    check(torch.randn(2, 40, 64).bfloat16(), torch.randn(40, 216, 64).bfloat16(), device)


@pytest.mark.parametrize("tokens", [2, 18])
def test_mixed_dtypes(device: torch.device, tokens: int) -> None:
    check(torch.randn(tokens, 2, 40), torch.randn(2, 24, 40).bfloat16(), device)
