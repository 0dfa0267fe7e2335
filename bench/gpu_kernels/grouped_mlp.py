"""moe.grouped_mlp, bf16: DeepSeek-V2-Lite, Qwen3-30B-A3B and Mixtral-8x7B layers.

Peer: torch._grouped_mm where torch has it, given rows that are sorted already and without the
weighted sum.  (A loop over the experts reads ids on the host and cannot be captured.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product

import torch
import torch.nn.functional as F

from bench.gpu_kernels import Case
from ktgraph.triton_kernels.grouped_gemm import GroupedConfig, Tile
from ktgraph.triton_kernels.grouped_mlp import DecodeConfig, decode_pairs, grouped_mlp

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
    few = tokens * layer.top_k <= decode_pairs(layer.experts)

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
    found = [
        case(name, 1, config)
        for name in ("V2-Lite", "Qwen3-30B")
        for config in (None, *few_pairs())
    ]
    for tokens in (16, 64):
        found += [case("Qwen3-30B", tokens, config) for config in (None, *few_rows())]
    found += [case("Qwen3-30B", 512, config) for config in (None, *tens_of_rows())]
    for name, tokens in (("Qwen3-30B", 2048), ("Qwen3-30B", 8192), ("V2-Lite", 8192)):
        found += [case(name, tokens, config) for config in (None, *many_rows())]
    return found


def few_pairs() -> list[DecodeConfig]:
    """The launches' times add up: each is varied alone."""
    up = product([(2, 512), (4, 512), (8, 512), (2, 1024), (8, 256)], (4, 8), (1, 2))
    down = product([(8, 512), (16, 512), (16, 256), (32, 256)], (4, 8), (1, 2))
    return [
        *(
            DecodeConfig(gate_up_rows=r, gate_up_cols=c, gate_up_warps=warps, unroll=unroll)
            for (r, c), warps, unroll in up
        ),
        *(
            DecodeConfig(down_rows=r, down_cols=c, down_warps=warps, unroll=unroll)
            for (r, c), warps, unroll in down
        ),
    ]


def few_rows() -> list[GroupedConfig]:
    tiles = [(32, 64), (32, 128), (64, 64), (64, 128)]
    return [
        GroupedConfig(16, Tile(n, k, 4, stages), Tile(2 * n, k, 4, stages))
        for (n, k), stages in product(tiles, (3, 4))
    ]


def tens_of_rows() -> list[GroupedConfig]:
    """32 rows an expert on average: 64-row blocks hold nearly every expert's rows, so that its
    weights are read once; the others need two blocks for half of the experts."""
    return [
        *_same_tiles(32, [(32, 128, 4, 3), (64, 128, 4, 3)]),
        *_same_tiles(64, [(64, 64, 4, 4), (32, 64, 4, 4), (32, 64, 4, 6), (32, 128, 4, 3)]),
        *_same_tiles(64, [(64, 128, 4, 2), (64, 128, 4, 4), (64, 64, 8, 4), (128, 64, 8, 4)]),
    ]


def many_rows() -> list[GroupedConfig]:
    """For sm_90: 227 KB of shared memory.

    A block wastes half of its rows on average for each expert, 11 % with 128 rows for 512.  Tiles
    of up to 113 KB leave room for a second program, whose products hide the first one's stores.
    """
    best, down = Tile(128, 64, 8, 4), Tile(256, 64, 8, 4)
    return [
        *(
            GroupedConfig(128, replace(best, group=group), replace(down, group=group))
            for group in (4, 16, 32)
        ),
        GroupedConfig(128, best, Tile(128, 64, 8, 3)),
        GroupedConfig(128, Tile(64, 64, 8, 3), down),
        *_same_tiles(128, [(128, 64, 8, 3), (64, 64, 8, 3), (64, 64, 4, 3), (64, 128, 8, 3)]),
        *_same_tiles(64, [(128, 64, 4, 4), (64, 64, 4, 4), (128, 64, 8, 4)]),
    ]


def _same_tiles(rows: int, tiles: list[tuple[int, int, int, int]]) -> list[GroupedConfig]:
    """Both products with the same loads and sums: gate and up tiles are two of N columns."""
    return [GroupedConfig(rows, Tile(n, *rest), Tile(2 * n, *rest)) for n, *rest in tiles]


__all__ = ["cases", "sweep"]
