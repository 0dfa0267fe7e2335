"""Packed weights for tests: made by the native packer, with the values that their bytes mean."""

from __future__ import annotations

import torch

from ktgraph.ir.types import Encoding
from ktgraph.triton_kernels.packed import PackedWeight
from ktgraph.weights.encodings import Tile, from_float, to_float

FORMATS = (
    ("int8", 0),
    ("int4", 32),
    ("int4", 64),
    ("int4", 128),
    ("int4p", 32),
    ("int4p", 128),
    ("fp8", 128),
)


def encoding(format: str, group: int, gate_up: bool = False) -> Encoding:
    return Tile(format, group, gate_up).encoding


def packed(
    values: torch.Tensor,
    format: str,
    group: int,
    device: torch.device,
    *,
    gate_up: bool = False,
    row_form: str = "f32",
) -> tuple[PackedWeight, torch.Tensor]:
    """values [rows, cols] or [count, rows, cols] packed; and the f32 values of the bytes."""
    kind = encoding(format, group, gate_up)
    stored = from_float(values, kind)
    rows, cols = values.shape[-2:]
    count = values.shape[0] if values.dim() == 3 else 1
    data = stored[0].to(device)
    weight = PackedWeight(data, format, rows, cols, count, group, gate_up, row_form)
    return weight, to_float(stored, values.shape, kind).to(device)
