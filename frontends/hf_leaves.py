"""Leaf ops put in place of a transformers model's own code, for the time of one trace.

Attention and experts go through transformers' registries under the name ``ktgraph``; norms and
routers are patched on the instance, rope functions in the module that defines the attention class.
Norms, routers, rope and gates are replaced only when a numeric probe says that the leaf computes
the same; whatever stays is listed in the report.  Everything is undone on leaving the context.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface
from transformers.modeling_utils import AttentionInterface
from transformers.utils.output_capturing import OutputRecorder

from ktgraph.frontends import probes
from ktgraph.frontends.errors import UnsupportedModelError
from ktgraph.frontends.router_probe import Router, probe_router

NAME = "ktgraph"
_lock = threading.RLock()
_MISSING = object()


@dataclass
class LeafReport:
    """What was replaced by which leaf, and what stayed plain ATen, and why."""

    replaced: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{path}: {leaf}" for path, leaf in self.replaced.items()]
        return "\n".join(lines + [f"{path}: kept, {why}" for path, why in self.kept.items()])


class _Patches:
    """Attribute assignments that can be undone, in reverse order."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, object]] = []

    def set(self, owner: Any, name: str, value: object) -> None:
        """Write straight into the namespace: nn.Module and config setters stay out of it."""
        space = owner.__dict__
        self._undo.append((space, name, space.get(name, _MISSING)))
        space[name] = value

    def restore(self) -> None:
        for space, name, old in reversed(self._undo):
            if old is _MISSING:
                space.pop(name, None)
            else:
                space[name] = old


@contextmanager
def leaf_ops_in(model: nn.Module, buffers: Mapping[str, Tensor]) -> Iterator[LeafReport]:
    """Patch `model` for tracing; `buffers` are real values of its non-persistent buffers.

    Raises UnsupportedModelError when rope cannot be expressed by the leaf.
    """
    with _patching(model) as (patches, report):
        _patch_norms(model, patches, report)
        _patch_rope(model, buffers, patches, report)
        _mark_experts(model, patches, report)
        yield report


@contextmanager
def moe_leaves_in(model: nn.Module) -> Iterator[LeafReport]:
    """Patch linears, routers and experts only, to trace MoE blocks by themselves."""
    with _patching(model) as (patches, report):
        _mark_experts(model, patches, report)
        yield report


@contextmanager
def _patching(model: nn.Module) -> Iterator[tuple[_Patches, LeafReport]]:
    with _lock:
        patches, report = _Patches(), LeafReport()
        try:
            _select_implementations(model, patches)
            _patch_linears(model, patches)
            _patch_routers(model, patches, report)
            yield patches, report
        finally:
            patches.restore()


# ---------------------------------------------------------------- attention and experts


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_ids: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface in terms of the leaf."""
    if attention_mask is not None or position_ids is None:
        why = "an explicit mask" if attention_mask is not None else "no position_ids"
        raise UnsupportedModelError(
            f"{type(module).__name__} hands {why} to its attention function; ktgraph builds the "
            "causal mask from position_ids itself"
        )
    scale = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
    causal = bool(getattr(module, "is_causal", True))
    window, cap = int(sliding_window or 0), float(softcap or 0.0)
    layer = int(getattr(module, "layer_idx", 0))
    out = torch.ops.ktg.attention(
        query, key, value, position_ids, scale, causal, window, cap, s_aux, layer
    )
    return out, None


def _experts(module: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """transformers' experts interface in terms of the leaf."""
    bias = (module.gate_up_proj_bias, module.down_proj_bias) if module.has_bias else (None, None)
    return torch.ops.ktg.experts(
        hidden, ids, weights, module.gate_up_proj, module.down_proj, *bias,
        module._ktg_gate, module.is_transposed, not module.is_concatenated,
    )  # fmt: skip


def _unknown_gate(module: Any) -> str:
    known = ", ".join(probes.leaf_ops.GATES)
    return (
        f"{type(module).__name__} combines gate and up projections in a way that is none of "
        f"{known}. Add it to `gated` in ktgraph/ops/nn.py, and its name to GATES in "
        "ktgraph/frontends/leaf_ops.py"
    )


AttentionInterface.register(NAME, _attention)
ExpertsInterface.register(NAME, _experts)


def _select_implementations(model: nn.Module, patches: _Patches) -> None:
    """Name our implementations in every config of the model, sub-configs included."""
    seen: set[int] = set()
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is None or id(config) in seen:
            continue
        seen.add(id(config))
        for key in ("_attn_implementation_internal", "_experts_implementation_internal"):
            patches.set(config, key, NAME)


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds a layer's routed experts behind transformers' ExpertsInterface."""
    return hasattr(module, "is_transposed") and hasattr(module, "_apply_gate")


def _mark_experts(model: nn.Module, patches: _Patches, report: LeafReport) -> None:
    """Note the probed gate on every experts module, for `_experts` to read."""
    for path, module in model.named_modules():
        if not is_experts(module):
            continue
        gate = probes.probe_gate(module)
        if gate is None or getattr(module, "has_post_expert_norm", False):
            raise UnsupportedModelError(f"{path}: {_unknown_gate(module)}")
        patches.set(module, "_ktg_gate", gate)
        report.replaced[path] = f"experts ({gate})"


# ---------------------------------------------------------------- norms and routers


def _cached(probe: Callable[..., Any]) -> Callable[..., Any]:
    """Probe modules of one class with equal scalars and shapes once."""
    known: dict[object, Any] = {}

    def look_up(module: nn.Module) -> Any:
        scalars = {k: v for k, v in vars(module).items() if isinstance(v, (int, float, str, bool))}
        shapes = {k: None if p is None else tuple(p.shape) for k, p in module._parameters.items()}
        key = (type(module), repr(sorted(scalars.items())), repr(shapes))
        if key not in known:
            known[key] = probe(module)
        return known[key]

    return look_up


def _patch_linears(model: nn.Module, patches: _Patches) -> None:
    """The same op either way, but a leaf's shape rule is a quarter of the whole trace faster."""
    for module in model.modules():
        if type(module) is nn.Linear:
            patches.set(module, "forward", _linear_forward(module))


def _linear_forward(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    def forward(input: Tensor) -> Tensor:
        return torch.ops.ktg.linear(input, module.weight, module.bias)

    return forward


def _patch_norms(model: nn.Module, patches: _Patches, report: LeafReport) -> None:
    probe = _cached(probes.probe_norm)
    for path, module in model.named_modules():
        if not re.search(r"RMSNorm$|^RMSNorm", type(module).__name__):
            continue
        norm = probe(module)
        if norm is None:
            report.kept[path] = f"{type(module).__name__} is not x * rsqrt(mean(x^2) + eps) * w"
            continue
        patches.set(module, "forward", _norm_forward(module, norm))
        report.replaced[path] = "rms_norm"


def _norm_forward(module: nn.Module, norm: probes.Norm) -> Callable[[Tensor], Tensor]:
    def forward(hidden_states: Tensor) -> Tensor:
        return torch.ops.ktg.rms_norm(hidden_states, module.weight, norm.eps, norm.cast_first)

    return forward


def _patch_routers(model: nn.Module, patches: _Patches, report: LeafReport) -> None:
    probe = _cached(probe_router)
    classes = _router_classes(model)
    for path, module in model.named_modules():
        if not isinstance(module, classes) and not re.search(
            r"(Router|Gate)$", type(module).__name__
        ):
            continue
        router = probe(module)
        if router is None:
            report.kept[path] = f"{type(module).__name__} fits no known routing formula"
            continue
        patches.set(module, "forward", _router_forward(module, router))
        report.replaced[path] = f"route ({router.score})"


def _router_classes(model: nn.Module) -> tuple[type, ...]:
    """Classes that the model itself records as routers."""
    found: list[type] = []
    for module in model.modules():
        records = getattr(module, "_can_record_outputs", None) or {}
        entry = records.get("router_logits")
        entry = entry.target_class if isinstance(entry, OutputRecorder) else entry
        if isinstance(entry, type):
            found.append(entry)
    return tuple(set(found))


def _router_forward(module: Any, router: Router) -> Callable[[Tensor], tuple[Tensor, ...]]:
    formula = tuple(router.formula().values())

    def forward(hidden_states: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        gate, bias, select = router.parts.of(module, given)
        assert gate is not None
        x = hidden_states.reshape(-1, gate.shape[1])
        ids, weights = torch.ops.ktg.route(x, gate, bias, select, *formula)
        made = {"ids": ids, "weights": weights}
        if "logits" in router.outputs:  # as a rule nobody reads them; then import drops them
            made["logits"] = torch.ops.ktg.linear(x, gate, bias)
        return tuple(made[name] for name in router.outputs)

    return forward


# ---------------------------------------------------------------- rope


def _patch_rope(
    model: nn.Module, buffers: Mapping[str, Tensor], patches: _Patches, report: LeafReport
) -> None:
    """Replace rotary modules and the functions that apply their tables, both or neither."""
    rotaries = [(p, m) for p, m in model.named_modules() if _is_rotary(m)]
    if not rotaries:
        return
    probed = [(path, m, _probe_rotary(path, m, buffers)) for path, m in rotaries]
    layouts = {rotary.layout for _, _, rotary, _ in (_flat(p) for p in probed)}
    if len(layouts) > 1:
        raise UnsupportedModelError(f"rotary modules of several layouts: {sorted(layouts)}")
    path, _, rotary, width = _flat(probed[0])
    styles = _patch_apply(model, rotary, width, patches)
    if not styles:
        raise UnsupportedModelError(
            f"{path}: no function apply_rotary_* beside the attention classes of "
            f"{type(model).__name__} rotates pairs in a known way ({', '.join(_STYLES)})"
        )
    for path, module, rotary, _ in map(_flat, probed):
        forward = _rotary_forward(module, rotary)
        patches.set(module, "forward", forward)
        report.replaced[path] = "rope_tables"
    report.replaced.update({name: f"rope ({style})" for name, style in styles.items()})


_STYLES = probes.leaf_ops.ROPE_STYLES
_Probed = tuple[str, nn.Module, tuple[probes.Rotary, int]]


def _flat(probed: _Probed) -> tuple[str, nn.Module, probes.Rotary, int]:
    path, module, (rotary, width) = probed
    return path, module, rotary, width


def _is_rotary(module: nn.Module) -> bool:
    return "Rotary" in type(module).__name__ and "inv_freq" in module._buffers


def _probe_rotary(
    path: str, module: nn.Module, buffers: Mapping[str, Tensor]
) -> tuple[probes.Rotary, int]:
    own = {n: buffers[f"{path}.{n}"] for n in module._buffers if f"{path}.{n}" in buffers}
    rotary = probes.probe_rotary(module, own)
    if rotary is not None:
        return rotary, own["inv_freq"].shape[0]
    kind = getattr(module, "rope_type", "unknown")
    raise UnsupportedModelError(
        f"{path} ({type(module).__name__}): rope type {kind!r} is not supported, its tables are "
        "not cos and sin of position * inv_freq. Supported: default, linear, yarn, llama3; for "
        "a context within the trained length set rope_parameters to one of these"
    )


def _rotary_forward(module: Any, rotary: probes.Rotary) -> Callable[..., Any]:
    def forward(x: Tensor, position_ids: Tensor) -> Any:
        tables = torch.ops.ktg.rope_tables(position_ids, module.inv_freq, rotary.scaling)
        # the patched apply functions take both in one; models unpack the pair in between
        return tables if rotary.layout == "complex" else (tables, tables)

    return forward


def _patch_apply(
    model: nn.Module, rotary: probes.Rotary, width: int, patches: _Patches
) -> dict[str, str]:
    """Patch every ``apply_rotary*`` function that sits beside an attention class."""
    styles: dict[str, str] = {}
    for space in _attention_namespaces(model):
        for name in [n for n in vars(space) if n.startswith("apply_rotary")]:
            original = getattr(getattr(space, name), "_ktg_original", getattr(space, name))
            style = probes.probe_rope(original, rotary, width, 2 * width)
            if style is None:
                continue
            wider = probes.probe_rope(original, rotary, width, 2 * width + 6)
            apply = _apply_forward(name, style, sys.maxsize if wider == style else 2 * width)
            vars(apply)["_ktg_original"] = original  # for a patch inside this patch
            patches.set(space, name, apply)
            styles[f"{space.__name__}.{name}"] = style
    return styles


def _attention_namespaces(model: nn.Module) -> list[Any]:
    classes = [type(m) for m in model.modules() if type(m).__name__.endswith("Attention")]
    bases = [base for cls in classes for base in cls.__mro__]
    names = {base.__module__ for base in bases if base.__name__.endswith("Attention")}
    return [sys.modules[name] for name in sorted(names)]


def _apply_forward(name: str, style: str, most: int) -> Callable[..., tuple[Tensor, Tensor]]:
    """`most` is the widest head that the original rotates as the leaf does."""

    def apply(
        q: Tensor, k: Tensor, tables: Tensor, *args: Any, unsqueeze_dim: int = 1, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if unsqueeze_dim != 1 or max(int(q.shape[-1]), int(k.shape[-1])) > most:
            raise UnsupportedModelError(
                f"{name} is called on heads of {q.shape[-1]} (heads on axis {unsqueeze_dim}), "
                f"where it does not rotate the first features in style {style!r} and pass the rest"
            )
        return torch.ops.ktg.rope(q, k, tables, style)

    return apply
