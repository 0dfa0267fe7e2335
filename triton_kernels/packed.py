"""`PackedWeight`: a weight in the CPU's tile layout, read by GPU kernels as it is.

docs/layouts.md specifies the bytes.  Host and GPU share them, so an expert that moves between the
two is copied, never repacked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PackedWeight:
    """`count` matrices [rows, cols] in tiles of 16 rows, `data` uint8[count * stride].

    gate_up: tiles of the rows/2 gate rows and of the rows/2 up rows alternate.
    """

    data: torch.Tensor
    format: str
    rows: int
    cols: int
    count: int
    group: int
    gate_up: bool

    @property
    def stride(self) -> int:
        """Bytes from one matrix of the stack to the next."""
        return self.data.numel() // self.count


__all__ = ["PackedWeight"]
