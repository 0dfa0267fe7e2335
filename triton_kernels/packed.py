"""`PackedWeight`: a weight in the CPU's tile layout, read by GPU kernels as it is.

docs/layouts.md specifies the bytes.  Host and GPU share them, so an expert that moves between the
two is copied, never repacked.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from ktgraph.cpu_kernels.reference_layouts import STEP, Layout
from ktgraph.ir.graph import Module, Op
from ktgraph.ir.types import TensorType
from ktgraph.ops.registry import Refusal, no, operand_type
from ktgraph.runtime.weight_forms import GPU_FORMATS, gpu_decodes
from ktgraph.triton_kernels.registry import Supports
from ktgraph.weights.encodings import Tile

FORMATS = GPU_FORMATS  # what the kernels of this package decode
_NIBBLES = ("int4", "int4p")
GROUPS = {"int8": 0, "int4": 64, "int4p": 64, "fp8": 128}  # as compiled and measured


@dataclass(frozen=True)
class PackedWeight:
    """`count` matrices [rows, cols] in tiles of 16 rows, `data` uint8[count * stride].

    gate_up: tiles of the rows/2 gate rows and of the rows/2 up rows alternate.
    row_form: what rows of x may be rounded to, as the encoding says (`rows=`): f32 (not at all) or
    int8.
    """

    data: torch.Tensor
    format: str
    rows: int
    cols: int
    count: int
    group: int
    gate_up: bool
    row_form: str = "f32"

    def __post_init__(self) -> None:
        if self.data.numel() != self.count * self.stride or self.data.dtype != torch.uint8:
            wanted = f"uint8[{self.count} * {self.stride}]"
            raise ValueError(
                f"{self.count} x {self.format}[{self.rows}, {self.cols}] takes {wanted}, "
                f"got {self.data.dtype}[{self.data.numel()}]"
            )

    @cached_property
    def layout(self) -> Layout:
        """Sizes of one matrix."""
        return Layout(self.format, self.rows, self.cols, self.group, self.gate_up)

    @cached_property
    def stride(self) -> int:
        """Bytes from one matrix of the stack to the next."""
        return self.layout.stride

    def rounds(self, dtype: torch.dtype) -> bool:
        """Whether the kernels for few tokens round rows of this dtype: of 4-bit weights only."""
        return self.row_form == "int8" and self.format in _NIBBLES and dtype != torch.float32

    @property
    def tiles(self) -> int:
        return self.layout.tiles

    @property
    def step(self) -> int:
        """Columns of a 64-byte block."""
        return STEP[self.format]

    @property
    def blocks(self) -> int:
        """64-byte blocks of a tile."""
        return self.layout.kpad // self.step

    @property
    def groups(self) -> int:
        """Group scales (int4, fp8) or codes (int4p) of a row; int8 has none."""
        return self.layout.groups

    @property
    def scales_at(self) -> int:
        """Byte offset of the group scales (int4, fp8), the codes (int4p) or row scales (int8)."""
        return self.layout.data_nbytes

    @property
    def row_scales_at(self) -> int:
        """Byte offset of the f32 scales [tiles][16] of int8 and int4p; the others have none."""
        return self.layout.data_nbytes + self.layout.scale_nbytes - 64 * self.tiles


def packed_weights(*positions: int, int8_rows: bool = False) -> Supports:
    """A `supports` that wants the operands at these positions in tiles that the GPU decodes.

    int8_rows: for the kernel whose name ends in _int8, which rounds the rows that meet at least one
    of them; the other one rounds none.
    """

    def supports(op: Op, module: Module) -> bool | Refusal:
        tiles: list[Tile] = []
        for position in positions:
            found = op.operand(position)
            assert found is not None
            type = operand_type(module, found)
            tile = Tile.of(type.encoding) if isinstance(type, TensorType) else None
            if tile is None or not gpu_decodes(tile.encoding):
                names = ", ".join(f"tile.{f}" for f in FORMATS)
                return no(f"{found} is {type}; this kernel takes {names}", op)
            tiles.append(tile)
        in_16_bits = op.results[0].tensor.dtype != "f32"
        rounds = in_16_bits and any(t.rows == "int8" and t.format in _NIBBLES for t in tiles)
        if rounds != int8_rows:
            return no(f"its weights {'take' if rounds else 'do not take'} rows rounded to int8", op)
        return True

    return supports


__all__ = ["FORMATS", "GROUPS", "PackedWeight", "packed_weights"]
