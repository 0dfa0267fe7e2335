"""mla.*: multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

One cache of latent rows [R+P] serves both forms.  *Absorbed*: queries move into latent space
(`nn.batched_linear` with the key half of kv_b), attend there, and the value half brings the result
back.  *Expanded*: keys and values are rebuilt from the rows by kv_b for each call.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ktgraph.ops.attn import attend_sequence
from ktgraph.ops.registry import case, op
from ktgraph.runtime.batch import Batch
from ktgraph.runtime.state import State


@op(
    "mla.attend(q_lat: f[..., H, R], q_pe: f[..., H, P], kv: kv(f[C, R+P]), batch;"
    " layer: int, scale: float) -> f[..., H, R]",
    flops=lambda d: 2.0 * d.attend * d.H * (2 * d.R + d.P),
    reads=lambda d: d.nbytes(0) + d.nbytes(1) + 4.0 * d.S * (d.R + d.P),
    launches=2,
    reach={"cuda": (0.5, 0.25), "cpu": (1.0, 0.8)},
    cases=[case(T=1, S=63, H=4, R=16, P=8), case(T=7, S=130, H=3, R=64, P=32)],
)
def attend(
    q_lat: torch.Tensor, q_pe: torch.Tensor, kv: State, batch: Batch, *, layer: int, scale: float
) -> torch.Tensor:
    """Absorbed queries attend over latent rows; a row is its own key and, its first R, value."""
    q = torch.cat([q_lat, q_pe], dim=-1).reshape(
        -1, q_lat.shape[-2], q_lat.shape[-1] + q_pe.shape[-1]
    )
    heads, rank = q_lat.shape[-2], q_lat.shape[-1]
    out: list[torch.Tensor] = []
    for sequence in range(batch.sequences):
        span = batch.span(sequence)
        rows = kv.read(0, layer, batch.rows(sequence)).to(q.dtype)
        keys = rows[:, None].expand(-1, heads, -1)
        out.append(attend_sequence(q[span], keys, keys[..., :rank], batch.tok_pos[span], scale))
    return torch.cat(out).reshape(q_lat.shape)


@op(
    "mla.attend_expanded(q_nope: f[..., H, N], q_pe: f[..., H, P], kv: kv(f[C, R+P]), batch,"
    " kv_b: f[H*(N+V), R]; layer: int, scale: float) -> f[..., H, V]",
    flops=lambda d: 2.0 * d.S * d.H * (d.N + d.V) * d.R + 2.0 * d.attend * d.H * (d.N + d.P + d.V),
    # the rebuilt keys and values are written and read once, in 2 bytes each
    reads=lambda d: (
        d.nbytes(0)
        + d.nbytes(1)
        + d.nbytes(4)
        + 4.0 * d.S * (d.R + d.P)
        + 4.0 * d.S * d.H * (d.N + d.V)
    ),
    launches=4,
    reach={"cuda": (0.6, 0.4)},
    cases=[
        case(T=1, S=63, H=4, N=16, P=8, V=12, R=24),
        case(T=7, S=130, H=3, N=32, P=16, V=32, R=64),
    ],
)
def attend_expanded(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv: State,
    batch: Batch,
    kv_b: torch.Tensor,
    *,
    layer: int,
    scale: float,
) -> torch.Tensor:
    """Keys and values rebuilt from latent rows; kv_b holds, per head, N key then V value rows."""
    heads, nope = q_nope.shape[-2], q_nope.shape[-1]
    rank = kv_b.shape[1]
    q = torch.cat([q_nope, q_pe], dim=-1).reshape(-1, heads, nope + q_pe.shape[-1])
    out: list[torch.Tensor] = []
    for sequence in range(batch.sequences):
        span = batch.span(sequence)
        rows = kv.read(0, layer, batch.rows(sequence)).to(q.dtype)
        both = F.linear(rows[:, :rank], kv_b.to(q.dtype)).reshape(len(rows), heads, -1)
        shared = rows[:, None, rank:].expand(-1, heads, -1)
        keys = torch.cat([both[..., :nope], shared], dim=-1)
        out.append(attend_sequence(q[span], keys, both[..., nope:], batch.tok_pos[span], scale))
    joined = torch.cat(out)
    return joined.reshape(*q_nope.shape[:-1], joined.shape[-1])
