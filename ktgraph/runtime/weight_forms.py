"""What kernels read of weights: which operands in tiles, and which encodings on which device."""

from __future__ import annotations

from ktgraph.ir.graph import Module, Op
from ktgraph.ir.types import Encoding
from ktgraph.weights.encodings import GGUF_FORMATS, INT8_ROWS_ONLY, Tile
from ktgraph.weights.stored_rows import has_rows

# op -> operand positions that CPU kernels read in tiles, and whether gate and up tiles alternate
PACKED: dict[str, dict[int, bool]] = {
    "nn.linear": {1: False},
    "nn.batched_linear": {1: False},
    "nn.swiglu": {1: True, 2: False},
    "moe.grouped_mlp": {3: True, 4: False},
    "mla.attend_expanded": {4: False},
}
TILE_FORMATS = {  # what a weight is stored as -> the tile format of the same values
    **{f: f for f in ("f32", "f16", "bf16", "fp8", "int8", "int4", "int4p", "int4z", "mxfp4")},
    **{f"gguf.{format}": format for format in GGUF_FORMATS},
}
PACKED_ON_GPU = ("nn.linear", "nn.swiglu", "moe.grouped_mlp")
ANY_ROWS = ("nn.linear", "nn.swiglu", "moe.grouped_mlp")  # the others take rows as they are
GPU_FORMATS = ("int8", "int4", "int4p", "fp8")  # tile formats that GPU kernels read


def gpu_reads_tiles(stored: Encoding) -> bool:
    """Whether GPU kernels read the encoding in tiles; dense ones they take as they are."""
    by_row = stored.name != "int8" or not stored.get("group")
    return stored.name in GPU_FORMATS and by_row


def gpu_decodes(encoding: Encoding) -> bool:
    """Whether GPU kernels read the encoding in tiles, now or once it is packed."""
    tile = Tile.of(encoding)
    if tile is None:
        return gpu_reads_tiles(encoding)
    return tile.format in GPU_FORMATS and (tile.format != "int8" or not tile.group)


def kernel_reads(op_name: str, position: int, stored: Encoding, *, on_cpu: bool) -> bool:
    """Whether a kernel of the device computes from this encoding at this operand.

    What is neither dense nor in tiles must be dequantized first (`passes/dequantize.py`).
    """
    if not has_rows(stored) or Tile.of(stored) is not None:
        return True
    if position not in PACKED.get(op_name, {}):
        return False
    if not on_cpu:
        return op_name in PACKED_ON_GPU and gpu_reads_tiles(stored)
    format = TILE_FORMATS.get(stored.name)
    return format is not None and (format not in INT8_ROWS_ONLY or op_name in ANY_ROWS)


def device_of(module: Module, op: Op) -> str:
    """Where an op runs."""
    return next((r.type.device for r in op.results if r.type.device), None) or module.home or "cpu"


def is_cpu(device: str) -> bool:
    return device.split(":")[0] == "cpu"


__all__ = [
    "ANY_ROWS",
    "GPU_FORMATS",
    "PACKED",
    "PACKED_ON_GPU",
    "TILE_FORMATS",
    "device_of",
    "gpu_decodes",
    "gpu_reads_tiles",
    "is_cpu",
    "kernel_reads",
]
