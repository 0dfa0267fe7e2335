"""triton.mla_attend_expanded against mla.attend_expanded: ragged batches, head groups, types."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ragged import LAYER, Ragged, nmse, poisoned, strided, widened

from ktgraph.ops.mla import attend_expanded as reference
from ktgraph.triton_kernels.mla_prefill import Config, head_groups, mla_attend_expanded
from ktgraph.triton_kernels.registry import launcher

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
CHUNK = ([0, 33, 5], [17, 2, 7])
# As test_sdpa, and the expanded keys and values are rounded too: twice the energy.
BOUND = {F32: 1e-10, BF16: 2e-5, F16: 4e-7}


def check(
    device: torch.device,
    past: list[int],
    new: list[int],
    *,
    dtype: torch.dtype = F32,
    weights: torch.dtype | None = None,
    heads: int = 4,
    nope: int = 16,
    pe: int = 8,
    width: int = 16,
    rank: int = 24,
    page: int = 16,
    slack: int = 0,
    **launch: Any,
) -> None:
    ragged = Ragged.make(past, new, device, page=page)
    q_nope = ragged.randn(sum(new), heads, nope, dtype=dtype)
    q_pe = ragged.randn(sum(new), heads, pe, dtype=dtype)
    kv = ragged.cache((rank + pe,), dtype=dtype)
    kv_b = (ragged.randn(heads * (nope + width), rank) / rank**0.5).to(weights or dtype)
    wide: list[Any] = widened(q_nope, q_pe, kv, kv_b)
    attrs = {"layer": LAYER, "scale": 0.3}
    want = reference(*wide[:3], ragged.batch, wide[3], **attrs)
    out = poisoned(*want.shape, dtype=dtype, device=device)
    operands = strided(q_nope, device), strided(q_pe, device), ragged.moved(kv)
    batch = ragged.on_device(slack)
    mla_attend_expanded(*operands, batch, kv_b.to(device), out=(out,), **attrs, **launch)
    error = nmse(out, want)
    assert error < BOUND[dtype]
    if dtype != F32:  # no worse than the op's own rounding in this type, but for luck
        own = nmse(reference(q_nope, q_pe, kv, ragged.batch, kv_b, **attrs), want)
        assert error < 2 * own + 1e-7


def test_registered() -> None:
    found = launcher("mla.attend_expanded", "triton.mla_attend_expanded")
    assert found is mla_attend_expanded


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize(
    ("past", "new"), [CHUNK, ([40, 0, 17], [1, 1, 1]), ([0], [1]), ([3], [65]), ([0], [130])]
)
def test_types_and_batches(
    device: torch.device, dtype: torch.dtype, past: list[int], new: list[int]
) -> None:
    check(device, past, new, dtype=dtype)


def test_weights_of_another_type(device: torch.device) -> None:
    check(device, *CHUNK, weights=BF16)


@pytest.mark.parametrize("sizes", [(32, 16, 32, 64), (16, 8, 12, 24), (40, 20, 48, 33)])
def test_sizes(device: torch.device, sizes: tuple[int, int, int, int]) -> None:
    nope, pe, width, rank = sizes
    check(device, *CHUNK, nope=nope, pe=pe, width=width, rank=rank)
    check(device, *CHUNK, nope=nope, pe=pe, width=width, rank=rank, dtype=BF16)


@pytest.mark.parametrize("heads", [1, 3, 7])
@pytest.mark.parametrize("budget", [1, 50_000])
def test_groups_of_heads(device: torch.device, heads: int, budget: int) -> None:
    check(device, *CHUNK, heads=heads, budget=budget)


@pytest.mark.parametrize("page", [4, 32, 48])
def test_page_sizes(device: torch.device, page: int) -> None:
    check(device, *CHUNK, page=page)


@pytest.mark.parametrize("shape", [CHUNK, ([5, 4, 8, 2], [0, 3, 0, 1])])
def test_bounds_need_not_be_tight(device: torch.device, shape: Any) -> None:
    check(device, *shape, slack=50)


@pytest.mark.parametrize("tile", [(16, 64), (128, 16), (32, 32)])
def test_tiles(device: torch.device, tile: tuple[int, int]) -> None:
    check(device, [0, 40, 9], [50, 3, 20], override=Config(*tile, 4, 2))


def test_head_groups_keep_the_budget() -> None:
    assert head_groups(128, 4 << 20, 512 << 20) == [slice(0, 128)]
    assert head_groups(128, 5 << 20, 512 << 20) == [slice(0, 64), slice(64, 128)]
    assert head_groups(3, 1 << 30, 512 << 20) == [slice(0, 1), slice(1, 2), slice(2, 3)]
    groups = head_groups(7, 10, 20)
    assert [h for g in groups for h in range(g.start, g.stop)] == list(range(7))
    assert all((g.stop - g.start) * 10 <= 20 for g in groups)
