"""nn.*: embeddings, linears, norms, activations, rope, dense MLPs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from ktgraph.ops.registry import case, op
from ktgraph.runtime.batch import Batch


@op(
    "nn.embedding(ids: i[...], table: f[VOC, D]) -> f[..., D]",
    reads=lambda d: d.tokens * d.nbytes(1) / d.VOC,
    cases=[case(T=5, VOC=37, D=48)],
)
def embedding(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rows of the table."""
    return table[ids.long()]


@op(
    "nn.linear(x: f[..., K], w: f[N, K], b: f[N]?) -> f[..., N]",
    flops=lambda d: 2.0 * d.tokens * d.N * d.K,
    reach={"cuda": (0.6, 0.85), "cpu": (0.95, 1.0)},
    cases=[case(T=1, K=250, N=33), case(T=3, K=48, N=15), case(T=65, K=256, N=40)],
)
def linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
    """x @ w.T + b"""
    return F.linear(x, w.to(x.dtype), None if b is None else b.to(x.dtype))


@op(
    "nn.batched_linear(x: f[..., H, K], w: f[H, N, K]) -> f[..., H, N]",
    flops=lambda d: 2.0 * d.tokens * d.H * d.N * d.K,
    reach={"cuda": (0.5, 0.5), "cpu": (0.6, 1.0)},
    cases=[case(T=1, H=3, N=33, K=20), case(T=9, H=4, N=16, K=64)],
)
def batched_linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """One linear per head: y[.., h] = w[h] @ x[.., h] (used by absorbed MLA for both sides)."""
    return torch.einsum("...hk,hnk->...hn", x, w.to(x.dtype))


def _normalise(x: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


@op(
    "nn.rms_norm(x: f[..., D], w: f[D]; eps: float, late_cast: bool = false) -> f[..., D]",
    flops=lambda d: 4.0 * d.tokens * d.D,
    cases=[case(T=1, D=33), case(T=7, D=256)],
)
def rms_norm(
    x: torch.Tensor, w: torch.Tensor, *, eps: float, late_cast: bool = False
) -> torch.Tensor:
    """x / rms(x) * w (Zhang and Sennrich, arXiv 1910.07467); the mean is taken in float32.

    `late_cast` multiplies by w before rounding to x's dtype (gpt-oss), else after (the rest).
    """
    h = _normalise(x, eps)
    return (w * h).to(x.dtype) if late_cast else w.to(x.dtype) * h.to(x.dtype)


@op(
    "nn.add_rms_norm(x: f[..., D], y: f[..., D], w: f[D]; eps: float, late_cast: bool = false)"
    " -> (f[..., D], f[..., D])",
    flops=lambda d: 5.0 * d.tokens * d.D,
    cases=[case(T=1, D=33), case(T=7, D=256)],
)
def add_rms_norm(
    x: torch.Tensor, y: torch.Tensor, w: torch.Tensor, *, eps: float, late_cast: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + y, rms_norm(x + y))"""
    total = x + y
    return total, rms_norm(total, w, eps=eps, late_cast=late_cast)


@op(
    "nn.layer_norm(x: f[..., D], w: f[D]?, b: f[D]?; eps: float) -> f[..., D]",
    flops=lambda d: 8.0 * d.tokens * d.D,
    cases=[case(T=1, D=33), case(T=7, D=256)],
)
def layer_norm(
    x: torch.Tensor,
    w: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    *,
    eps: float,
) -> torch.Tensor:
    """(x - mean) / sqrt(var + eps) * w + b over the last axis (Ba et al., arXiv 1607.06450)."""
    return F.layer_norm(x, x.shape[-1:], w, b, eps)


def rope_tables(
    freqs: torch.Tensor, batch: Batch, scale: float, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, [T, J] each, of position x frequency, times `scale`."""
    wide = torch.float64 if like.dtype == torch.float64 else torch.float32
    angles = batch.tok_pos.to(wide)[:, None] * freqs.to(wide)[None]
    return angles.cos() * scale, angles.sin() * scale


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, style: str) -> torch.Tensor:
    """Rotate the first 2*J channels of the last axis of x [T, heads, A]; the rest pass through."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    count = 2 * cos.shape[-1]
    turned, kept = x[..., :count].to(wide), x[..., count:]
    cos, sin = cos[:, None], sin[:, None]
    if style == "half":
        a, b = turned.chunk(2, dim=-1)
    else:
        a, b = turned[..., 0::2], turned[..., 1::2]
    low, high = a * cos - b * sin, b * cos + a * sin
    if style == "interleaved":
        out = torch.stack([low, high], dim=-1).flatten(-2)
    else:
        out = torch.cat([low, high], dim=-1)
    return torch.cat([out.to(x.dtype), kept], dim=-1)


@op(
    "nn.rope(q: f[..., H, P], k: f[..., G, P], freqs: f[J], batch;"
    ' style: str = "half", scale: float = 1.0) -> (f[..., H, P], f[..., G, P])',
    flops=lambda d: 6.0 * d.tokens * (d.H + d.G) * d.J,
    cases=[case(T=1, H=3, G=1, P=8, J=4), case(T=7, H=4, G=2, P=32, J=16)],
)
def rope(
    q: torch.Tensor, k: torch.Tensor, freqs: torch.Tensor, batch: Batch, *, style: str, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary position embedding (Su et al., arXiv 2104.09864) of each head's first 2*J channels.

    Styles: "half" pairs channel c with c+J; "interleaved" pairs 2c with 2c+1; "interleaved_to_half"
    reads pairs as interleaved and writes [first of each pair | second of each pair].
    `scale` multiplies cos and sin (YaRN's attention factor).
    """
    cos, sin = rope_tables(freqs, batch, scale, q)
    out: list[torch.Tensor] = []
    for x in (q, k):
        flat = x.reshape(-1, *x.shape[-2:])
        out.append(rotate(flat, cos, sin, style).reshape(x.shape))
    return out[0], out[1]


def _relu2(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": _relu2,
    "sigmoid": torch.sigmoid,
}


def activation(name: str, x: torch.Tensor) -> torch.Tensor:
    """The gate activations the project knows."""
    if name not in _ACTIVATIONS:
        raise ValueError(f"unknown activation {name!r} (known: {', '.join(_ACTIVATIONS)})")
    return _ACTIVATIONS[name](x)


def gated(
    gate: torch.Tensor, up: torch.Tensor, act: str, alpha: float, limit: float
) -> torch.Tensor:
    """act(gate) * up; "swiglu_clamped" is gpt-oss's form."""
    if act != "swiglu_clamped":
        return activation(act, gate) * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


@op(
    'nn.act(x: f[...]; act: str = "silu") -> f[...]',
    flops=lambda d: 4.0 * d.tokens,
    cases=[case(T=1), case(T=33)],
)
def act(x: torch.Tensor, *, act: str) -> torch.Tensor:
    """An elementwise activation."""
    return activation(act, x)


@op(
    'nn.swiglu(x: f[..., D], w13: f[W, D], w2: f[D, M]; act: str = "silu") -> f[..., D]',
    flops=lambda d: 6.0 * d.tokens * d.M * d.D,
    launches=2,
    reach={"cuda": (0.6, 0.85), "cpu": (0.95, 1.0)},
    cases=[case(T=1, D=48, M=33, W=66), case(T=9, D=64, M=40, W=80)],
)
def swiglu(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, *, act: str) -> torch.Tensor:
    """w2 @ (act(gate) * up); w13's rows are the M gate rows, then the M up rows (W = 2*M)."""
    gate, up = F.linear(x, w13.to(x.dtype)).chunk(2, dim=-1)
    return F.linear(activation(act, gate) * up, w2.to(x.dtype))
