"""triton.mla_attend against mla.attend: decode, chunks and prefill, every tile form."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import pytest
import torch
from ragged import LAYER, Ragged, nmse, poisoned, strided, widened

from ktgraph.ops.mla import attend as reference
from ktgraph.triton_kernels import mla_decode, mla_decode_sm90
from ktgraph.triton_kernels.gluon_kernels import gluon_kernel
from ktgraph.triton_kernels.mla_decode import Config, mla_attend
from ktgraph.triton_kernels.registry import launcher

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DECODE = ([40, 0, 17], [1, 1, 1])
CHUNK = ([0, 33, 5], [17, 2, 7])
BOUND = {F32: 1e-10, BF16: 1e-5, F16: 2e-7}  # see test_sdpa


def check(
    device: torch.device,
    past: list[int],
    new: list[int],
    *,
    dtype: torch.dtype = F32,
    heads: int = 4,
    rank: int = 16,
    pe: int = 8,
    page: int = 16,
    slack: int = 0,
    **launch: Any,
) -> None:
    ragged = Ragged.make(past, new, device, page=page)
    q_lat = ragged.randn(sum(new), heads, rank, dtype=dtype)
    q_pe = ragged.randn(sum(new), heads, pe, dtype=dtype)
    kv = ragged.cache((rank + pe,), dtype=dtype)
    wide: list[Any] = widened(q_lat, q_pe, kv)
    want = reference(*wide, ragged.batch, layer=LAYER, scale=0.3)
    out = poisoned(*want.shape, dtype=dtype, device=device)
    operands = strided(q_lat, device), strided(q_pe, device), ragged.moved(kv)
    batch = ragged.on_device(slack)
    mla_attend(*operands, batch, out=(out,), layer=LAYER, scale=0.3, **launch)
    error = nmse(out, want)
    assert error < BOUND[dtype]
    if dtype != F32:  # no worse than the op's own rounding in this type, but for luck
        own = nmse(reference(q_lat, q_pe, kv, ragged.batch, layer=LAYER, scale=0.3), want)
        assert error < 2 * own + 1e-7


def test_registered() -> None:
    assert launcher("mla.attend", "triton.mla_attend") is mla_attend


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize(("past", "new"), [DECODE, CHUNK, ([0], [1]), ([63], [1]), ([3], [65])])
def test_types_and_batches(
    device: torch.device, dtype: torch.dtype, past: list[int], new: list[int]
) -> None:
    check(device, past, new, dtype=dtype)


@pytest.mark.parametrize("sizes", [(24, 8), (64, 32), (40, 20)])
@pytest.mark.parametrize("shape", [DECODE, CHUNK])
def test_row_sizes(device: torch.device, sizes: tuple[int, int], shape: Any) -> None:
    check(device, *shape, rank=sizes[0], pe=sizes[1], dtype=BF16)


@pytest.mark.parametrize("heads", [1, 3, 16, 40])
@pytest.mark.parametrize("shape", [DECODE, ([0, 20], [7, 2])])
def test_heads(device: torch.device, heads: int, shape: Any) -> None:
    check(device, *shape, heads=heads)


@pytest.mark.parametrize("page", [4, 32, 128])
@pytest.mark.parametrize("shape", [DECODE, CHUNK])
def test_page_sizes(device: torch.device, page: int, shape: Any) -> None:
    check(device, *shape, page=page, dtype=BF16)


def test_wide_offsets(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of 2^31 elements or more takes 64-bit offsets."""
    monkeypatch.setattr(mla_decode, "small", lambda *parts: False)
    check(device, *CHUNK)


@pytest.mark.parametrize("splits", [1, 2, 9])
@pytest.mark.parametrize("shape", [([100, 0, 30], [1, 1, 1]), ([10, 0], [9, 5])])
def test_splits(device: torch.device, splits: int, shape: Any) -> None:
    check(device, *shape, splits=splits)


@pytest.mark.parametrize("tile", [(16, 64), (64, 16), (32, 32)])
def test_tiles(device: torch.device, tile: tuple[int, int]) -> None:
    used = Config(*tile, 4, 2)
    check(device, [70, 5], [1, 3], heads=20, override=used)
    check(device, [70, 5], [1, 3], heads=20, override=used, dtype=BF16)


@pytest.mark.parametrize("shape", [DECODE, CHUNK, ([5, 4, 8, 2], [0, 3, 0, 1])])
def test_bounds_need_not_be_tight(device: torch.device, shape: Any) -> None:
    check(device, *shape, slack=100)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("shape", [DECODE, CHUNK, ([300, 63, 64], [1, 2, 1])])
@pytest.mark.parametrize("splits", [None, 1, 3])
@pytest.mark.parametrize("page", [4, 32, 128])
def test_sizes_of_deepseek(
    device: torch.device, dtype: torch.dtype, heads: int, shape: Any, splits: int | None, page: int
) -> None:
    """On sm_90 these take the kernel of `mla_decode_sm90`, which no interpreter runs."""
    check(device, *shape, heads=heads, rank=512, pe=64, dtype=dtype, page=page, splits=splits)


@pytest.mark.gpu
def test_sizes_of_deepseek_with_wide_offsets(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mla_decode_sm90, "small", lambda *parts: False)
    check(device, *CHUNK, heads=64, rank=512, pe=64, dtype=BF16)


def test_which_calls_take_the_kernel_of_sm90() -> None:
    """Given sizes, 16 bits, and rows that can be copied 16 bytes at a time."""
    lat, pe = torch.zeros(2, 64, 512, dtype=BF16), torch.zeros(2, 64, 64, dtype=BF16)
    cache = torch.zeros(8, 576, dtype=BF16)
    assert mla_decode_sm90.fits(lat, pe, cache, 90)
    assert not mla_decode_sm90.fits(lat, pe, cache, 80)
    assert not mla_decode_sm90.fits(lat[:, :40], pe[:, :40], cache, 90)
    assert not mla_decode_sm90.fits(lat[..., :256], pe, cache, 90)
    assert not mla_decode_sm90.fits(lat, pe, cache.float(), 90)
    assert not mla_decode_sm90.fits(lat, torch.zeros(2, 64, 68, dtype=BF16)[..., :64], cache, 90)
    assert not mla_decode_sm90.fits(lat, pe, torch.zeros(8, 580, dtype=BF16)[:, 4:], 90)


def test_a_triton_without_gluon(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The plain kernel is taken, and why is said."""
    monkeypatch.delitem(sys.modules, mla_decode_sm90.__name__)
    monkeypatch.delattr("ktgraph.triton_kernels.mla_decode_sm90")
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon", None)
    find = gluon_kernel.__wrapped__
    with caplog.at_level(logging.WARNING, "ktgraph"):
        assert find("mla_decode_sm90", "mla.attend") is None
    assert "mla.attend is slower than it could be" in caplog.text
    assert "Gluon as Triton 3.6 to 3.9 have it" in caplog.text


def test_other_kernels_need_no_gluon() -> None:
    script = (
        "import sys; sys.modules['triton.experimental.gluon'] = None; "
        "import ktgraph.triton_kernels.mla_decode, ktgraph.triton_kernels.linear"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
