"""split_ids: slot numbers and expert ids, bit for bit, for tables of every fullness."""

import pytest
import torch

from ktgraph.ops.moe import split_ids as reference
from ktgraph.triton_kernels import split_ids as _file  # noqa: F401  (registers)
from ktgraph.triton_kernels.registry import launcher
from tests.triton_kernels.close import poisoned

SPLIT = launcher("moe.split_ids", "triton.split_ids")


@pytest.mark.parametrize("slots", [0, 1, 5, 11])
@pytest.mark.parametrize(("tokens", "top_k"), [(1, 2), (7, 3), (2, 8), (400, 6)])
def test_split_ids(tokens: int, top_k: int, slots: int, device: torch.device) -> None:
    table = torch.full((11,), -1, dtype=torch.int32, device=device)
    table[torch.randperm(11)[:slots].to(device)] = torch.arange(
        slots, dtype=torch.int32, device=device
    )
    ids = torch.randint(-1, 11, (tokens, top_k), dtype=torch.int32, device=device)
    out = tuple(poisoned(tokens, top_k, dtype=torch.int32, device=device) for _ in range(2))
    SPLIT(ids, table, out=out)
    for got, wanted in zip(out, reference(ids, table), strict=True):
        assert torch.equal(got, wanted)


def test_no_tokens(device: torch.device) -> None:
    ids = torch.empty(0, 4, dtype=torch.int32, device=device)
    SPLIT(ids, torch.zeros(3, dtype=torch.int32, device=device), out=(ids.clone(), ids.clone()))
