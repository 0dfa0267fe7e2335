"""nn.swiglu: shared experts and dense MLPs of DeepSeek-V2-Lite, bf16."""

from __future__ import annotations

from functools import cache
from itertools import product

import torch
import torch.nn.functional as F

from bench.gpu_kernels import Case
from ktgraph.triton_kernels.linear import LinearConfig
from ktgraph.triton_kernels.swiglu import swiglu

SHAPES = {"V2-Lite shared": (2048, 2816), "V2-Lite dense": (2048, 10944)}  # D, M
_TOKENS = (1, 2, 4, 16, 512, 8192)
_BEYOND_L2 = 400 << 20


def plain(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    gate, up = F.linear(x, w13).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, w2)


@cache
def weights(depth: int, width: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Matrices that together exceed L2; all cases of a shape share them."""
    made: list[tuple[torch.Tensor, torch.Tensor]] = []
    for _ in range(-(-_BEYOND_L2 // (6 * depth * width))):
        w13 = torch.randn(2 * width, depth, device="cuda", dtype=torch.bfloat16) / depth**0.5
        w2 = torch.randn(depth, width, device="cuda", dtype=torch.bfloat16) / width**0.5
        made.append((w13, w2))
    return made


def case(
    name: str, depth: int, width: int, tokens: int, config: LinearConfig | None = None
) -> Case:
    nbytes = 6 * depth * width
    sets = -(-_BEYOND_L2 // nbytes)
    made: list[torch.Tensor] = []

    def inputs(i: int) -> tuple[torch.Tensor, ...]:
        if not made:
            made.append(torch.randn(tokens, depth, device="cuda", dtype=torch.bfloat16))
            made.append(torch.empty_like(made[0]))
        stored = weights(depth, width)
        w13, w2 = stored[i % len(stored)]
        return made[0], w13, w2, made[1]

    def run(i: int) -> None:
        x, w13, w2, out = inputs(i)
        swiglu(x, w13, w2, out=(out,), act="silu", config=config)

    def error() -> float:
        made.clear()
        x, w13, w2, out = inputs(0)
        out.fill_(float("nan"))
        swiglu(x, w13, w2, out=(out,), act="silu", config=config)
        expected = plain(x.float(), w13.float(), w2.float())
        return float((out.float() - expected).square().sum() / expected.square().sum())

    return Case(
        "swiglu",
        f"{name} {depth}x{width} T={tokens}" + (f" with {config}" if config else ""),
        run,
        error,
        6e-5,
        nbytes + 4 * tokens * depth,
        6.0 * tokens * depth * width,
        sets,
        {"torch": lambda i: plain(*inputs(i)[:3])},
        0.7 if nbytes >= 64 << 20 and tokens <= 16 else 0.0,
    )


def cases() -> list[Case]:
    return [case(name, *shape, tokens) for name, shape in SHAPES.items() for tokens in _TOKENS]


def sweep() -> list[Case]:
    """Configurations of the first launch; `_sweep` shows the fastest."""
    return [case(name, *SHAPES[name], 1, c) for name in SHAPES for c in (None, *_configurations())]


def _configurations() -> list[LinearConfig]:
    tiles = [(1, 1024), (2, 512), (4, 512), (4, 256), (8, 256)]
    return [
        LinearConfig(rows, cols, warps, unroll)
        for (rows, cols), warps, unroll in product(tiles, (4, 8), (1, 2))
    ]


__all__ = ["cases", "sweep"]
