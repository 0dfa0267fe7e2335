"""moe.*: routing and routed experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ktgraph.ops.nn import gated
from ktgraph.ops.registry import case, op


def _scores(logits: torch.Tensor, score: str) -> torch.Tensor:
    if score == "softmax":
        return logits.softmax(-1)
    if score == "sigmoid":
        return logits.sigmoid()
    if score == "softmax_after_topk":
        return logits
    raise ValueError(f"unknown score {score!r} (softmax, sigmoid, softmax_after_topk)")


def _mask_groups(
    choice: torch.Tensor, groups: int, topk_groups: int, group_score: str, mask: str
) -> torch.Tensor:
    if group_score not in ("max", "top2sum") or mask not in ("zero", "neg_inf"):
        raise ValueError(
            f"group_score {group_score!r}, mask {mask!r}: expected max or top2sum, zero or neg_inf"
        )
    tokens, experts = choice.shape
    grouped = choice.reshape(tokens, groups, experts // groups)
    rank = grouped.amax(-1) if group_score == "max" else grouped.topk(2, dim=-1).values.sum(-1)
    kept = torch.zeros_like(rank, dtype=torch.bool)
    kept.scatter_(1, rank.topk(topk_groups, dim=-1).indices, True)
    keep = kept[:, :, None].expand(-1, -1, experts // groups).reshape(tokens, experts)
    return choice.masked_fill(~keep, 0.0 if mask == "zero" else float("-inf"))


@op(
    "moe.route(x: f[..., D], gate: f[E, D], select_bias: f[E]?, bias: f[E]?; top_k: int,"
    ' score: str = "softmax", renorm: bool = false, scale: float = 1.0, groups: int = 1,'
    ' topk_groups: int = 1, group_score: str = "max", mask: str = "zero")'
    " -> (i32[..., top_k], f32[..., top_k])",
    flops=lambda d: 2.0 * d.tokens * d.E * d.D,
    launches=2,
    cases=[case(T=1, D=48, E=8, top_k=2), case(T=17, D=64, E=16, top_k=4)],
)
def route(
    x: torch.Tensor,
    gate: torch.Tensor,
    select_bias: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    top_k: int,
    score: str,
    renorm: bool,
    scale: float,
    groups: int,
    topk_groups: int,
    group_score: str,
    mask: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose top_k experts per token: ids by descending choice score (lower id first), and weights.

    Logits in float32.  `bias` is added to the logits, `select_bias` to the scores for the choice
    only (DeepSeek-V3).  groups > 1: only the topk_groups best groups take part, ranked by their
    best score or the sum of their best two; others are masked to 0 or -inf.  renorm: weights sum to
    1 (plus 1e-20, as the models do); then times `scale`.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    flat = x.reshape(-1, x.shape[-1]).to(wide)
    logits = F.linear(flat, gate.to(wide), None if bias is None else bias.to(wide))
    scores = _scores(logits, score)
    choice = scores if select_bias is None else scores + select_bias.to(wide)
    if groups > 1:
        choice = _mask_groups(choice, groups, topk_groups, group_score, mask)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, ids)
    if score == "softmax_after_topk":
        weights = weights.softmax(-1)
    if renorm:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    shape = (*x.shape[:-1], top_k)
    return ids.to(torch.int32).reshape(shape), (weights * scale).reshape(shape)


@op(
    "moe.by_weight(ids: i32[..., K], weights: f32[..., K]) -> (i32[..., K], f32[..., K])",
    flops=lambda d: 1.0 * d.tokens * d.K * d.K,
    cases=[case(T=1, E=8, K=6), case(T=17, E=8, K=3)],
)
def by_weight(ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same choice of experts by descending weight; equal weights keep their order."""
    order = weights.sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(-1, order), weights.gather(-1, order)


def _run_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    b13: torch.Tensor | None,
    b2: torch.Tensor | None,
    act: str,
    alpha: float,
    limit: float,
) -> torch.Tensor:
    flat = x.reshape(-1, x.shape[-1])
    ids, weights = ids.reshape(len(flat), -1), weights.reshape(len(flat), -1)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    slots = torch.zeros(*ids.shape, flat.shape[1], dtype=wide, device=flat.device)
    for expert in sorted({int(e) for e in ids.flatten()} - {-1}):
        token, position = torch.where(ids == expert)
        both = F.linear(flat[token], w13[expert].to(x.dtype), None if b13 is None else b13[expert])
        gate, up = torch.chunk(both, 2, dim=-1)
        hidden = gated(gate, up, act, alpha, limit)
        out = F.linear(hidden, w2[expert].to(x.dtype), None if b2 is None else b2[expert])
        slots[token, position] = out.to(wide) * weights[token, position, None].to(wide)
    return slots.sum(1).to(x.dtype).reshape(x.shape)


@op(
    "moe.experts(x: f[..., D], ids: i32[..., K], weights: f32[..., K], gate_up: f[E, W, D],"
    " down: f[E, D, F], gate_up_bias: f[E, W]?, down_bias: f[E, D]?;"
    ' act: str = "silu", transposed: bool = false, interleaved: bool = false,'
    " alpha: float = 1.702, limit: float = 7.0) -> f[..., D]",
    flops=lambda d: 6.0 * d.tokens * d.K * d.D * d.F,
    cases=[case(T=1, D=48, E=5, K=2, F=33, W=66), case(T=17, D=64, E=8, K=3, F=40, W=80)],
)
def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    act: str,
    transposed: bool,
    interleaved: bool,
    alpha: float,
    limit: float,
) -> torch.Tensor:
    """A framework's own experts call, as imported; `moe-group` turns it into moe.grouped_mlp.

    interleaved: gate and up rows alternate (gpt-oss), else the gate rows come first.  The weights'
    transposed storage is a fact of the checkpoint and must already be undone by a recipe.
    """
    if transposed:
        raise ValueError("moe.experts: transposed weights must be undone by a `transpose` recipe")
    if interleaved:
        gate_up = torch.cat([gate_up[:, 0::2], gate_up[:, 1::2]], dim=1)
        if gate_up_bias is not None:
            gate_up_bias = torch.cat([gate_up_bias[:, 0::2], gate_up_bias[:, 1::2]], dim=1)
    return _run_experts(x, ids, weights, gate_up, down, gate_up_bias, down_bias, act, alpha, limit)


@op(
    "moe.grouped_mlp(x: f[..., D], ids: i32[..., K], weights: f32[..., K], w13: f[E, W, D],"
    " w2: f[E, D, F], b13: f[E, W]?, b2: f[E, D]?;"
    ' act: str = "silu", alpha: float = 1.702, limit: float = 7.0) -> f[..., D]',
    flops=lambda d: 6.0 * d.tokens * d.K * d.D * d.F,
    reads=lambda d: (
        d.nbytes(0)
        + d.nbytes(1)
        + d.nbytes(2)
        + d.touched(d.E, d.tokens * d.K) / d.E * (d.nbytes(3) + d.nbytes(4))
    ),
    launches=2,
    reach={"cuda": (0.7, 0.5), "cpu": (0.85, 0.2)},
    cases=[
        case(T=1, D=48, E=5, K=2, F=33, W=66),
        case(T=17, D=64, E=8, K=3, F=40, W=80),
    ],
)
def grouped_mlp(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    b13: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    *,
    act: str,
    alpha: float,
    limit: float,
) -> torch.Tensor:
    """Sum over the chosen experts of weight * w2[e] @ (act(gate) * up); W = 2*F, gate rows first.

    id -1 means skip.  The sum over k is taken in float32, in order of k.
    """
    return _run_experts(x, ids, weights, w13, w2, b13, b2, act, alpha, limit)
