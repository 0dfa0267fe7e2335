"""Numeric probe of routers: which variant of `leaf_ops.route` a module computes, as in `probes`."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from ktgraph.frontends import leaf_ops
from ktgraph.frontends.probes import EXACT, cpu_copy, randn, relative_error, seeded


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
    twin, rng = cpu_copy(module), seeded()
    weight = _at(twin, parts.gate)
    experts, width = weight.shape
    weight.mul_(width**-0.5)
    # below -1: all scores that choose are below zero, which tells masks of 0 and of -inf apart
    bias = -1.0 - 2.0 * randn(rng, experts).abs()
    given = (bias,) if parts.select_bias == GIVEN else ()
    if parts.select_bias not in (None, GIVEN):
        at = _at(twin, parts.select_bias)
        at.copy_(bias.view(at.shape))
    inputs = [randn(rng, 40, width) * s for s in (0.5, 1.0, 3.0)]
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
    except Exception:  # the module is anyone's: whatever it raises, this guess is wrong
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
        if relative_error(got * scale, want) > EXACT:
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


__all__ = ["Router", "RouterParts", "probe_router", "route_with"]
