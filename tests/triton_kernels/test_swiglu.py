"""triton.swiglu against the op's reference."""

from collections.abc import Callable

import pytest
import torch

import ktgraph.ops.nn as nn
import ktgraph.triton_kernels.swiglu  # noqa: F401  (registers its kernel)
from ktgraph.triton_kernels.activations import ACTIVATIONS
from ktgraph.triton_kernels.registry import launcher

BOUNDS = {torch.float32: 1e-10, torch.float16: 1e-6, torch.bfloat16: 6e-5}
DTYPES = list(BOUNDS)


def check(
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    depth: int = 72,
    width: int = 40,
    act: str = "silu",
    stored: torch.dtype | None = None,
) -> None:
    """Fresh inputs between NaN columns, a poisoned strided output."""
    x = torch.randn(tokens, depth).to(dtype)
    w13 = (torch.randn(2 * width, depth) / depth**0.5).to(stored or dtype)
    w2 = (torch.randn(depth, width) / width**0.5).to(stored or dtype)
    expected = nn.swiglu(x, w13, w2, act=act).float()
    wide = torch.full((2, tokens, depth + 16), float("nan"), dtype=dtype, device=device)
    wide[0, :, :depth] = x.to(device)
    launch: Callable[..., None] = launcher("nn.swiglu", "triton.swiglu")
    out = wide[1, :, :depth]
    launch(wide[0, :, :depth], w13.to(device), w2.to(device), out=(out,), act=act)
    error = (out.cpu().float() - expected).square().sum() / expected.square().sum()
    assert float(error) <= BOUNDS[dtype]
    assert wide[1, :, depth:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 7, 17, 65])
def test_parity(device: torch.device, tokens: int, dtype: torch.dtype) -> None:
    check(tokens, dtype, device)


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_activations(device: torch.device, tokens: int, act: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        check(tokens, dtype, device, act=act)


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_odd_sizes(device: torch.device, tokens: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        check(tokens, dtype, device, depth=43, width=19)


@pytest.mark.parametrize("tokens", [1, 2])
def test_several_steps(device: torch.device, tokens: int) -> None:
    for depth in (512, 552):
        check(tokens, torch.bfloat16, device, depth=depth, width=24)


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_mixed_dtypes(device: torch.device, tokens: int) -> None:
    check(tokens, torch.float32, device, stored=torch.bfloat16)
