"""nn.batched_linear: the absorbed MLA matrices of DeepSeek-V2-Lite and V3, bf16."""

from __future__ import annotations

import torch

from bench.gpu_kernels import Case
from ktgraph.triton_kernels.batched_linear import BatchedConfig, batched_linear

SHAPES = {  # heads, rows of w, columns; whether w is a transposed view
    "V2-Lite absorb q": (16, 512, 128, True),
    "V2-Lite absorb v": (16, 128, 512, False),
    "V3 absorb q": (128, 512, 128, True),
    "V3 absorb v": (128, 128, 512, False),
}
_TOKENS = (1, 4, 16, 64, 512)
_BEYOND_L2 = 200 << 20


def case(
    name: str,
    heads: int,
    width: int,
    depth: int,
    turned: bool,
    tokens: int,
    config: BatchedConfig | None = None,
) -> Case:
    nbytes = 2 * heads * width * depth
    sets = -(-_BEYOND_L2 // nbytes)
    made: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def matrix() -> torch.Tensor:
        shape = (heads, depth, width) if turned else (heads, width, depth)
        w = torch.randn(shape, device="cuda", dtype=torch.bfloat16) / depth**0.5
        return w.transpose(1, 2) if turned else w

    def inputs(i: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        while len(made) < sets:
            x = torch.randn(tokens, heads, depth, device="cuda", dtype=torch.bfloat16)
            out = torch.empty(tokens, heads, width, device="cuda", dtype=torch.bfloat16)
            made.append((x, matrix(), out))
        return made[i % sets]

    def run(i: int) -> None:
        x, w, out = inputs(i)
        batched_linear(x, w, out=(out,), config=config)

    def error() -> float:
        made.clear()
        x, w, out = inputs(0)
        out.fill_(float("nan"))
        batched_linear(x, w, out=(out,), config=config)
        expected = torch.einsum("thk,hnk->thn", x.float(), w.float())
        return float((out.float() - expected).square().sum() / expected.square().sum())

    def peer(i: int) -> torch.Tensor:
        x, w, _ = inputs(i)
        return torch.bmm(x.transpose(0, 1), w.transpose(1, 2))

    return Case(
        "batched_linear",
        f"{name} {heads}x{width}x{depth} T={tokens}" + (f" with {config}" if config else ""),
        run,
        error,
        2e-5,
        nbytes + 2 * tokens * heads * (width + depth),
        2.0 * tokens * heads * width * depth,
        sets,
        {"bmm": peer},
    )


def cases() -> list[Case]:
    return [case(name, *shape, tokens) for name, shape in SHAPES.items() for tokens in _TOKENS]


def sweep() -> list[Case]:
    """Configurations for V2-Lite at one token; `_sweep` shows the fastest."""
    tiles = [(16, 64), (16, 128), (32, 64), (32, 128), (64, 64), (64, 128)]
    configs = [BatchedConfig(r, c, warps, 4) for r, c in tiles for warps in (2, 4)]
    return [
        case(name, *SHAPES[name], 1, config)
        for name in ("V2-Lite absorb q", "V2-Lite absorb v")
        for config in (None, *configs)
    ]


__all__ = ["cases", "sweep"]
