"""Unpacking of 16 experts' w13 into bf16; the peer copies as many bytes with torch.

Parity is against the native unpack, on a small weight packed by the native packer.
"""

from __future__ import annotations

import torch

from bench.gpu_kernels import Case
from bench.gpu_kernels._packed_bytes import random_packed
from ktgraph.triton_kernels.packed import GROUPS, PackedWeight
from ktgraph.triton_kernels.unpack import SWEEP, UnpackConfig, unpack
from ktgraph.weights.encodings import Tile, from_float, to_float

SHAPES = {"V2-Lite": (2816, 2048), "Qwen3-30B": (1536, 2048), "V2-236B": (3072, 5120)}
_COUNT = 16


def case(shape: str, format: str, group: int, config: UnpackConfig | None = None) -> Case:
    rows, cols = SHAPES[shape]
    weight = random_packed(format, rows, cols, count=_COUNT, group=group, gate_up=True)
    out = torch.empty(_COUNT, rows, cols, device="cuda", dtype=torch.bfloat16)
    chosen = config or UnpackConfig()
    moved = weight.data.numel() + out.nbytes
    source = torch.empty(2 if config else moved // 2, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    return Case(
        "unpack",
        f"{shape} {_COUNT} experts {format}" + (f" with {config}" if config else ""),
        lambda i: unpack(weight, out, 0, chosen),
        lambda: _error(format, group, chosen),
        0.0,
        moved,
        peers={} if config else {"copy of as many bytes": lambda i: target.copy_(source)},
        wanted=0.8,
    )


def _error(format: str, group: int, config: UnpackConfig) -> float:
    rows, cols, count = 66, 584, 3
    encoding = Tile(format, group, True).encoding
    stored = from_float(torch.randn(count, rows, cols), encoding)
    wanted = to_float(stored, (count, rows, cols), encoding)
    weight = PackedWeight(stored[0].cuda(), format, rows, cols, count, group, True)
    out = torch.full((count, rows, cols), float("nan"), device="cuda", dtype=torch.bfloat16)
    unpack(weight, out, 0, config)
    return float((out.cpu() - wanted.bfloat16()).double().square().sum())


def cases() -> list[Case]:
    return [case(shape, format, group) for shape in SHAPES for format, group in GROUPS.items()]


def sweep() -> list[Case]:
    return [
        case("V2-236B", format, group, config)
        for format, group in GROUPS.items()
        for config in SWEEP
    ]


__all__ = ["cases", "sweep"]
