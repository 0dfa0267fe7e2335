"""nn.linear: matrices of DeepSeek-V2-Lite and Qwen3-30B, 1 to 512 tokens, bf16.

`sweep()` lists configurations of the form for one token.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import torch
import torch.nn.functional as F

from bench.gpu_kernels import Case
from ktgraph.triton_kernels.linear import LinearConfig, linear

SHAPES = {  # rows of w, columns
    "V2-Lite kv_a": (576, 2048),
    "V2-Lite q": (3072, 2048),
    "V2-Lite o": (2048, 2048),
    "V2-Lite dense down": (2048, 10944),
    "V2-Lite lm_head": (102400, 2048),
    "Qwen3-30B qkv": (5120, 2048),
    "Qwen3-30B o": (2048, 4096),
    "Qwen3-30B lm_head": (151936, 2048),
}
_TOKENS = (1, 2, 4, 16, 512)
_BEYOND_L2 = 200 << 20  # bytes of weights to rotate through
_LARGE = 64 << 20  # from here on 70 % of bandwidth is asked for


@cache
def weights(width: int, depth: int) -> list[torch.Tensor]:
    """Matrices that together exceed L2; all cases of a shape share them."""
    sets = max(1, min(128, -(-_BEYOND_L2 // (2 * width * depth))))
    return [
        torch.randn(width, depth, device="cuda", dtype=torch.bfloat16) / depth**0.5
        for _ in range(sets)
    ]


def case(
    name: str, width: int, depth: int, tokens: int, config: LinearConfig | None = None
) -> Case:
    nbytes = 2 * width * depth
    made: list[tuple[torch.Tensor, torch.Tensor]] = []

    def inputs(i: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if not made:
            x = torch.randn(tokens, depth, device="cuda", dtype=torch.bfloat16)
            made.append((x, torch.empty(tokens, width, device="cuda", dtype=torch.bfloat16)))
        stored = weights(width, depth)
        x, out = made[0]
        return x, stored[i % len(stored)], out

    def run(i: int) -> None:
        x, w, out = inputs(i)
        linear(x, w, None, out=(out,), config=config)

    def error() -> float:
        made.clear()
        x, w, out = inputs(0)
        out.fill_(float("nan"))
        linear(x, w, None, out=(out,), config=config)
        expected = x.float() @ w.float().t()
        return float((out.float() - expected).square().sum() / expected.square().sum())

    moved = nbytes + 2 * tokens * (width + depth)
    return Case(
        "linear",
        f"{name} {width}x{depth} T={tokens}" + (f" with {config}" if config else ""),
        run,
        error,
        2e-5,
        moved,
        2.0 * tokens * width * depth,
        max(1, min(128, -(-_BEYOND_L2 // nbytes))),
        {"F.linear": lambda i: F.linear(*inputs(i)[:2])},
        0.7 if nbytes >= _LARGE and tokens <= 16 else 0.0,
    )


def cases() -> list[Case]:
    return [case(name, *shape, tokens) for name, shape in SHAPES.items() for tokens in _TOKENS]


def sweep() -> list[Case]:
    """Configurations for small and large matrices; `_sweep` shows the fastest."""
    names = ("V2-Lite o", "V2-Lite kv_a", "V2-Lite lm_head")
    return [case(name, *SHAPES[name], 1, c) for name in names for c in (None, *configurations())]


def configurations() -> list[LinearConfig]:
    shapes = [(1, 2048), (2, 1024), (4, 512), (8, 512), (4, 1024), (8, 256), (16, 256)]
    return [
        LinearConfig(rows, cols, warps, unroll)
        for (rows, cols), warps, unroll in product(shapes, (4, 8), (1, 2))
    ]


__all__ = ["case", "cases", "configurations", "sweep"]
