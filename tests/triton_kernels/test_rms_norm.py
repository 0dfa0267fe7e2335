"""rms_norm and add_rms_norm against their references."""

import pytest
import torch

from ktgraph.ops import op_def
from ktgraph.triton_kernels import rms_norm as _file  # noqa: F401  (registers)
from ktgraph.triton_kernels.registry import launcher
from tests.triton_kernels.close import DTYPES, check, poisoned, strided

BOUND = 1e-6
RMS = launcher("nn.rms_norm", "triton.rms_norm")
ADD = launcher("nn.add_rms_norm", "triton.add_rms_norm")


def _norm(x: torch.Tensor, w: torch.Tensor, **attrs: object) -> None:
    out = poisoned(*x.shape, dtype=x.dtype, device=x.device)
    RMS(x, w, out=(out,), **attrs)
    check(out, op_def("nn.rms_norm").reference(x.cpu(), w.cpu(), **attrs), BOUND)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("late_cast", [False, True])
@pytest.mark.parametrize("shape", [(1, 33), (2, 512), (7, 256), (17, 1000), (3, 7168), (150, 96)])
def test_rms_norm(
    shape: tuple[int, int], late_cast: bool, dtype: torch.dtype, device: torch.device
) -> None:
    x = (3 * torch.randn(shape)).to(device, dtype)
    w = torch.randn(shape[-1]).to(device, dtype)
    _norm(strided(x), w, eps=1e-6, late_cast=late_cast)


@pytest.mark.parametrize("heads", [3, 50])
def test_rows_of_heads_inside_wider_rows(heads: int, device: torch.device) -> None:
    """Per-head norms of q inside qkv need two strides."""
    wide = torch.randn(5, heads * 40 + 16, device=device)
    x = wide[:, : heads * 40].unflatten(-1, (heads, 40))
    _norm(x, torch.randn(40, device=device), eps=1e-5, late_cast=False)


def test_weights_in_f32_for_bf16_rows(device: torch.device) -> None:
    x = torch.randn(4, 96, device=device).bfloat16()
    for late_cast in (False, True):
        _norm(x, torch.randn(96, device=device), eps=1e-6, late_cast=late_cast)


def test_eps_counts(device: torch.device) -> None:
    x = 1e-3 * torch.randn(2, 64, device=device)
    _norm(x, torch.randn(64, device=device), eps=0.1, late_cast=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("late_cast", [False, True])
@pytest.mark.parametrize("shape", [(1, 33), (7, 256), (5, 5120), (150, 96)])
def test_add_rms_norm(
    shape: tuple[int, int], late_cast: bool, dtype: torch.dtype, device: torch.device
) -> None:
    x, y = (torch.randn(shape).to(device, dtype) for _ in range(2))
    w = torch.randn(shape[-1]).to(device, dtype)
    out = tuple(poisoned(*shape, dtype=dtype, device=device) for _ in range(2))
    ADD(strided(x), y, w, out=out, eps=1e-6, late_cast=late_cast)
    total, normed = op_def("nn.add_rms_norm").reference(
        x.cpu(), y.cpu(), w.cpu(), eps=1e-6, late_cast=late_cast
    )
    assert torch.equal(out[0].cpu(), total)
    check(out[1], normed, BOUND)


def test_no_rows(device: torch.device) -> None:
    x = torch.empty(0, 32, device=device)
    RMS(x, x.new_ones(32), out=(x.clone(),), eps=1e-6, late_cast=False)
