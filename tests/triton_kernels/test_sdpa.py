"""triton.sdpa against attn.sdpa: both forms, every attribute, ragged batches, shuffled pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from ragged import LAYER, Ragged, nmse, poisoned, strided, widened

from ktgraph.ir import parse_module
from ktgraph.ops.attn import sdpa as reference
from ktgraph.ops.registry import kernels_for
from ktgraph.triton_kernels import sdpa_decode, sdpa_prefill
from ktgraph.triton_kernels.registry import launcher
from ktgraph.triton_kernels.sdpa import sdpa

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DECODE = ([40, 0, 17], [1, 1, 1])
CHUNK = ([0, 33, 5], [17, 2, 7])
# f32 as the rules say; 16-bit against f64: operands are exact, weights are rounded to 2^-9 (bf16)
# or 2^-12 (f16) of themselves and the result once more: (2/3) * (2^-9)^2 = 2.5e-6 of the energy.
BOUND = {F32: 1e-10, BF16: 1e-5, F16: 2e-7}


def check(
    device: torch.device,
    past: list[int],
    new: list[int],
    *,
    dtype: torch.dtype = F32,
    heads: int = 4,
    groups: int = 2,
    size: int = 16,
    width: int = 16,
    page: int = 16,
    window: int = 0,
    softcap: float = 0.0,
    sinks: bool = False,
    slack: int = 0,
    seed: int = 0,
    form: Any = None,
    **launch: Any,
) -> None:
    ragged = Ragged.make(past, new, device, page=page, seed=seed)
    q = ragged.randn(sum(new), heads, size, dtype=dtype)
    kv = ragged.cache((groups, size), (groups, width), dtype=dtype)
    extra = ragged.randn(heads, dtype=dtype) if sinks else None
    attrs = {"scale": 0.3, "window": window, "softcap": softcap}
    wide = widened(q, kv, extra)
    want = reference(wide[0], wide[1], ragged.batch, wide[2], layer=LAYER, **attrs)  # type: ignore
    out = poisoned(*want.shape, dtype=dtype, device=device)
    moved = ragged.moved(kv)
    given = extra.to(device) if extra is not None else None
    queries, batch = strided(q, device), ragged.on_device(slack)
    if form is None:
        sdpa(queries, moved, batch, given, out=(out,), layer=LAYER, **attrs)
    else:
        k, v = (p[LAYER] for p in moved.parts)
        form.launch(queries, k, v, batch, given, out, **attrs, **launch)
    error = nmse(out, want)
    assert error < BOUND[dtype]
    if dtype != F32:  # no worse than the op's own rounding in this type, but for luck
        own = nmse(reference(q, kv, ragged.batch, extra, layer=LAYER, **attrs), want)
        assert error < 2 * own + 1e-7


def test_registered() -> None:
    assert launcher("attn.sdpa", "triton.sdpa") is sdpa


MODULE = """ktgraph.ir 1
module @m home cpu
dim A = SIZE
sym C in 1..64
sym T in 1..8

func @f(%q: f32[T, 4, A], %c: kv(1 x f32[C, 2, A], 1 x f32[C, 2, A]), %b: batch) -> (f32[T, 4, A]) {
  %y = attn.sdpa %q, %c, %b {layer = 0, scale = 0.5} : f32[T, 4, A]
  return %y
}
"""


@pytest.mark.parametrize(("size", "taken"), [(256, True), (288, False)])
def test_takes_heads_of_256_at_most(size: int, taken: bool) -> None:
    module = parse_module(MODULE.replace("SIZE", str(size)))
    (op,) = (o for o in module.functions["f"].walk() if o.name == "attn.sdpa")
    (kernel,) = [k for k in kernels_for("attn.sdpa", "cuda") if k.name == "triton.sdpa"]
    answer = kernel.supports(op, module)
    assert bool(answer) is taken
    assert taken or "288" in str(answer)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize(("past", "new"), [DECODE, CHUNK, ([0], [1]), ([63], [1]), ([3], [65])])
def test_types_and_batches(
    device: torch.device, dtype: torch.dtype, past: list[int], new: list[int]
) -> None:
    check(device, past, new, dtype=dtype)


@pytest.mark.parametrize("sizes", [(24, 40), (64, 64), (96, 128), (80, 80)])
@pytest.mark.parametrize("shape", [DECODE, CHUNK])
def test_head_sizes(device: torch.device, sizes: tuple[int, int], shape: Any) -> None:
    check(device, *shape, size=sizes[0], width=sizes[1], dtype=BF16)


@pytest.mark.parametrize("heads", [(6, 2), (5, 5), (7, 1), (8, 1)])
@pytest.mark.parametrize("shape", [DECODE, CHUNK])
def test_groups(device: torch.device, heads: tuple[int, int], shape: Any) -> None:
    check(device, *shape, heads=heads[0], groups=heads[1])


@pytest.mark.parametrize("page", [4, 32, 48, 128])
@pytest.mark.parametrize("shape", [DECODE, CHUNK])
def test_page_sizes(device: torch.device, page: int, shape: Any) -> None:
    check(device, *shape, page=page, dtype=BF16)


@pytest.mark.parametrize("form", [sdpa_decode, sdpa_prefill])
def test_wide_offsets(device: torch.device, form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of 2^31 elements or more takes 64-bit offsets."""
    monkeypatch.setattr(form, "small", lambda *parts: False)
    check(device, [20, 41, 0], [2, 1, 3], form=form)


ATTRIBUTES = [
    {"window": 1},
    {"window": 7},
    {"window": 33},
    {"softcap": 1.5},
    {"sinks": True},
    {"window": 20, "softcap": 5.0, "sinks": True},
]


@pytest.mark.parametrize("attributes", ATTRIBUTES)
@pytest.mark.parametrize("shape", [([90, 3], [1, 1]), ([50, 0], [3, 20]), ([0], [70])])
def test_attributes(device: torch.device, attributes: dict[str, Any], shape: Any) -> None:
    check(device, *shape, **attributes)


@pytest.mark.parametrize("splits", [1, 2, 5, 9])
@pytest.mark.parametrize("attributes", [{}, ATTRIBUTES[1], ATTRIBUTES[-1]])
def test_splits(device: torch.device, splits: int, attributes: dict[str, Any]) -> None:
    """More splits than tiles too: the empty ones must not count."""
    check(device, [100, 0, 30], [1, 2, 1], form=sdpa_decode, splits=splits, **attributes)


@pytest.mark.parametrize("form", [sdpa_decode, sdpa_prefill])
def test_forms_take_the_same_batches(device: torch.device, form: Any) -> None:
    check(device, [20, 41, 0], [2, 1, 3], form=form)


@pytest.mark.parametrize("shape", [DECODE, CHUNK])
def test_bounds_need_not_be_tight(device: torch.device, shape: Any) -> None:
    check(device, *shape, slack=1)
    check(device, *shape, slack=100, dtype=BF16)


@pytest.mark.parametrize("block", [16, 32, 128])
def test_tile_sizes(device: torch.device, block: int) -> None:
    tile = sdpa_prefill.Config(block, 32, 4, 2)
    check(device, [0, 40, 9], [50, 3, 20], form=sdpa_prefill, override=tile, window=30)
    check(device, [0, 40, 9], [50, 3, 20], form=sdpa_prefill, override=tile, page=32)


@pytest.mark.parametrize("new", [[0, 3, 0, 1], [0, 20, 0, 0]])
def test_sequences_without_new_tokens(device: torch.device, new: list[int]) -> None:
    check(device, [5, 4, 8, 2], new)


def test_token_of_an_empty_sequence_gives_zero(device: torch.device) -> None:
    """Padding of a batch bucket: kv_len 0.  Nothing is read, and the result is not NaN."""
    ragged = Ragged.make([4, 3], [1, 1], device, page=16)
    q = ragged.randn(2, 4, 16).to(device)
    kv = ragged.moved(ragged.cache((2, 16), (2, 16), dtype=F32))
    batch = ragged.on_device()
    emptied = replace(batch, kv_len=torch.zeros_like(batch.kv_len))
    out = poisoned(2, 4, 16, dtype=F32, device=device)
    sdpa(q, kv, emptied, out=(out,), layer=LAYER, scale=1.0, window=0, softcap=0.0)
    assert torch.equal(out, torch.zeros_like(out))


def test_same_bits_every_time(device: torch.device) -> None:
    ragged = Ragged.make([200, 60], [1, 1], device, page=16)
    q = ragged.randn(2, 4, 16, dtype=BF16).to(device)
    kv = ragged.moved(ragged.cache((2, 16), (2, 16), dtype=BF16))
    results = []
    for _ in range(2):
        out = poisoned(2, 4, 16, dtype=BF16, device=device)
        sdpa(q, kv, ragged.on_device(), out=(out,), layer=LAYER, scale=1.0, window=0, softcap=0.0)
        results.append(out)
    assert torch.equal(*results)
