"""kv.*: the linear cache states.  An append consumes a state and returns the next one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ktgraph.ir.dims import Dim
from ktgraph.ir.graph import Attr
from ktgraph.ir.types import StateType, TensorType, Type
from ktgraph.ops.nn import rope_tables, rotate
from ktgraph.ops.registry import case, op
from ktgraph.ops.signature import SignatureError
from ktgraph.runtime.batch import Batch
from ktgraph.runtime.state import State


def _flat(x: torch.Tensor, row_rank: int) -> torch.Tensor:
    """[T, *row] from [..., *row]."""
    return x.reshape(-1, *x.shape[x.dim() - row_rank :])


@op(
    "kv.append(kv: kv(f[C, G, A], f[C, G2, V]), k: f[..., G, A], v: f[..., G2, V], batch;"
    " layer: int) -> kv",
    cases=[case(T=1, S=33, G=1, G2=1, A=16, V=16), case(T=5, G=2, G2=2, A=24, V=16)],
)
def append(kv: State, k: torch.Tensor, v: torch.Tensor, batch: Batch, *, layer: int) -> State:
    """Write the new tokens' keys and values to their cache rows."""
    return kv.append(layer, batch.slots(), (_flat(k, 2), _flat(v, 2)))


@op(
    "kv.append_latent(kv: kv(f[C, R+P]), c: f[..., R], k_pe: f[..., P], batch; layer: int) -> kv",
    cases=[case(T=5, R=24, P=8)],
)
def append_latent(
    kv: State, c: torch.Tensor, k_pe: torch.Tensor, batch: Batch, *, layer: int
) -> State:
    """Write MLA's latent rows: the normalised latent, then the rotated shared key part."""
    rows = torch.cat([_flat(c, 1), _flat(k_pe, 1)], dim=-1)
    return kv.append(layer, batch.slots(), (rows,))


def _read_types(types: Sequence[Type | None], attrs: Mapping[str, Attr]) -> list[Type]:
    state, rows = types[0], attrs["rows"]
    assert isinstance(state, StateType)
    assert isinstance(rows, tuple)
    dims = tuple(d for d in rows if isinstance(d, Dim))
    part_types: list[Type] = []
    for part in state.parts:
        if part.dims[0] != Dim.of("C"):
            raise SignatureError(f"a state part begins with axis C, got {part}")
        part_types.append(TensorType(part.dtype, dims + part.dims[1:]))
    return part_types


@op(
    "kv.read(kv: kv(f[C, ...x], f[C, ...y]), batch; layer: int, rows: ints) -> f[...]",
    infer=_read_types,
)
def read(kv: State, batch: Batch, *, layer: int, rows: list[int]) -> tuple[torch.Tensor, ...]:
    """Every cached row of the call's sequences, in order; `rows` is the leading shape, e.g. [b, t].

    Only traced modules hold it; canonicalize merges it into the attention that follows.
    """
    index = torch.cat([batch.rows(q) for q in range(batch.sequences)])
    parts = [kv.read(p, layer, index) for p in range(len(kv.parts))]
    return tuple(p.reshape(*rows, *p.shape[1:]) for p in parts)


@op(
    "kv.rope_append(q: f[..., H, A], k: f[..., G, A], v: f[..., G, V], freqs: f[J],"
    " kv: kv(f[C, G, A], f[C, G, V]), batch;"
    ' layer: int, style: str = "half", scale: float = 1.0) -> (f[..., H, A], kv)',
    cases=[case(T=5, H=4, G=2, A=16, V=16, J=8)],
)
def rope_append(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    freqs: torch.Tensor,
    kv: State,
    batch: Batch,
    *,
    layer: int,
    style: str,
    scale: float,
) -> tuple[torch.Tensor, State]:
    """nn.rope of q and k, then kv.append of the rotated k and v: one pass over the new tokens."""
    cos, sin = rope_tables(freqs, batch, scale, q)
    turned_q = rotate(_flat(q, 2), cos, sin, style).reshape(q.shape)
    turned_k = rotate(_flat(k, 2), cos, sin, style)
    return turned_q, kv.append(layer, batch.slots(), (turned_k, _flat(v, 2)))


@op(
    "kv.rope_append_latent(q_pe: f[..., H, P], k_pe: f[..., P], c: f[..., R], freqs: f[J],"
    " kv: kv(f[C, R+P]), batch;"
    ' layer: int, style: str = "half", scale: float = 1.0) -> (f[..., H, P], kv)',
    cases=[case(T=5, H=4, R=24, P=8, J=4)],
)
def rope_append_latent(
    q_pe: torch.Tensor,
    k_pe: torch.Tensor,
    c: torch.Tensor,
    freqs: torch.Tensor,
    kv: State,
    batch: Batch,
    *,
    layer: int,
    style: str,
    scale: float,
) -> tuple[torch.Tensor, State]:
    """nn.rope of q_pe and k_pe, then kv.append_latent: one pass over the new tokens."""
    cos, sin = rope_tables(freqs, batch, scale, q_pe)
    turned_q = rotate(_flat(q_pe, 2), cos, sin, style).reshape(q_pe.shape)
    turned_k = rotate(_flat(k_pe, 1)[:, None], cos, sin, style)[:, 0]
    rows = torch.cat([_flat(c, 1), turned_k], dim=-1)
    return turned_q, kv.append(layer, batch.slots(), (rows,))
