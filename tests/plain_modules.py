"""Hand-written modules that tests compile: MoE layers in seven spellings, and layers around them.

Each spelling routes to the top two of eight gated MLPs; only how `forward` dispatches differs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FeedForward(nn.Module):
    """w2(silu(w1 x) * w3 x)"""

    def __init__(self, dim: int, hidden: int = 48) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class MoeLayer(nn.Module):
    """Gate, top-k and experts; subclasses dispatch."""

    def __init__(self, dim: int = 32, experts: int = 8, top_k: int = 2) -> None:
        super().__init__()
        self.experts = nn.ModuleList([FeedForward(dim) for _ in range(experts)])
        self.gate = nn.Linear(dim, experts)
        self.top_k = top_k

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values, ids = self.gate(x).topk(self.top_k, dim=-1)
        return values.softmax(-1), ids


class WhereLoop(MoeLayer):
    """A static loop over all experts, torch.where and index_add_."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, x.shape[-1])
        weights, ids = self.route(flat)
        y = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            y.index_add_(0, token, expert(flat[token]) * weights[token, slot, None])
        return y.view_as(x)


class SkipEmpty(MoeLayer):
    """The same, but experts without tokens are skipped by a Python branch."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, x.shape[-1])
        weights, ids = self.route(flat)
        y = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                continue
            y.index_add_(0, token, expert(flat[token]) * weights[token, slot, None])
        return y.view_as(x)


class MaskAny(MoeLayer):
    """Boolean masks, and `if mask.any()`."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        for k in range(self.top_k):
            for e, expert in enumerate(self.experts):
                mask = ids[..., k] == e
                if mask.any():
                    y[mask] += weights[..., k][mask].unsqueeze(-1) * expert(x[mask])
        return y


class ItemLoop(MoeLayer):
    """Token by token in Python, `experts[id.item()]`."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        for b in range(x.shape[0]):
            for s in range(x.shape[1]):
                for k in range(self.top_k):
                    expert = self.experts[int(ids[b, s, k].item())]
                    y[b, s] += weights[b, s, k] * expert(x[b, s])
        return y


class Unique(MoeLayer):
    """A loop over `ids.unique().tolist()`."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, x.shape[-1])
        weights, ids = self.route(flat)
        y = torch.zeros_like(flat)
        for e in ids.unique().tolist():
            token, slot = torch.where(ids == e)
            y.index_add_(0, token, self.experts[e](flat[token]) * weights[token, slot, None])
        return y.view_as(x)


class Dense(MoeLayer):
    """Every expert on every token, with one-hot weights."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        full = torch.zeros(*x.shape[:-1], len(self.experts), dtype=x.dtype)
        full = full.scatter(-1, ids, weights)
        parts = [full[..., e : e + 1] * expert(x) for e, expert in enumerate(self.experts)]
        return torch.stack(parts).sum(0)


class SoftmaxFirst(Unique):
    """Another router: softmax over all, top-k, renormalised."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values, ids = self.gate(x).softmax(-1).topk(self.top_k, -1)
        return values / values.sum(-1, keepdim=True), ids


SPELLINGS = (WhereLoop, SkipEmpty, MaskAny, ItemLoop, Unique, Dense, SoftmaxFirst)


class Capacity(Unique):
    """Experts take four tokens at most and drop the rest: no sum of the top-k."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, x.shape[-1])
        weights, ids = self.route(flat)
        y = torch.zeros_like(flat)
        for e in ids.unique().tolist():
            token, slot = torch.where(ids == e)
            token, slot = token[:4], slot[:4]
            y.index_add_(0, token, self.experts[e](flat[token]) * weights[token, slot, None])
        return y.view_as(x)


class Net(nn.Module):
    """A small model around an MoE layer: ids to logits."""

    def __init__(self, moe: nn.Module, dim: int = 32, words: int = 100) -> None:
        super().__init__()
        self.emb = nn.Embedding(words, dim)
        self.norm = nn.LayerNorm(dim)
        self.moe = moe
        self.head = nn.Linear(dim, words)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.emb(ids)
        return self.head(h + self.moe(self.norm(h)))


class Block(nn.Module):
    """A transformer block without cache: causal attention, then an MLP or an MoE layer."""

    def __init__(self, dim: int = 32, heads: int = 4, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.mlp = mlp or nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, d))
        return x + self.mlp(self.norm2(x))


def nmse(got: Tensor, want: Tensor) -> float:
    """Squared error over squared size; infinite for another shape or dtype."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return float("inf")
    return float((got - want).double().square().sum() / want.double().square().sum())


__all__ = [
    "SPELLINGS",
    "Block",
    "Capacity",
    "FeedForward",
    "MoeLayer",
    "Net",
    "SoftmaxFirst",
    "nmse",
]
