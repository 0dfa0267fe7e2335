"""Leaf ops: what the Hugging Face frontend traces in place of attention, experts, norms and rope.

Each op has a fake implementation (shapes, for export) and a plain torch one, so that an exported
graph can be run and compared with the model it came from.  They exist only between export and
import; the IR has its own ops (``ktgraph.ops``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ktgraph.ops import moe, nn

Cache = dict[int, tuple[Tensor, Tensor]]

_cache: ContextVar[Cache | None] = ContextVar("ktg_eager_cache", default=None)
_lib = torch.library.Library("ktg", "FRAGMENT")


@contextmanager
def eager_cache(store: Cache | None = None) -> Iterator[Cache]:
    """Storage that ``ktg::kv_append`` appends to while an exported graph runs eagerly."""
    store = {} if store is None else store
    token = _cache.set(store)
    try:
        yield store
    finally:
        _cache.reset(token)


def _define(schema: str, eager: Callable[..., object], fake: Callable[..., object]) -> None:
    name = schema.split("(", 1)[0]
    _lib.define(schema)
    _lib.impl(name, eager, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ktg::{name}", fake, lib=_lib)


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


# ---------------------------------------------------------------- cache and attention


def _kv_append(state: Tensor, k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    store = _cache.get()
    if store is None:
        raise RuntimeError("ktg::kv_append runs only inside leaf_ops.eager_cache()")
    if layer in store:
        past_k, past_v = store[layer]
        k, v = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
    store[layer] = (k, v)
    return state.clone(), k.clone(), v.clone()


def _kv_append_fake(
    state: Tensor, k: Tensor, v: Tensor, layer: int
) -> tuple[Tensor, Tensor, Tensor]:
    total = state.shape[1]
    return (
        torch.empty_like(state),
        k.new_empty(k.shape[0], k.shape[1], total, k.shape[3]),
        v.new_empty(v.shape[0], v.shape[1], total, v.shape[3]),
    )


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    layer: int,
) -> Tensor:
    """q ``[b, H, s, A]`` over k, v ``[b, G, t, A]``; the result is ``[b, s, H, V]``."""
    batch, heads, new, _ = q.shape
    k = k.repeat_interleave(heads // k.shape[1], 1).to(_compute_dtype(k))
    v = v.repeat_interleave(heads // v.shape[1], 1).to(_compute_dtype(v))
    scores = (q.to(k.dtype) @ k.transpose(-1, -2)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    rows = torch.arange(k.shape[2], device=q.device)[None, None, None]
    here = positions[:, None, :, None]
    seen = rows <= here if causal else torch.ones_like(scores, dtype=torch.bool)
    if window:
        seen = seen & (rows > here - window)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        extra = sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(batch, heads, new, 1)
        scores = torch.cat([scores, extra], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return (weights @ v).transpose(1, 2).contiguous().to(q.dtype)


def _attention_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    layer: int,
) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


# ---------------------------------------------------------------- mixture of experts

# Names of how gate and up combine (`ktgraph.ops.nn.gated`); `ktgraph.frontends.probes` finds out
# which one a model uses.
GATES = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "swiglu_clamped")
_ALPHA, _LIMIT = 1.702, 7.0  # of swiglu_clamped


def gated(gate: Tensor, up: Tensor, act: str) -> Tensor:
    """``act(gate) * up``, or gpt-oss's clamped form."""
    return nn.gated(gate, up, act, _ALPHA, _LIMIT)


def _experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    act: str,
    transposed: bool,
    interleaved: bool,
) -> Tensor:
    """Sum over the chosen experts of ``w * down(act(gate(x)) * up(x))``; x ``[n, D]``."""
    out = torch.zeros_like(x, dtype=_compute_dtype(x))
    for e in ids.unique().tolist():
        token, slot = torch.where(ids == e)
        h = x[token] @ (gate_up[e] if transposed else gate_up[e].t())
        if gate_up_bias is not None:
            h = h + gate_up_bias[e]
        gate, up = (h[..., ::2], h[..., 1::2]) if interleaved else h.chunk(2, -1)
        y = gated(gate, up, act) @ (down[e] if transposed else down[e].t())
        if down_bias is not None:
            y = y + down_bias[e]
        out.index_add_(0, token, (y * weights[token, slot, None].to(y.dtype)).to(out.dtype))
    return out.to(x.dtype)


def _experts_fake(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    act: str,
    transposed: bool,
    interleaved: bool,
) -> Tensor:
    return torch.empty_like(x)


def route(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    select_bias: Tensor | None,
    top_k: int,
    score: str,
    renorm: bool,
    scale: float,
    groups: int,
    topk_groups: int,
    group_score: str,
    mask: str,
) -> tuple[Tensor, Tensor]:
    """The op moe.route: ids i64 ``[n, top_k]`` and weights ``[n, top_k]`` of x ``[n, D]``.

    `bias` belongs to the linear; `select_bias` moves the choice only, never the weights.
    """
    ids, weights = moe.route(
        x,
        weight,
        select_bias,
        bias,
        top_k=top_k,
        score=score,
        renorm=renorm,
        scale=scale,
        groups=groups,
        topk_groups=topk_groups,
        group_score=group_score,
        mask=mask,
    )
    return ids.long(), weights


def _route_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    select_bias: Tensor | None,
    top_k: int,
    score: str,
    renorm: bool,
    scale: float,
    groups: int,
    topk_groups: int,
    group_score: str,
    mask: str,
) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], top_k)
    return x.new_empty(shape, dtype=torch.int64), x.new_empty(shape, dtype=_compute_dtype(x))


# ---------------------------------------------------------------- linear, norms and rope


def rms_norm(x: Tensor, weight: Tensor, eps: float, cast_first: bool) -> Tensor:
    """RMSNorm over the last axis; `cast_first` rounds to x's dtype before the weight multiply."""
    h = x.to(_compute_dtype(x))
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return weight * h.to(x.dtype) if cast_first else (weight * h).to(x.dtype)


def _rms_norm_fake(x: Tensor, weight: Tensor, eps: float, cast_first: bool) -> Tensor:
    return torch.empty_like(x)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def _linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def rope_tables(positions: Tensor, inv_freq: Tensor, scaling: float) -> Tensor:
    """Cosines and sines of ``positions * inv_freq``, times `scaling`: ``f32[b, s, 2, P/2]``."""
    dtype = _compute_dtype(inv_freq)
    angle = positions[..., None].to(dtype) * inv_freq.to(dtype)
    return torch.stack([angle.cos(), angle.sin()], -2) * scaling


def _rope_tables_fake(positions: Tensor, inv_freq: Tensor, scaling: float) -> Tensor:
    shape = (*positions.shape, 2, inv_freq.shape[0])
    return positions.new_empty(shape, dtype=torch.float32)


def rotate(x: Tensor, tables: Tensor, style: str) -> Tensor:
    """The op nn.rope's rotation of x ``[b, heads, s, A]`` by tables ``[b, s, 2, P/2]``."""
    cos, sin = (t.flatten(0, 1) for t in tables.to(_compute_dtype(x)).unbind(-2))
    by_token = x.transpose(1, 2)
    turned = nn.rotate(by_token.flatten(0, 1), cos, sin, style)
    return turned.reshape(by_token.shape).transpose(1, 2)


def _rope(q: Tensor, k: Tensor, tables: Tensor, style: str) -> tuple[Tensor, Tensor]:
    return rotate(q, tables, style), rotate(k, tables, style)


def _rope_fake(q: Tensor, k: Tensor, tables: Tensor, style: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k)


ROPE_STYLES = ("half", "interleaved", "interleaved_to_half")

_define(
    "kv_append(Tensor state, Tensor k, Tensor v, int layer) -> (Tensor, Tensor, Tensor)",
    _kv_append,
    _kv_append_fake,
)
_define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor positions, float scale, bool causal, "
    "int window, float softcap, Tensor? sinks, int layer) -> Tensor",
    _attention,
    _attention_fake,
)
_define(
    "experts(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor down, "
    "Tensor? gate_up_bias, Tensor? down_bias, str act, bool transposed, bool interleaved) "
    "-> Tensor",
    _experts,
    _experts_fake,
)
_define(
    "route(Tensor x, Tensor weight, Tensor? bias, Tensor? select_bias, int top_k, str score, "
    "bool renorm, float scale, int groups, int topk_groups, str group_score, str mask) "
    "-> (Tensor, Tensor)",
    route,
    _route_fake,
)
_define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", _linear, _linear_fake)
_define(
    "rms_norm(Tensor x, Tensor weight, float eps, bool cast_first) -> Tensor",
    rms_norm,
    _rms_norm_fake,
)
_define(
    "rope_tables(Tensor positions, Tensor inv_freq, float scaling) -> Tensor",
    rope_tables,
    _rope_tables_fake,
)
_define("rope(Tensor q, Tensor k, Tensor tables, str style) -> (Tensor, Tensor)", _rope, _rope_fake)
