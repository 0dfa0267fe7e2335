"""attn.sdpa at Qwen3-30B-A3B's attention: 32 heads over 4 key heads of 128.

`python -m bench.gpu_kernels.sdpa` sweeps tile shapes.
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
from ktgraph.triton_kernels import sdpa_decode, sdpa_prefill
from ktgraph.triton_kernels.sdpa import sdpa

H, G, A = 32, 4, 128
SCALE = A**-0.5


def _case(
    sequences: int,
    context: int,
    new: int,
    *,
    wanted: float = 0.0,
    form: Any = None,
    peer: bool = True,
    **launch: Any,
) -> Case:
    paged = Paged.make(sequences, context, new, (G, A), (G, A))
    q = randn(sequences * new, H, A)
    out = poisoned(sequences * new, H, A)
    attrs = {"scale": SCALE, "window": 0, "softcap": 0.0}

    def call(q: torch.Tensor, layer: int) -> None:
        if form is None:
            sdpa(q, paged.state, paged.batch, out=(out,), layer=layer, **attrs)
            return
        k, v = (p[layer] for p in paged.state.parts)
        form.launch(q, k, v, paged.batch, None, out, **attrs, **launch)

    def error() -> float:
        fresh = randn(sequences * new, H, A)
        out.fill_(float("nan"))
        layer = paged.layers - 1
        call(fresh, layer)
        found, tokens = Error(), some_tokens(new)
        for s in range(sequences):
            k, v = (paged.rows(p, layer, s) for p in range(2))
            positions = context - new + tokens
            want = exact(fresh[s * new + tokens], k, v, positions, SCALE)
            found.add(out[s * new + tokens], want)
        whole = bool(out.isfinite().all())
        return found.nmse if whole else float("nan")

    pairs = sequences * causal_pairs(context, new)
    return Case(
        kernel="sdpa decode" if new == 1 else "sdpa prefill",
        label=f"B={sequences} S={context} T={sequences * new}, H=32 G=4 A=128",
        run=lambda i: call(q, i % paged.layers),
        error=error,
        bound=1e-5,
        nbytes=2.0 * (sequences * context * G * 2 * A + 2 * q.numel()),
        flops=4.0 * pairs * H * A,
        sets=paged.layers,
        peers=_peers(sequences, context, new, paged.layers) if peer else {},
        wanted=wanted,
    )


def _peers(sequences: int, context: int, new: int, sets: int) -> dict[str, Any]:
    """torch's own attention on contiguous keys and values."""
    q = randn(sequences, H, new, A)
    k, v = (randn(sets, sequences, G, context, A) for _ in range(2))

    def run(i: int) -> torch.Tensor:
        return F.scaled_dot_product_attention(
            q, k[i % sets], v[i % sets], is_causal=new > 1, enable_gqa=True
        )

    return {"torch sdpa, contiguous": run}


def cases() -> list[Case]:
    return [
        _case(1, 512, 1),
        _case(1, 4096, 1),
        _case(1, 8192, 1),
        _case(16, 512, 1),
        _case(16, 8192, 1, wanted=0.75),
        _case(1, 2048, 2048),
        _case(1, 8192, 8192),
    ]


def main() -> None:
    for sequences, context in ((16, 8192), (1, 4096), (1, 512)):
        sweep(
            f"sdpa_decode B={sequences} S={context}",
            sdpa_decode.SWEEP,
            lambda c, b=sequences, s=context: _case(
                b, s, 1, form=sdpa_decode, peer=False, override=c
            ),
        )
    sweep(
        "sdpa_prefill T=8192",
        sdpa_prefill.SWEEP,
        lambda c: _case(1, 8192, 8192, form=sdpa_prefill, peer=False, override=c),
    )


if __name__ == "__main__":
    main()
