"""triton.linear against the op's reference: multiply-add and torch's form."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ktgraph.ops.nn as nn
import ktgraph.triton_kernels.linear as file
from ktgraph.triton_kernels.registry import launcher

BOUNDS = {torch.float32: 1e-10, torch.float16: 2e-7, torch.bfloat16: 1e-5}
DTYPES = list(BOUNDS)


def check(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, device: torch.device, **extra: Any
) -> torch.Tensor:
    """Run on a poisoned, strided output and compare; returns what was written."""
    expected = nn.linear(x, w, b).float()
    tokens, width = expected.shape
    wide = torch.full((tokens, width + 8), float("nan"), dtype=x.dtype, device=device)
    out = wide[:, :width]
    launch: Callable[..., None] = launcher("nn.linear", "triton.linear")
    launch(_move(x, device), w.to(device), None if b is None else b.to(device), out=(out,), **extra)
    error = (out.cpu().float() - expected).square().sum() / expected.square().sum()
    assert float(error) <= BOUNDS[x.dtype]
    assert wide[:, width:].isnan().all()
    return out.cpu()


def _move(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """To a device, with NaN between the rows."""
    wide = torch.full((x.shape[0], x.shape[1] + 16), float("nan"), dtype=x.dtype, device=device)
    wide[:, : x.shape[1]] = x.to(device)
    return wide[:, : x.shape[1]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 17, 65])
@pytest.mark.parametrize("bias", [False, True])
def test_parity(device: torch.device, tokens: int, dtype: torch.dtype, bias: bool) -> None:
    x, w = torch.randn(tokens, 136).to(dtype), torch.randn(40, 136).to(dtype)
    check(x, w, torch.randn(40).to(dtype) if bias else None, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_odd_sizes(device: torch.device, tokens: int, dtype: torch.dtype) -> None:
    """Rows that are not 16-byte aligned; fewer rows of w than one program owns."""
    for depth, width in ((251, 33), (19, 1)):
        x, w = torch.randn(tokens, depth).to(dtype), torch.randn(width, depth).to(dtype)
        check(x, w, torch.randn(width).to(dtype), device)


@pytest.mark.parametrize("tokens", [1, 2])
def test_several_steps(device: torch.device, tokens: int) -> None:
    """K over several steps, with and without a remainder."""
    for depth in (2048, 2312):
        x, w = torch.randn(tokens, depth).bfloat16(), torch.randn(24, depth).bfloat16()
        check(x, w, None, device)


@pytest.mark.parametrize("tokens", [1, 2, 9])
@pytest.mark.parametrize(
    ("kind", "stored"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_mixed_dtypes(
    device: torch.device, tokens: int, kind: torch.dtype, stored: torch.dtype
) -> None:
    """The weight is cast to the activations' dtype."""
    x, w = torch.randn(tokens, 64).to(kind), torch.randn(24, 64).to(stored)
    check(x, w, torch.randn(24).to(stored), device)


@pytest.mark.parametrize("tokens", [1, 9])
def test_rows_of_a_wider_weight(device: torch.device, tokens: int) -> None:
    """w may be a view of columns: its row stride is passed on."""
    x, whole = torch.randn(tokens, 48).bfloat16(), torch.randn(24, 80).bfloat16()
    expected = nn.linear(x, whole[:, 16:64]).float()
    out = torch.full((tokens, 24), float("nan"), dtype=x.dtype, device=device)
    launch: Callable[..., None] = launcher("nn.linear", "triton.linear")
    launch(x.to(device), whole.to(device)[:, 16:64], None, out=(out,))
    error = (out.cpu().float() - expected).square().sum() / expected.square().sum()
    assert float(error) <= BOUNDS[x.dtype]


def test_a_row_does_not_depend_on_the_others(device: torch.device) -> None:
    """Multiplied and added, the same token has the same bits alone and beside another."""
    x, w = torch.randn(2, 264).bfloat16(), torch.randn(24, 264).bfloat16()
    both = check(x, w, None, device)
    assert torch.equal(both, check(x, w, None, device))
    assert torch.equal(both[:1], check(x[:1], w, None, device))


def test_two_tokens_of_a_large_matrix_are_torchs() -> None:
    large, small = torch.empty(8193, 1024).bfloat16(), torch.empty(8192, 1024).bfloat16()
    bound = 16 << 20
    assert file.multiplies_and_adds(1, large, bound)
    assert file.multiplies_and_adds(2, small, bound)
    assert not file.multiplies_and_adds(2, large, bound)
    assert not file.multiplies_and_adds(3, small, bound)


def test_configurations_may_be_overridden(device: torch.device) -> None:
    x, w = torch.randn(1, 264).bfloat16(), torch.randn(24, 264).bfloat16()
    check(x, w, None, device, config=file.LinearConfig(4, 64, 4, unroll=2))
