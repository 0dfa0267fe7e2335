"""Numeric probes: does a model's module compute what a leaf op computes?

A module is never replaced by its name alone.  A shallow CPU copy of it, filled with random numbers,
runs beside the leaf's formula; parameters of the formula (rope pairing, activation, router scoring)
are those for which the difference vanishes.  The model itself, which may be on the meta device, is
not touched.  Every probe returns None when nothing fits.  Routers: `router_probe`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ktgraph.frontends import leaf_ops

_WEIGHTS, _INPUTS = 20240505, 3  # seeds; inputs must not repeat the numbers of the weights
EXACT = 2e-6  # largest relative error of a formula that is the same in float32


def cpu_copy(module: nn.Module, buffers: Mapping[str, Tensor] | None = None) -> nn.Module:
    """A copy with random float32 parameters and buffers, children included.

    `buffers` gives real values of the module's own.
    """
    rng, twin = seeded(_WEIGHTS), copy.copy(module)
    twin.__dict__.pop("forward", None)  # an instance patch would lead back to the leaf op
    twin._parameters = {
        name: None if p is None else nn.Parameter(randn(rng, *p.shape), requires_grad=False)
        for name, p in module._parameters.items()
    }
    twin._buffers = {
        name: None if b is None else randn(rng, *b.shape) * 0.1
        for name, b in module._buffers.items()
    }
    twin._buffers.update(buffers or {})
    twin._modules = {n: None if c is None else cpu_copy(c) for n, c in module._modules.items()}
    return twin


def seeded(seed: int = _INPUTS) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


def randn(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=rng, device="cpu")


def relative_error(got: Tensor, want: Tensor) -> float:
    """Largest difference relative to the largest value; infinite on a shape mismatch."""
    if got.shape != want.shape:
        return float("inf")
    scale = max(float(want.abs().max()), 1e-30)
    return float((got.float() - want.float()).abs().max()) / scale


# ---------------------------------------------------------------- norms


@dataclass(frozen=True)
class Norm:
    eps: float
    cast_first: bool


@torch.no_grad()
def probe_norm(module: nn.Module) -> Norm | None:
    """RMSNorm over the last axis with one weight and one of the two rounding orders."""
    weight = module._parameters.get("weight")
    eps = next((getattr(module, n) for n in _EPS_NAMES if hasattr(module, n)), None)
    if weight is None or weight.ndim != 1 or not isinstance(eps, float):
        return None
    twin, rng = cpu_copy(module), seeded()
    inputs = [randn(rng, 3, weight.shape[0]) * s for s in (1e-3, 1.0, 50.0)]
    if (
        max(relative_error(twin(x), leaf_ops.rms_norm(x, _weight(twin), eps, True)) for x in inputs)
        > EXACT
    ):
        return None
    return Norm(float(eps), _casts_first(twin, inputs[1], eps))


_EPS_NAMES = ("variance_epsilon", "eps", "epsilon")


def _weight(module: nn.Module) -> Tensor:
    weight = module._parameters["weight"]
    assert weight is not None
    return weight


def _casts_first(twin: nn.Module, x: Tensor, eps: float) -> bool:
    """Which rounding order the module uses, seen in bfloat16."""
    half = copy.copy(twin)
    half._parameters = {"weight": nn.Parameter(_weight(twin).bfloat16(), requires_grad=False)}
    x = x.bfloat16()
    errors = {
        first: relative_error(leaf_ops.rms_norm(x, _weight(half), eps, first), half(x))
        for first in (True, False)
    }
    return errors[True] <= errors[False]


# ---------------------------------------------------------------- rope


@dataclass(frozen=True)
class Rotary:
    """What a rotary module returns: the layout of its tables, and the factor on them."""

    layout: str  # full: cat(f, f) | half: f | pairs: each f twice | complex
    scaling: float


@torch.no_grad()
def probe_rotary(module: nn.Module, buffers: Mapping[str, Tensor]) -> Rotary | None:
    """cos and sin of ``position * inv_freq`` times a constant, at small and large positions."""
    inv_freq = buffers.get("inv_freq")
    if inv_freq is None:
        return None
    twin, n = cpu_copy(module, buffers), inv_freq.shape[0]
    scaling = float(getattr(module, "attention_scaling", 1.0))
    far = 4 * int(getattr(module, "max_seq_len_cached", 4096))
    positions = torch.tensor([[0, 1, 2, 7, 63, 511], [far, far + 1, far + 5, 3, 2, 1]])
    layouts = set()
    for some in (positions[:1], positions):
        got = _tables(twin(torch.zeros(1, 1, 1), some))
        want = leaf_ops.rope_tables(some, inv_freq, scaling)
        layouts.add(None if got is None else _layout(*got, want, n))
    layout = layouts.pop()
    return None if layout is None or layouts else Rotary(layout, scaling)


def _tables(out: object) -> tuple[Tensor, Tensor, bool] | None:
    if isinstance(out, Tensor) and out.is_complex():
        return out.real, out.imag, True
    if isinstance(out, tuple) and len(out) == 2 and all(isinstance(t, Tensor) for t in out):
        return out[0], out[1], False
    return None


def _layout(cos: Tensor, sin: Tensor, is_complex: bool, want: Tensor, n: int) -> str | None:
    spread: dict[str, Callable[[Tensor], Tensor]] = {
        "full": lambda f: torch.cat([f, f], -1),
        "pairs": lambda f: f.repeat_interleave(2, -1),
        "half": lambda f: f,
    }
    for name, of in spread.items():
        tables = torch.stack([of(want[..., 0, :]), of(want[..., 1, :])])
        if relative_error(torch.stack([cos, sin]), tables) < EXACT:
            return "complex" if is_complex and name == "half" else name
    return None


def spread_tables(tables: Tensor, layout: str) -> tuple[Tensor, ...]:
    """Leaf tables ``[b, s, 2, n]`` as the model's own rotary module would return them."""
    cos, sin = tables[..., 0, :], tables[..., 1, :]
    if layout == "complex":
        return (torch.complex(cos, sin),)
    if layout == "full":
        return torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    if layout == "pairs":
        return cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
    return cos, sin


@torch.no_grad()
def probe_rope(apply: Callable[..., Any], rotary: Rotary, n: int, head: int) -> str | None:
    """The pairing that ``apply(q, k, *tables)`` uses; `head` may exceed the ``2 * n`` rotated."""
    rng = seeded()
    q, k = randn(rng, 2, 3, 5, head), randn(rng, 2, 1, 5, head)
    positions = torch.tensor([[0, 1, 2, 3, 40], [5, 9, 17, 33, 65]])
    inv_freq = torch.rand(n, generator=rng, device="cpu")
    tables = leaf_ops.rope_tables(positions, inv_freq, rotary.scaling)
    try:
        got = apply(q, k, *spread_tables(tables, rotary.layout))
    except Exception:
        return None
    if not isinstance(got, tuple) or len(got) != 2:
        return None
    for style in leaf_ops.ROPE_STYLES:
        want = [leaf_ops.rotate(x, tables, style) for x in (q, k)]
        if max(relative_error(g, w) for g, w in zip(got, want, strict=True)) < EXACT:
            return style
    return None


# ---------------------------------------------------------------- experts


@torch.no_grad()
def probe_gate(module: Any) -> str | None:
    """The activation and gating of an experts module, as a name in `leaf_ops.GATES`."""
    if not getattr(module, "has_gate", True) or not hasattr(module, "_apply_gate"):
        return None
    rng = seeded()
    inputs = [randn(rng, 7, 12) * s for s in (0.3, 3.0, 20.0)]
    for name in leaf_ops.GATES:
        errors = [
            relative_error(module._apply_gate(z), leaf_ops.gated(*_halves(z, module), name))
            for z in inputs
        ]
        if max(errors) < EXACT:
            return name
    return None


def _halves(z: Tensor, module: Any) -> tuple[Tensor, Tensor]:
    if getattr(module, "is_concatenated", True):
        gate, up = z.chunk(2, -1)
        return gate, up
    return z[..., ::2], z[..., 1::2]
