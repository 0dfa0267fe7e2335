"""Numeric probes: does a model's module compute what a leaf op computes?

A module is never replaced by its name alone.  A shallow CPU copy of it, filled with random numbers,
runs beside the leaf's formula; parameters of the formula (rope pairing, activation, router scoring)
are those for which the difference vanishes.  The model itself, which may be on the meta device, is
not touched.  Every probe returns None when nothing fits.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
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
    rng, twin = _rng(_WEIGHTS), copy.copy(module)
    twin.__dict__.pop("forward", None)  # an instance patch would lead back to the leaf op
    twin._parameters = {
        name: None if p is None else nn.Parameter(_randn(rng, *p.shape), requires_grad=False)
        for name, p in module._parameters.items()
    }
    twin._buffers = {
        name: None if b is None else _randn(rng, *b.shape) * 0.1
        for name, b in module._buffers.items()
    }
    twin._buffers.update(buffers or {})
    twin._modules = {n: None if c is None else cpu_copy(c) for n, c in module._modules.items()}
    return twin


def _rng(seed: int = _INPUTS) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


def _randn(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=rng, device="cpu")


def _error(got: Tensor, want: Tensor) -> float:
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
    twin, rng = cpu_copy(module), _rng()
    inputs = [_randn(rng, 3, weight.shape[0]) * s for s in (1e-3, 1.0, 50.0)]
    if max(_error(twin(x), leaf_ops.rms_norm(x, _weight(twin), eps, True)) for x in inputs) > EXACT:
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
        first: _error(leaf_ops.rms_norm(x, _weight(half), eps, first), half(x))
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
        if _error(torch.stack([cos, sin]), tables) < EXACT:
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
    rng = _rng()
    q, k = _randn(rng, 2, 3, 5, head), _randn(rng, 2, 1, 5, head)
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
        if max(_error(g, w) for g, w in zip(got, want, strict=True)) < EXACT:
            return style
    return None


# ---------------------------------------------------------------- experts


@torch.no_grad()
def probe_gate(module: Any) -> str | None:
    """The activation and gating of an experts module, as a name in `leaf_ops.GATES`."""
    if not getattr(module, "has_gate", True) or not hasattr(module, "_apply_gate"):
        return None
    rng = _rng()
    inputs = [_randn(rng, 7, 12) * s for s in (0.3, 3.0, 20.0)]
    for name in leaf_ops.GATES:
        errors = [
            _error(module._apply_gate(z), leaf_ops.gated(*_halves(z, module), name)) for z in inputs
        ]
        if max(errors) < EXACT:
            return name
    return None


def _halves(z: Tensor, module: Any) -> tuple[Tensor, Tensor]:
    if getattr(module, "is_concatenated", True):
        gate, up = z.chunk(2, -1)
        return gate, up
    return z[..., ::2], z[..., 1::2]


# ---------------------------------------------------------------- routers


@dataclass(frozen=True)
class RouterParts:
    """Paths, below a router module, of what `leaf_ops.route` takes; None: there is none.

    GIVEN as the selection bias: the block that calls the router hands it over.
    """

    gate: str
    bias: str | None
    select_bias: str | None

    def of(self, module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        """Gate, bias and selection bias of a module that is called with `given`."""
        paths = (self.gate, self.bias, None if self.select_bias == GIVEN else self.select_bias)
        gate, bias, select = (None if p is None else _at(module, p) for p in paths)
        select = given[0] if self.select_bias == GIVEN else select
        return gate, bias, select


GIVEN = "the second argument"


def _at(module: nn.Module, path: str) -> Tensor:
    owner, _, name = path.rpartition(".")
    return getattr(module.get_submodule(owner), name)


@dataclass(frozen=True)
class Router:
    """Parameters of `leaf_ops.route`, and where the module's outputs lie in its tuple."""

    top_k: int
    score: str
    renorm: bool
    scale: float
    groups: int
    topk_groups: int
    group_score: str
    mask: str  # what other groups' scores become: zero or neg_inf
    outputs: tuple[str, ...]  # of "logits", "weights", "ids"
    parts: RouterParts

    def formula(self) -> dict[str, Any]:
        """Arguments of `leaf_ops.route` behind its tensors."""
        return {k: getattr(self, k) for k in (f.name for f in fields(self)) if k not in _NO_FORMULA}


_NO_FORMULA = ("outputs", "parts")


@torch.no_grad()
def probe_router(module: nn.Module) -> Router | None:
    """One formula explains every known router; try its variants on several inputs and scales."""
    parts = _router_parts(module)
    if parts is None:
        return None
    twin, rng = cpu_copy(module), _rng()
    weight = _at(twin, parts.gate)
    experts, width = weight.shape
    weight.mul_(width**-0.5)
    # below -1: all scores that choose are below zero, which tells masks of 0 and of -inf apart
    bias = -1.0 - 2.0 * _randn(rng, experts).abs()
    given = (bias,) if parts.select_bias == GIVEN else ()
    if parts.select_bias not in (None, GIVEN):
        at = _at(twin, parts.select_bias)
        at.copy_(bias.view(at.shape))
    inputs = [_randn(rng, 40, width) * s for s in (0.5, 1.0, 3.0)]
    found = _called(twin, inputs, given) or _called(twin, [x[None] for x in inputs], given)
    outputs = _router_outputs(found[0], experts) if found else None
    if outputs is None:
        return None
    ids, weights = outputs.index("ids"), outputs.index("weights")
    real = [(out[ids], out[weights]) for out in found]
    for variant in _router_variants(module, real[0][0].shape[-1], outputs, parts):
        scale = _router_scale(twin, inputs, given, real, variant)
        if scale is not None:
            return variant(scale)
    return None


def _called(router: nn.Module, inputs: list[Tensor], given: tuple[Tensor, ...]) -> list[Any]:
    """What it returns for each input; nothing when it wants other hidden states."""
    try:
        return [router(x, *given) for x in inputs]
    except Exception:
        return []


def _router_parts(module: nn.Module) -> RouterParts | None:
    """The matrix, and the vectors of one number an expert: beside the matrix it is the bias."""
    matrices = {n: p for n, p in module.named_parameters() if p.ndim == 2 and p.shape[0] > 1}
    if len(matrices) != 1:
        return None
    ((gate, weight),) = matrices.items()
    beside = f"{gate.rpartition('.')[0]}.bias".lstrip(".")
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    vectors = [n for n, t in tensors.items() if t.numel() == weight.shape[0] and n != gate]
    others = [n for n in vectors if n != beside]
    if len(others) > 1:
        return None
    named = inspect.signature(type(module).forward).parameters
    wanted = [p for p in list(named.values())[2:] if p.default is p.empty and p.kind in _POSITIONAL]
    select = others[0] if others else GIVEN if len(wanted) == 1 else None
    return RouterParts(gate, beside if beside in vectors else None, select)


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _router_outputs(out: object, experts: int) -> tuple[str, ...] | None:
    """Name the outputs by dtype and width: ids are integers, logits have one column an expert."""
    if not isinstance(out, tuple) or not all(isinstance(t, Tensor) for t in out):
        return None
    ids = [t for t in out if not t.is_floating_point()]
    if len(ids) != 1 or not 2 <= len(out) <= 3:
        return None
    width = ids[0].shape[-1]
    names = []
    for position, t in enumerate(out):
        first_wide = t.shape[-1] == experts and (width != experts or position == 0)
        names.append("ids" if t is ids[0] else "logits" if first_wide else "weights")
    return tuple(names) if sorted(names) in (_WITH_LOGITS, _BARE) else None


_WITH_LOGITS, _BARE = ["ids", "logits", "weights"], ["ids", "weights"]


def _router_variants(
    module: nn.Module, top_k: int, outputs: tuple[str, ...], parts: RouterParts
) -> Iterator[Callable[[float], Router]]:
    """Formulas without their scale, the simplest first."""
    groups = _int_attr(module, "num_group", "n_group")
    kept = _int_attr(module, "topk_group")
    grouping = [(1, 1, "max", "zero")]
    if groups > 1:
        modes = itertools.product(("max", "top2sum"), ("zero", "neg_inf"))
        grouping += [(groups, kept, by, mask) for by, mask in modes]
    scores = ("softmax", "sigmoid", "softmax_after_topk")
    for (g, kg, by, mask), score, renorm in itertools.product(grouping, scores, (False, True)):
        if score == "softmax_after_topk" and (renorm or g > 1):
            continue

        yield functools.partial(_router, top_k, score, renorm, g, kg, by, mask, outputs, parts)


def _router(
    top_k: int,
    score: str,
    renorm: bool,
    groups: int,
    kept: int,
    by: str,
    mask: str,
    outputs: tuple[str, ...],
    parts: RouterParts,
    scale: float,
) -> Router:
    return Router(top_k, score, renorm, scale, groups, kept, by, mask, outputs, parts)


def _int_attr(module: nn.Module, *names: str) -> int:
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, int):
            return value
    return 1


def _router_scale(
    twin: nn.Module,
    inputs: list[Tensor],
    given: tuple[Tensor, ...],
    real: list[tuple[Tensor, Tensor]],
    variant: Callable[[float], Router],
) -> float | None:
    """The constant between the variant's weights and the real ones, None when there is none."""
    plain = variant(1.0)
    experts, scales = _at(twin, plain.parts.gate).shape[0], []
    for x, (ids, weights) in zip(inputs, real, strict=True):
        mine = route_with(twin, x, plain, given)
        got, want = _dense(*mine, experts), _dense(ids, weights, experts)
        scale = float((got * want).sum() / (got * got).sum().clamp_min(1e-30))
        if _error(got * scale, want) > EXACT:
            return None
        scales.append(scale)
    scale = scales[0]
    known = [1.0, *(v for v in vars(twin).values() if isinstance(v, (int, float)))]
    near = [float(s) for s in known if abs(float(s) - scale) < 1e-4 * abs(scale)]
    return near[0] if near and max(scales) - min(scales) < 1e-4 * abs(scale) else None


def _dense(ids: Tensor, weights: Tensor, experts: int) -> Tensor:
    return torch.zeros(ids.shape[0], experts).scatter(1, ids.long(), weights.float())


def route_with(
    module: nn.Module, x: Tensor, router: Router, given: tuple[Tensor, ...] = ()
) -> tuple[Tensor, Tensor]:
    """`leaf_ops.route` with the weights of a router module."""
    gate, bias, select = router.parts.of(module, given)
    assert gate is not None
    return leaf_ops.route(x, gate, bias, select, **router.formula())
