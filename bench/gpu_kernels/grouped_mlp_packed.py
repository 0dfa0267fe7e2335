"""moe.grouped_mlp with packed experts: DeepSeek-V2-Lite, Qwen3-30B-A3B, DeepSeek-V2 (16 of 160),
and DeepSeek-V3 in fp8 (16 of 256).

A peer is the dense bf16 kernel of this project on as many experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F

from bench.gpu_kernels import Case
from bench.gpu_kernels._packed_bytes import random_packed
from ktgraph.triton_kernels.grouped_mlp import grouped_mlp
from ktgraph.triton_kernels.grouped_mlp_packed import (
    DECODE_FP8,
    DOWN_SWEEP,
    GATE_UP_SWEEP,
    DecodeConfig,
    grouped_mlp_packed,
)
from ktgraph.triton_kernels.packed import PackedWeight
from ktgraph.triton_kernels.unpack import unpack

SHAPES = {  # D, F, E, K
    "V2-Lite": (2048, 1408, 64, 6),
    "Qwen3-30B": (2048, 768, 128, 8),
    "V2-236B": (5120, 1536, 16, 6),
    "V3": (7168, 2048, 16, 8),
}
_INTEGERS = [name for name in SHAPES if name != "V3"]
_ATTRS = {"act": "silu", "alpha": 1.702, "limit": 7.0}
_SETS = 16


@cache
def stacked(name: str, format: str) -> tuple[PackedWeight, PackedWeight]:
    """w13 and w2 of a shape, shared by its cases; they exceed L2."""
    depth, width, experts, _ = SHAPES[name]
    w13 = random_packed(format, 2 * width, depth, count=experts, gate_up=True)
    return w13, random_packed(format, depth, width, count=experts)


@cache
def unpacked(name: str, format: str) -> tuple[torch.Tensor, torch.Tensor]:
    w13, w2 = (
        torch.empty(w.count, w.rows, w.cols, device="cuda", dtype=torch.bfloat16)
        for w in stacked(name, format)
    )
    for packed, dense in zip(stacked(name, format), (w13, w2), strict=True):
        unpack(packed, dense)
    return w13, w2


def reference(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w13: PackedWeight, w2: PackedWeight
) -> torch.Tensor:
    """float32, one expert after the other."""
    out = torch.zeros(x.shape, device="cuda")
    both = torch.empty(1, w13.rows, w13.cols, device="cuda")
    down = torch.empty(1, w2.rows, w2.cols, device="cuda")
    for expert in sorted(set(ids.flatten().tolist())):
        token, position = torch.where(ids == expert)
        unpack(w13, both, expert)
        unpack(w2, down, expert)
        gate, up = (x[token].float() @ both[0].t()).chunk(2, dim=-1)
        y = (F.silu(gate) * up) @ down[0].t()
        out.index_add_(0, token, y * weights[token, position, None])
    return out


def case(
    name: str,
    format: str,
    tokens: int,
    config: DecodeConfig | None = None,
    decode_pairs: int | None = None,
) -> Case:
    depth, _, experts, top_k = SHAPES[name]
    made: list[tuple[torch.Tensor, ...]] = []

    def inputs(i: int) -> tuple[torch.Tensor, ...]:
        while len(made) < _SETS:
            x = torch.randn(tokens, depth, device="cuda", dtype=torch.bfloat16)
            weights, ids = torch.rand(tokens, experts, device="cuda").topk(top_k, dim=-1)
            made.append((x, ids.int().contiguous(), weights.contiguous(), torch.empty_like(x)))
        return made[i % _SETS]

    def run(i: int) -> None:
        x, ids, weights, out = inputs(i)
        grouped_mlp_packed(
            *(x, ids, weights, *stacked(name, format), None, None),
            out=(out,),
            config=config,
            decode_pairs=decode_pairs,
            **_ATTRS,
        )

    def error() -> float:
        made.clear()
        x, ids, weights, out = inputs(0)
        out.fill_(float("nan"))
        run(0)
        wanted = reference(x, ids, weights, *stacked(name, format))
        return float((out - wanted).square().sum() / wanted.square().sum())

    def dense(i: int) -> None:
        x, ids, weights, out = inputs(i)
        grouped_mlp(*(x, ids, weights, *unpacked(name, format), None, None), out=(out,), **_ATTRS)

    peers: dict[str, Callable[[int], object]] = {} if config else {"our bf16 kernel": dense}
    w13, w2 = stacked(name, format)
    share = 1.0 - (1.0 - top_k / experts) ** tokens  # of the experts, chosen by some token
    form = "" if decode_pairs is None else f" decode up to {decode_pairs} pairs"
    return Case(
        "grouped_mlp_packed",
        f"{name} {format} T={tokens}{form}" + (f" with {config}" if config else ""),
        run,
        error,
        1e-4 if format == "int8" else 2.5e-4,
        experts * share * (w13.stride + w2.stride) + 4 * tokens * depth,
        3.0 * tokens * top_k * w13.rows * depth,
        _SETS,
        peers,
        0.7 if tokens * top_k <= 64 and top_k * (w13.stride + w2.stride) >= 64 << 20 else 0.0,
    )


def cases() -> list[Case]:
    found = [
        case(name, format, tokens)
        for name in _INTEGERS
        for format in ("int4", "int8", "int4p")
        for tokens in (1, 4, 16)
    ]
    found += [case(name, "fp8", tokens) for name in SHAPES for tokens in (1, 4, 16)]
    for name in _INTEGERS:  # where the two forms meet
        for tokens in (16, 32, 64, 128):
            pairs = tokens * SHAPES[name][3]
            found += [case(name, "int4", tokens, decode_pairs=most) for most in (0, pairs)]
        found.append(case(name, "int4", 2048))
    for tokens in (16, 32):
        pairs = tokens * SHAPES["V3"][3]
        found += [case("V3", "fp8", tokens, decode_pairs=most) for most in (0, pairs)]
    return found + [case(name, "fp8", 2048) for name in ("V2-Lite", "V3")]


def sweep() -> list[Case]:
    """Launch 1 first, then launch 2 with launch 1's default."""
    configs = (*GATE_UP_SWEEP, *DOWN_SWEEP)
    found = [case(name, "int4", 1, config) for name in _INTEGERS for config in configs]
    fp8 = (DECODE_FP8, *configs)
    return found + [case(name, "fp8", 1, config) for name in ("V3", "V2-236B") for config in fp8]


__all__ = ["cases", "sweep"]
