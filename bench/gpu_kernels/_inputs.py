"""What the cases of several kernels need: random tensors, error, batches, sets larger than L2."""

from __future__ import annotations

import torch

from ktgraph.runtime.batch import Batch
from ktgraph.triton_kernels.batch import DeviceBatch

_L2 = 80e6  # bytes; an H200 has 60 MB
_MOST_SETS = 512


def sets_over_l2(nbytes: float) -> int:
    """How many input sets of `nbytes` no longer fit L2, at most 512."""
    return max(1, min(_MOST_SETS, round(_L2 / nbytes)))


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def nmse(got: torch.Tensor, wanted: torch.Tensor) -> float:
    a, b = got.double(), wanted.double()
    return float((a - b).square().sum() / b.square().sum())


def decode_or_prefill(tokens: int, past: int, page: int = 64) -> tuple[Batch, DeviceBatch]:
    """Up to 16 tokens: that many sequences at `past`; more: one sequence's prefill."""
    new = [1] * tokens if tokens <= 16 else [tokens]
    pages = -(-(past + new[0]) // page)
    tables = [list(range(q * pages, (q + 1) * pages)) for q in range(len(new))]
    host = Batch.build([past] * len(new), new, tables, page)
    return host, DeviceBatch.of(host, "cuda")
