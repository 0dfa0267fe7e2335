"""moe_align against a stable sort in plain torch."""

import pytest
import torch

from ktgraph.triton_kernels.moe_align import align, max_blocks


@pytest.mark.parametrize("experts", [5, 64, 300])
@pytest.mark.parametrize("tokens", [1, 17, 65, 700])
@pytest.mark.parametrize("block_m", [16, 64])
def test_sorts_stably_by_expert(
    device: torch.device, experts: int, tokens: int, block_m: int
) -> None:
    ids = torch.randint(-1, experts, (tokens, 3), dtype=torch.int32)
    ids[torch.rand(tokens, 3) < 0.3] = min(3, experts - 1)  # a favourite spans several blocks
    _check(ids, experts, block_m, device)


def test_all_pairs_of_one_expert(device: torch.device) -> None:
    _check(torch.full((50, 4), 6, dtype=torch.int32), 7, 16, device)


def test_nothing_chosen(device: torch.device) -> None:
    _check(torch.full((9, 4), -1, dtype=torch.int32), 7, 16, device)


def test_worst_case_fits_the_bound(device: torch.device) -> None:
    """Every expert wastes all but one row of its last block."""
    counts = torch.arange(8).repeat_interleave(17)
    _check(counts.to(torch.int32).reshape(-1, 4), 8, 16, device)


def test_more_choices_than_float32_counts() -> None:
    ids = torch.empty(1 << 23, 2, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match=r"16777216 choices .*compile with a smaller max_tokens"):
        align(ids, 8, 16)


def _check(ids: torch.Tensor, experts: int, block_m: int, device: torch.device) -> None:
    made = align(ids.to(device), experts, block_m)
    assert made.blocks == max_blocks(ids.numel(), experts, block_m)
    order = made.order.cpu().reshape(-1, block_m)
    found: dict[int, list[int]] = {}
    owners: list[int] = []
    for rows, owner, count in zip(
        order, made.block_expert.tolist(), made.block_rows.tolist(), strict=True
    ):
        if count:
            owners.append(owner)
            found.setdefault(owner, []).extend(rows[:count].tolist())
    flat = ids.flatten()
    expected = {
        e: torch.where(flat == e)[0].tolist() for e in range(experts) if bool((flat == e).any())
    }
    assert found == expected
    assert owners == sorted(owners)
    full = [-(-len(p) // block_m) for p in expected.values()]
    assert len(owners) == sum(full) <= made.blocks
