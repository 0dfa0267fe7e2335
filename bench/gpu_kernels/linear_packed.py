"""nn.linear with packed weights: a 10240 x 8192 matrix, and projections of DeepSeek-V2 and V3.

Peers: torch's bf16 linear (four times the bytes of int4), and torch._weight_int4pack_mm.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F

from bench.gpu_kernels import Case
from bench.gpu_kernels._packed_bytes import random_packed, sets_beyond_l2
from ktgraph.triton_kernels.linear_packed import Config, linear_packed, product_of_tiles
from ktgraph.triton_kernels.packed import PackedWeight
from ktgraph.triton_kernels.packed_row import ROW_SWEEP
from ktgraph.triton_kernels.packed_tokens import TOKENS_SWEEP
from ktgraph.triton_kernels.unpack import unpack

SHAPES = {  # rows, cols
    "10240x8192": (10240, 8192),
    "V2-Lite qkv_a": (3648, 2048),
    "V2-Lite o": (2048, 2048),
    "V2 q_b": (24576, 1536),
    "V2 o": (5120, 16384),
    "V2 qkv_a": (2112, 5120),
    "V2 shared down": (5120, 3072),
    "V3 o": (7168, 16384),
    "V3 qkv_a": (2112, 7168),
    "V3 shared gate_up": (4096, 7168),
}
_GROUPS = {"int8": (0,), "int4": (32, 64, 128), "int4p": (64,), "fp8": (128,)}


@cache
def stored(shape: str, format: str, group: int) -> list[PackedWeight]:
    """Weights of a shape, shared by its cases."""
    rows, cols = SHAPES[shape]
    sets = sets_beyond_l2(rows * cols // (1 if format in ("int8", "fp8") else 2))
    return [random_packed(format, rows, cols, group=group) for _ in range(sets)]


def case(shape: str, format: str, group: int, tokens: int, config: Config | None = None) -> Case:
    rows, cols = SHAPES[shape]
    weights = stored(shape, format, group)
    x = torch.randn(tokens, cols, device="cuda", dtype=torch.bfloat16)
    y = torch.empty(tokens, rows, device="cuda", dtype=torch.bfloat16)

    def run(i: int) -> None:
        if config is None:
            linear_packed(x, weights[i % len(weights)], None, out=(y,))
        else:
            product_of_tiles(x, weights[i % len(weights)], None, y, act=None, config=config)

    def error() -> float:
        y.fill_(float("nan"))
        run(0)
        dense = torch.empty(1, rows, cols, device="cuda")
        unpack(weights[0], dense)
        wanted = x.double() @ dense[0].double().t()
        return float((y.double() - wanted).square().sum() / wanted.square().sum())

    layout = weights[0].layout
    name = f"{format} {group}" if group else format
    return Case(
        "linear_packed",
        f"{shape} {name} T={tokens}" + (f" with {config}" if config else ""),
        run,
        error,
        4e-5 if weights[0].rounds(x.dtype) and tokens == 1 else 2e-5,
        layout.data_nbytes + layout.scale_nbytes + 2 * tokens * (rows + cols),
        2.0 * tokens * rows * cols,
        len(weights),
        {} if config else _peers(x, rows, cols, format, len(weights)),
        0.7 if tokens <= 16 and layout.data_nbytes >= 40 << 20 else 0.0,
    )


def _peers(
    x: torch.Tensor, rows: int, cols: int, format: str, sets: int
) -> dict[str, Callable[[int], object]]:
    dense: list[torch.Tensor] = []
    packed: list[torch.Tensor] = []
    groups = torch.ones(cols // 64, rows, 2, device="cuda", dtype=torch.bfloat16)

    def bf16(i: int) -> torch.Tensor:
        while len(dense) < max(1, sets // 4):
            dense.append(torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16))
        return F.linear(x, dense[i % len(dense)])

    def int4(i: int) -> torch.Tensor:
        while len(packed) < sets:
            q = torch.randint(256, (rows, cols // 2), device="cuda", dtype=torch.uint8)
            packed.append(torch._convert_weight_to_int4pack(q, 8))
        return torch._weight_int4pack_mm(x, packed[i % sets], 64, groups)

    return {"bf16": bf16} | ({"int4pack": int4} if format == "int4" else {})


def cases() -> list[Case]:
    found = [
        case("10240x8192", format, group, tokens)
        for format, groups in _GROUPS.items()
        for group in groups
        for tokens in (1, 4, 16)
    ]
    found += [
        case(shape, "int4", 64, tokens)
        for shape in SHAPES
        if shape.startswith("V2")
        for tokens in (1, 4, 16)
    ]
    found += [
        case(shape, "fp8", 128, tokens)
        for shape in SHAPES
        if shape.startswith("V3")
        for tokens in (1, 4, 16)
    ]
    found += [case(shape, "int8", 0, 1) for shape in SHAPES if shape.startswith("V2 ")]
    found += [case("10240x8192", "int4", 64, tokens) for tokens in (32, 64, 2048)]
    return found + [case("10240x8192", "fp8", 128, tokens) for tokens in (32, 64, 2048)]


def sweep() -> list[Case]:
    wide = [s for s in SHAPES if not s.startswith(("V2-Lite", "V3"))]
    found = [case(shape, "int8", 0, 1, c) for shape in wide for c in ROW_SWEEP]
    for shape in ("10240x8192", "V2-Lite qkv_a"):
        found += [case(shape, "int4", 64, 1, c) for c in ROW_SWEEP]
        found += [case(shape, "int4", 64, t, c) for t in (4, 16) for c in TOKENS_SWEEP]
    found += [case("10240x8192", "int8", 0, t, c) for t in (4, 16) for c in TOKENS_SWEEP]
    for shape in ("10240x8192", "V3 o"):
        found += [case(shape, "fp8", 128, 1, c) for c in ROW_SWEEP]
        found += [case(shape, "fp8", 128, 16, c) for c in TOKENS_SWEEP]
    return found


__all__ = ["cases", "sweep"]
