"""rope_append of Qwen3's heads and rope_append_latent of DeepSeek's, at position 4000."""

from __future__ import annotations

from typing import Any

import torch

from bench.gpu_kernels import Case
from bench.gpu_kernels._inputs import decode_or_prefill, nmse, randn, sets_over_l2
from ktgraph.ops import op_def
from ktgraph.runtime.state import State
from ktgraph.triton_kernels import rope as _file  # noqa: F401  (registers)
from ktgraph.triton_kernels.registry import launcher

_PAST = 4000


def _freqs(count: int) -> torch.Tensor:
    return 10000.0 ** -(torch.arange(count) / count)


def _case(
    op: str,
    label: str,
    tokens: int,
    shapes: tuple[tuple[int, ...], ...],
    rows: tuple[tuple[int, ...], ...],
    pairs: int,
    style: str,
) -> Case:
    """`shapes` of a token's operands, the first rotated and returned; `rows` of the cache."""
    run = launcher(op, f"triton.{op.removeprefix('kv.')}")
    host, batch = decode_or_prefill(tokens, _PAST)
    values = sum(torch.Size(s).numel() for s in shapes)
    nbytes = 4.0 * tokens * values
    sets = sets_over_l2(nbytes) if tokens > 16 else 1
    inputs = [[randn(tokens, *s) for s in shapes] for _ in range(sets)]
    outs = [torch.empty_like(operands[0]) for operands in inputs]
    capacity = (int(host.block_table.max()) + 1) * host.page_size
    state = State(tuple(randn(2, capacity, *row) for row in rows))
    freqs = _freqs(pairs).cuda()
    attrs: dict[str, Any] = {"layer": 1, "style": style, "scale": 1.0}

    def error() -> float:
        fresh = [randn(tokens, *s) for s in shapes]
        out = torch.full_like(fresh[0], float("nan"))
        before = State(tuple(part.cpu() for part in state.parts))
        run(*fresh, freqs, state, batch, out=(out, None), **attrs)
        wanted, after = op_def(op).reference(
            *(x.cpu() for x in fresh), freqs.cpu(), before, host, **attrs
        )
        errors = [nmse(out.cpu(), wanted)]
        errors += [nmse(a.cpu(), b) for a, b in zip(state.parts, after.parts, strict=True)]
        return max(errors)

    return Case(
        f"triton.{op.removeprefix('kv.')}",
        f"{label} T={tokens} {style} bf16",
        lambda i: run(*inputs[i % sets], freqs, state, batch, out=(outs[i % sets], None), **attrs),
        error,
        1e-5,
        nbytes,
        sets=sets,
    )


def cases() -> list[Case]:
    found: list[Case] = []
    for tokens in (1, 16, 2048):
        found += [
            _case(
                "kv.rope_append", "H=32 G=4 A=128", tokens,
                ((32, 128), (4, 128), (4, 128)), ((4, 128), (4, 128)), 64, "half",
            ),
            _case(
                "kv.rope_append_latent", "H=16 R=512 P=64", tokens,
                ((16, 64), (64,), (512,)), ((576,),), 32, "interleaved_to_half",
            ),
            _case(
                "kv.rope_append_latent", "H=128 R=512 P=64", tokens,
                ((128, 64), (64,), (512,)), ((576,),), 32, "interleaved_to_half",
            ),
        ]  # fmt: skip
    return found
