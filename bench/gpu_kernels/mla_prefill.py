"""mla.attend_expanded at 16 heads (DeepSeek-V2-Lite) and 128 heads (DeepSeek-V3).

`python -m bench.gpu_kernels.mla_prefill` sweeps tile shapes.
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
from ktgraph.triton_kernels.mla_prefill import SWEEP, mla_attend_expanded

R, P, N, V = 512, 64, 128, 128
SCALE = (N + P) ** -0.5


def _case(
    heads: int,
    sequences: int,
    context: int,
    new: int,
    *,
    wanted: float = 0.0,
    peer: bool = True,
    **launch: Any,
) -> Case:
    paged = Paged.make(sequences, context, new, (R + P,))
    tokens = sequences * new
    nope, pe = randn(tokens, heads, N), randn(tokens, heads, P)
    kv_b = randn(heads * (N + V), R) * R**-0.5
    out = poisoned(tokens, heads, V)

    def call(nope: torch.Tensor, pe: torch.Tensor, layer: int) -> None:
        mla_attend_expanded(
            nope,
            pe,
            paged.state,
            paged.batch,
            kv_b,
            out=(out,),
            layer=layer,
            scale=SCALE,
            **launch,
        )

    def error() -> float:
        fresh, fresh_pe = randn(tokens, heads, N), randn(tokens, heads, P)
        out.fill_(float("nan"))
        layer = paged.layers - 1
        call(fresh, fresh_pe, layer)
        found, some = Error(), some_tokens(new)
        for s in range(sequences):
            rows = paged.rows(0, layer, s)
            at, positions = s * new + some, context - new + some
            for h in range(0, heads, max(1, heads // 8)):  # eight heads: f64 keys are large
                weight = kv_b[h * (N + V) : (h + 1) * (N + V)].double()
                both = rows[:, :R].double() @ weight.T
                keys = torch.cat([both[:, :N], rows[:, R:].double()], -1)[:, None]
                q = torch.cat([fresh[at, h], fresh_pe[at, h]], -1)[:, None]
                want = exact(q, keys, both[:, None, N:], positions, SCALE)
                found.add(out[at, h][:, None], want)
        return found.nmse if bool(out.isfinite().all()) else float("nan")

    pairs = sequences * causal_pairs(context, new)
    expand = 2.0 * sequences * context * heads * (N + V) * R
    return Case(
        kernel="mla_attend_expanded",
        label=f"B={sequences} S={context} T={tokens}, H={heads} N=128 P=64 V=128 R=512",
        run=lambda i: call(nope, pe, i % paged.layers),
        error=error,
        bound=2e-5,
        nbytes=2.0 * (sequences * context * (R + P) + nope.numel() * 2 + pe.numel() + kv_b.numel()),
        flops=expand + 2.0 * pairs * heads * (N + P + V),
        sets=1,
        peers=_peers(heads, sequences, new) if peer and new == context else {},
        wanted=wanted,
    )


def _peers(heads: int, sequences: int, new: int) -> dict[str, Any]:
    """torch's own attention on keys and values that are expanded already."""
    q, k = (randn(sequences, heads, new, N + P) for _ in range(2))
    v = randn(sequences, heads, new, V)

    def run(i: int) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE)

    return {"torch sdpa, expanded before": run}


def cases() -> list[Case]:
    return [
        _case(16, 1, 2048, 2048),
        _case(16, 1, 8192, 8192),
        _case(128, 1, 2048, 2048),
        _case(128, 1, 8192, 8192),
        _case(16, 1, 8192, 2048),
    ]


def main() -> None:
    sweep(
        "mla_attend_expanded H=16 T=8192",
        SWEEP,
        lambda c: _case(16, 1, 8192, 8192, peer=False, override=c),
    )


if __name__ == "__main__":
    main()
