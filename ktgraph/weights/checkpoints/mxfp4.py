"""MXFP4 checkpoints as gpt-oss's: stacks of experts in e2m1 with a power of two per 32 columns.

    X_blocks  U8 [experts, rows, cols / 32, 16], low nibble first
    X_scales  U8 [experts, rows, cols / 32]; 2^(code - 127)

rows are a projection's outputs, so that X (the model's parameter, [experts, in, out]) is the
transpose.  Gate and up rows alternate; the graph takes them apart by a recipe.

Source: OCP Microscaling Formats 1.0; quantization_config {"quant_method": "mxfp4"} of gpt-oss.
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
from ktgraph.weights.relayout import StoredInts, mxfp4

_BLOCKS, _SCALES = "_blocks", "_scales"


def find_mxfp4(shards: Shards, settings: Mapping[str, Any]) -> list[QuantizedTensor]:
    """Every pair of blocks and scales."""
    stems = [k.removesuffix(_BLOCKS) for k in shards.entries if k.endswith(_BLOCKS)]
    return [_tensor(shards, stem) for stem in stems]


def _tensor(shards: Shards, stem: str) -> QuantizedTensor:
    parts = take(shards, stem, _BLOCKS, _SCALES)
    blocks, scales = parts[_BLOCKS], parts[_SCALES]
    expect_dtype(blocks, torch.uint8)
    expect_dtype(scales, torch.uint8)
    if len(blocks.shape) != 4 or blocks.shape[3] != 16:
        raise CheckpointError(
            f"{blocks.file}: tensor {blocks.key!r} is {list(blocks.shape)}, expected [experts, "
            "rows, columns / 32, 16]: 16 bytes are 32 columns"
        )
    expect_shape(scales, blocks.shape[:3], "one scale per block of 32 columns")
    experts, rows, groups, _ = blocks.shape
    shape, encoding = (experts, rows, 32 * groups), Encoding("mxfp4", (("group", 32),))
    return QuantizedTensor(stem, shape, encoding, parts, _decode, transposed=True)


def _decode(parts: Parts) -> StoredInts:
    return mxfp4(parts[_BLOCKS], parts[_SCALES])


__all__ = ["find_mxfp4"]
