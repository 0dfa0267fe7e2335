"""FP8 checkpoints as DeepSeek-V3's: e4m3 weights, one scale per block of 128 x 128.

    X.weight            F8_E4M3 [rows, cols]
    X.weight_scale_inv  F32 [ceil(rows / 128), ceil(cols / 128)]; value = weight * scale

Source: quantization_config {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
and weight_dequant of the DeepSeek-V3 repository (inference/kernel.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ktgraph.frontends.safetensors_files import CheckpointError, Shards
from ktgraph.ir.types import Encoding
from ktgraph.weights.checkpoints.quantized import (
    Parts,
    QuantizedTensor,
    expect_dtype,
    expect_shape,
    take,
)
from ktgraph.weights.relayout import StoredInts, fp8_blocks

_WEIGHT, _SCALE = ".weight", ".weight_scale_inv"
_BLOCK = [128, 128]


def find_fp8(shards: Shards, settings: Mapping[str, Any]) -> list[QuantizedTensor]:
    """Every e4m3 weight; the others stay as they are stored."""
    block, format = settings.get("weight_block_size"), settings.get("fmt", "e4m3")
    if block is None or list(block) != _BLOCK or format != "e4m3":
        raise CheckpointError(
            f"{shards.folder}: config.json says fp8 with fmt {format!r} and weight_block_size "
            f"{block}; e4m3 with blocks of [128, 128] is read"
        )
    keys = [k for k, e in shards.entries.items() if e.dtype == torch.float8_e4m3fn]
    return [_tensor(shards, key) for key in keys]


def _tensor(shards: Shards, key: str) -> QuantizedTensor:
    entry = shards.entries[key]
    if not key.endswith(_WEIGHT) or len(entry.shape) != 2:
        raise CheckpointError(
            f"{entry.file}: tensor {key!r} is e4m3 {list(entry.shape)}; only matrices named "
            "…weight are expected in e4m3"
        )
    parts = take(shards, key.removesuffix(_WEIGHT), _WEIGHT, _SCALE)
    rows, cols = entry.shape
    expect_dtype(parts[_SCALE], torch.float32, torch.bfloat16)
    blocks = (-(-rows // 128), -(-cols // 128))
    expect_shape(parts[_SCALE], blocks, f"one scale per 128 x 128 block of [{rows}, {cols}]")
    return QuantizedTensor(key, (rows, cols), Encoding("fp8", (("group", 128),)), parts, _decode)


def _decode(parts: Parts) -> StoredInts:
    return fp8_blocks(parts[_WEIGHT], parts[_SCALE])


__all__ = ["find_fp8"]
