"""attn.*: attention of new tokens over their own sequence's cache rows, and without a cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ktgraph.ops.registry import case, op
from ktgraph.runtime.batch import Batch
from ktgraph.runtime.state import State


def attend_sequence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [t, H, A] over k [s, H, A], v [s, H, V] of one sequence; softmax in float32 or wider.

    k and v are the sequence's last s rows; `positions` of the t tokens count from its first.
    """
    scores = torch.einsum("thd,shd->hts", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    end = int(positions[-1]) + 1 if len(positions) else k.shape[0]
    rows = torch.arange(end - k.shape[0], end)
    seen = rows[None] <= positions[:, None]
    if window:
        seen &= rows[None] > positions[:, None] - window
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        extra = sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, extra], dim=-1)
    wide = scores if scores.dtype == torch.float64 else scores.float()
    weights = wide.softmax(-1).to(q.dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    return torch.einsum("hts,shd->thd", weights, v)


@op(
    "attn.sdpa(q: f[..., H, A], kv: kv(f[C, G, A], f[C, G, V]), batch, sinks: f[H]?;"
    " layer: int, scale: float, window: int = 0, softcap: float = 0.0) -> f[..., H, V]",
    flops=lambda d: 2.0 * d.attend * d.H * (d.A + d.V),
    reads=lambda d: d.nbytes(0) + 4.0 * d.S * d.G * (d.A + d.V),
    launches=2,
    reach={"cuda": (0.6, 0.45), "cpu": (1.0, 0.3)},
    cases=[case(T=1, S=63, H=4, G=2, A=16, V=16), case(T=7, S=130, H=6, G=3, A=64, V=64)],
)
def sdpa(
    q: torch.Tensor,
    kv: State,
    batch: Batch,
    sinks: torch.Tensor | None = None,
    *,
    layer: int,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """Grouped-query attention over the cache; query head h reads key/value head h*G/H.

    window > 0: a token sees itself and the window-1 rows before it.  softcap > 0:
    scores are softcap*tanh(scores/softcap).  sinks: one extra score per head that carries no value.
    """
    flat = q.reshape(-1, *q.shape[-2:])
    out: list[torch.Tensor] = []
    for sequence in range(batch.sequences):
        span, rows = batch.span(sequence), batch.rows(sequence, window)
        share = flat.shape[1] // kv.parts[0].shape[2]
        k = kv.read(0, layer, rows).to(q.dtype).repeat_interleave(share, dim=1)
        v = kv.read(1, layer, rows).to(q.dtype).repeat_interleave(share, dim=1)
        out.append(
            attend_sequence(flat[span], k, v, batch.tok_pos[span], scale, window, softcap, sinks)
        )
    joined = torch.cat(out)
    return joined.reshape(*q.shape[:-1], joined.shape[-1])


@op(
    "attn.sdpa_rows(q: f[..., H, A], k: f[...k, G, A], v: f[...k, G, V], batch, sinks: f[H]?;"
    " scale: float, window: int = 0, softcap: float = 0.0) -> f[..., H, V]",
    flops=lambda d: 2.0 * d.attend * d.H * (d.A + d.V),
    cases=[case(T=1, S=63, H=4, G=2, A=16, V=16), case(T=7, S=130, H=6, G=3, A=64, V=48)],
)
def sdpa_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: Batch,
    sinks: torch.Tensor | None = None,
    *,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """attn.sdpa over explicit rows, as `kv.read` gives them: all sequences' rows in order.

    Only traced modules hold it; canonicalize turns it into attention over the cache.
    """
    flat, keys, values = (x.reshape(-1, *x.shape[-2:]) for x in (q, k, v))
    share = flat.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(share, 1), values.repeat_interleave(share, 1)
    out: list[torch.Tensor] = []
    start = 0
    for sequence in range(batch.sequences):
        span, count = batch.span(sequence), int(batch.kv_len[sequence])
        rows = slice(start, start + count)
        start += count
        positions = batch.tok_pos[span]
        out.append(
            attend_sequence(
                flat[span], keys[rows], values[rows], positions, scale, window, softcap, sinks
            )
        )
    joined = torch.cat(out)
    return joined.reshape(*q.shape[:-1], joined.shape[-1])


@op(
    "attn.attend(q: f[..., H, M, A], k: f[..., G, N, A], v: f[..., G, N, V],"
    " mask: any[...m, M, N]?; scale: float, causal: bool = false) -> f[..., H, M, V]",
    flops=lambda d: 2.0 * d.nbytes(0) / (4 * d.A) * d.N * (d.A + d.V),
    cases=[case(T=1, H=4, G=2, M=5, N=9, A=16, V=8), case(T=1, H=3, G=3, M=7, N=7, A=8, V=8)],
)
def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    scale: float,
    causal: bool,
) -> torch.Tensor:
    """torch's scaled_dot_product_attention: M queries over N keys, heads before tokens, no cache.

    mask: bool (False: not seen) or added to the scores.  causal: query m sees keys 0 to m.
    """
    grouped = q.shape[-3] != k.shape[-3]
    return F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )
