"""moe.grouped_mlp, bf16: DeepSeek-V2-Lite, Qwen3-30B-A3B and Mixtral-8x7B layers.

Peer: torch._grouped_mm where torch has it, given rows that are sorted already and without the
weighted sum.  (A loop over the experts reads ids on the host and cannot be captured.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product

import torch
import torch.nn.functional as F

from bench.gpu_kernels import Case
from ktgraph.triton_kernels.grouped_gemm import GroupedConfig, Tile
from ktgraph.triton_kernels.grouped_mlp import DecodeConfig, grouped_mlp

SHAPES = {  # D, F, E, K
    "V2-Lite": (2048, 1408, 64, 6),
    "Qwen3-30B": (2048, 768, 128, 8),
    "Mixtral": (4096, 14336, 8, 2),
}
_TOKENS = (1, 4, 16, 64, 512, 2048, 8192)
Weights = tuple[torch.Tensor, torch.Tensor]
_grouped_mm = getattr(torch, "_grouped_mm", None)


@cache
def stacked(name: str) -> Weights:
    """w13 and w2 of a shape, shared by its cases; they exceed L2."""
    depth, width, experts, _ = SHAPES[name]
    w13 = torch.randn(experts, 2 * width, depth, device="cuda", dtype=torch.bfloat16)
    w2 = torch.randn(experts, depth, width, device="cuda", dtype=torch.bfloat16)
    return w13.mul_(depth**-0.5), w2.mul_(width**-0.5)


class Layer:
    """Inputs of one shape; sets share the weights and choose other experts by their ids."""

    def __init__(self, name: str, tokens: int) -> None:
        self.name = name
        self.depth, self.width, self.experts, self.top_k = SHAPES[name]
        self.tokens = tokens
        self.sets = 1 if tokens > 64 else 16
        self._made: list[tuple[torch.Tensor, ...]] = []

    def weights(self) -> Weights:
        return stacked(self.name)

    def inputs(self, i: int) -> tuple[torch.Tensor, ...]:
        """x, ids, weights, out of a set."""
        while len(self._made) < self.sets:
            x = torch.randn(self.tokens, self.depth, device="cuda", dtype=torch.bfloat16)
            scores = torch.rand(self.tokens, self.experts, device="cuda")
            weights, ids = scores.topk(self.top_k, dim=-1)
            self._made.append((x, ids.int(), weights.contiguous(), torch.empty_like(x)))
        return self._made[i % self.sets]

    def clear(self) -> None:
        self._made.clear()


def reference(layer: Layer) -> torch.Tensor:
    """float32, one expert after the other."""
    x, ids, weights, _ = layer.inputs(0)
    w13, w2 = layer.weights()
    out = torch.zeros(x.shape, device="cuda")
    for expert in range(layer.experts):
        token, position = torch.where(ids == expert)
        gate, up = (x[token].float() @ w13[expert].float().t()).chunk(2, dim=-1)
        y = (F.silu(gate) * up) @ w2[expert].float().t()
        out.index_add_(0, token, y * weights[token, position, None])
    return out


def case(name: str, tokens: int, config: DecodeConfig | GroupedConfig | None = None) -> Case:
    layer = Layer(name, tokens)
    expert_bytes = 6 * layer.depth * layer.width
    # expected distinct experts of `tokens` draws of K different ones
    share = 1.0 - (1.0 - layer.top_k / layer.experts) ** tokens
    moved = layer.experts * share * expert_bytes + 4 * tokens * layer.depth
    few = tokens * layer.top_k <= 64

    def run(i: int) -> None:
        x, ids, weights, out = layer.inputs(i)
        w13, w2 = layer.weights()
        grouped_mlp(
            *(x, ids, weights, w13, w2, None, None),
            out=(out,),
            act="silu",
            alpha=1.702,
            limit=7.0,
            config=config,
        )

    def error() -> float:
        layer.clear()
        layer.inputs(0)[3].fill_(float("nan"))
        run(0)
        expected = reference(layer)
        out = layer.inputs(0)[3].float()
        return float((out - expected).square().sum() / expected.square().sum())

    wanted = 0.0
    if few and layer.top_k * expert_bytes >= 64 << 20:
        wanted = 0.7
    elif tokens >= 8192:
        wanted = 0.6
    return Case(
        "grouped_mlp",
        f"{name} T={tokens}" + (f" with {config}" if config else ""),
        run,
        error,
        6e-5,
        moved,
        6.0 * tokens * layer.top_k * layer.depth * layer.width,
        layer.sets,
        _peers(layer),
        wanted,
    )


def _peers(layer: Layer) -> dict[str, Callable[[int], object]]:
    grouped = _grouped_mm
    if grouped is None or layer.tokens < 64:
        return {}
    sorted_rows: list[tuple[torch.Tensor, torch.Tensor]] = []

    def grouped_mm(i: int) -> torch.Tensor:
        if not sorted_rows:
            x, ids, _, _ = layer.inputs(0)
            order = ids.flatten().argsort(stable=True)
            counts = torch.bincount(ids.flatten(), minlength=layer.experts)
            sorted_rows.append((x[order // layer.top_k], counts.cumsum(0).int()))
        rows, ends = sorted_rows[0]
        w13, w2 = layer.weights()
        both = grouped(rows, w13.transpose(1, 2), offs=ends)
        gate, up = both.chunk(2, dim=-1)
        return grouped(F.silu(gate) * up, w2.transpose(1, 2), offs=ends)

    return {"_grouped_mm, sorted before, no sum": grouped_mm}


def cases() -> list[Case]:
    return [case(name, tokens) for name in SHAPES for tokens in _TOKENS]


def sweep() -> list[Case]:
    """Configurations by form; `_sweep` shows the fastest."""
    decode = [
        DecodeConfig(rows, cols, warps, down, down_cols, warps)
        for (rows, cols), (down, down_cols), warps in product(
            [(2, 512), (4, 512), (2, 1024), (8, 256)], [(8, 512), (16, 512), (16, 256)], (4, 8)
        )
    ]
    found = [
        case(name, 1, config) for name in ("V2-Lite", "Qwen3-30B") for config in (None, *decode)
    ]
    for tokens in (16, 64):
        found += [case("Qwen3-30B", tokens, config) for config in (None, *few_rows())]
    for name in ("V2-Lite", "Qwen3-30B"):
        found += [case(name, 8192, config) for config in (None, *many_rows())]
    return found


def few_rows() -> list[GroupedConfig]:
    tiles = [(32, 64), (32, 128), (64, 64), (64, 128)]
    return [
        GroupedConfig(16, Tile(n, k, 4, stages), Tile(2 * n, k, 4, stages))
        for (n, k), stages in product(tiles, (3, 4))
    ]


def many_rows() -> list[GroupedConfig]:
    """For sm_90: 227 KB of shared memory."""
    up = [Tile(128, 64, 8, 3), Tile(128, 64, 8, 4), Tile(64, 64, 4, 4), Tile(128, 32, 8, 5)]
    down = [Tile(256, 64, 8, 3), Tile(256, 64, 8, 4), Tile(128, 64, 4, 4), Tile(128, 64, 8, 4)]
    groups = (4, 8, 16)
    configs = [
        GroupedConfig(128, Tile(u.block_n, u.block_k, u.warps, u.stages, g), d)
        for (u, d), g in product(zip(up, down, strict=True), groups)
    ]
    return [*configs, GroupedConfig(64, Tile(128, 64, 4, 4), Tile(256, 64, 4, 4))]


__all__ = ["cases", "sweep"]
