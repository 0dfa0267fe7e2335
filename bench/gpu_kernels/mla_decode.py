"""mla.attend at 16 heads (DeepSeek-V2-Lite) and 128 heads (DeepSeek-V3): R = 512, P = 64.

`python -m bench.gpu_kernels.mla_decode` sweeps tile shapes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from bench.gpu_kernels import Case
from bench.gpu_kernels._attention import (
    Error,
    Paged,
    causal_pairs,
    exact,
    poisoned,
    randn,
    some_tokens,
    sweep,
)
from ktgraph.triton_kernels.mla_decode import SWEEP_16, SWEEP_128, mla_attend

R, P = 512, 64
SCALE = 192**-0.5


def _case(
    heads: int,
    sequences: int,
    context: int,
    new: int = 1,
    *,
    wanted: float = 0.0,
    peer: bool = True,
    **launch: Any,
) -> Case:
    paged = Paged.make(sequences, context, new, (R + P,))
    tokens = sequences * new
    lat, pe = randn(tokens, heads, R) * 0.3, randn(tokens, heads, P)
    out = poisoned(tokens, heads, R)

    def call(lat: torch.Tensor, pe: torch.Tensor, layer: int) -> None:
        mla_attend(
            lat, pe, paged.state, paged.batch, out=(out,), layer=layer, scale=SCALE, **launch
        )

    def error() -> float:
        fresh_lat, fresh_pe = randn(tokens, heads, R) * 0.3, randn(tokens, heads, P)
        out.fill_(float("nan"))
        layer = paged.layers - 1
        call(fresh_lat, fresh_pe, layer)
        found, some = Error(), some_tokens(new)
        for s in range(sequences):
            rows = paged.rows(0, layer, s)[:, None]
            at = s * new + some
            q = torch.cat([fresh_lat[at], fresh_pe[at]], -1)
            want = exact(q, rows, rows[..., :R], context - new + some, SCALE)
            found.add(out[at], want)
        return found.nmse if bool(out.isfinite().all()) else float("nan")

    # torch repeats the rows for every head here: tens of gigabytes with 128 heads and a batch
    peer = peer and new == 1 and heads * sequences <= 256
    pairs = sequences * causal_pairs(context, new)
    return Case(
        kernel="mla_attend",
        label=f"B={sequences} S={context} T={tokens}, H={heads} R=512 P=64",
        run=lambda i: call(lat, pe, i % paged.layers),
        error=error,
        bound=1e-5,
        nbytes=2.0 * (sequences * context * (R + P) + lat.numel() * 2 + pe.numel()),
        flops=2.0 * pairs * heads * (2 * R + P),
        sets=paged.layers,
        peers=_peers(heads, sequences, context, paged.layers) if peer else {},
        wanted=wanted,
    )


def _peers(heads: int, sequences: int, context: int, sets: int) -> dict[str, Any]:
    """torch's own attention on contiguous latent rows that all heads share."""
    q = randn(sequences, heads, 1, R + P)
    rows = randn(sets, sequences, 1, context, R + P)

    def run(i: int) -> torch.Tensor:
        k = rows[i % sets]
        return F.scaled_dot_product_attention(q, k, k[..., :R], scale=SCALE, enable_gqa=True)

    return {"torch sdpa, contiguous": run}


def cases() -> list[Case]:
    return [
        _case(16, 1, 512),
        _case(16, 1, 8192),
        _case(16, 16, 512),
        _case(16, 16, 8192, wanted=0.75),
        _case(128, 1, 512),
        _case(128, 1, 8192),
        _case(128, 16, 512),
        _case(128, 16, 8192, wanted=0.55),
        _case(16, 1, 2048, 2048),
    ]


def main() -> None:
    for heads, sequences, configs in (
        (16, 16, SWEEP_16),
        (16, 1, SWEEP_16),
        (128, 16, SWEEP_128),
        (128, 1, SWEEP_128),
    ):
        sweep(
            f"mla_attend H={heads} B={sequences} S=8192",
            configs,
            lambda c, h=heads, b=sequences: _case(h, b, 8192, peer=False, override=c),
        )


if __name__ == "__main__":
    main()
