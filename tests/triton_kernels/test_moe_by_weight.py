"""moe.by_weight: the same pairs of expert and weight, by descending weight."""

import pytest
import torch

from ktgraph.ops import op_def
from ktgraph.triton_kernels import moe_by_weight as _file  # noqa: F401  (registers)
from ktgraph.triton_kernels.registry import launcher

BY_WEIGHT = launcher("moe.by_weight", "triton.moe_by_weight")


@pytest.mark.parametrize(("tokens", "top_k"), [(1, 6), (3, 1), (5, 2), (7, 8), (2, 11)])
def test_by_weight(tokens: int, top_k: int, device: torch.device) -> None:
    """With weights that are equal, or negative, and with skipped experts."""
    rng = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-1, 64, (tokens, top_k), generator=rng, dtype=torch.int32)
    weights = torch.randint(-2, 4, (tokens, top_k), generator=rng).float() / 4
    out = [torch.full_like(ids, -7).to(device), torch.full_like(weights, torch.nan).to(device)]
    BY_WEIGHT(ids.to(device), weights.to(device), out=out)
    want = op_def("moe.by_weight").reference(ids, weights)
    for got, wanted in zip(out, want, strict=True):
        assert torch.equal(got.cpu(), wanted)
