"""What tests of kernels share: poisoned results, and how far a result is from its reference."""

from __future__ import annotations

import torch

F32_BOUND = 1e-10
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A result buffer in which an element that nothing writes shows."""
    value = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
    return torch.full(shape, value, dtype=dtype, device=device)


def nmse(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Squared error over squared reference, in f64; NaN or inf anywhere gives NaN."""
    a, b = got.double().cpu(), wanted.double().cpu()
    assert a.shape == b.shape
    return float((a - b).square().sum() / b.square().sum().clamp(min=1e-300))


def check(got: torch.Tensor, wanted: torch.Tensor, bound: float) -> None:
    """`bound` holds for 16-bit results; f32 ones must be within 1e-10."""
    assert got.dtype == wanted.dtype
    error = nmse(got, wanted)
    assert error <= (F32_BOUND if got.dtype == torch.float32 else bound), error


def strided(values: torch.Tensor) -> torch.Tensor:
    """The same values as a column slice of a wider tensor, NaN around it."""
    wide = values.new_full((*values.shape[:-1], values.shape[-1] + 24), float("nan"))
    view = wide[..., 8 : 8 + values.shape[-1]]
    view.copy_(values)
    return view
