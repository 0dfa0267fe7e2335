"""Blocks of GGUF files: which formats there are tiles for, their sizes, and the values they mean.

A tensor's bytes are uint8 [..., rows, bytes of a row]; a row is its blocks in column order.
"""

from __future__ import annotations

import torch

GGUF_FORMATS = ("q4_0", "q8_0", "q4_k", "q5_k", "q6_k", "iq4_xs")


def block_size(format: str) -> tuple[int, int]:
    """Columns and bytes of one block."""
    from ktgraph.cpu_kernels.reference_layouts import FILE_BLOCKS

    return FILE_BLOCKS[format]


def row_nbytes(format: str, columns: int) -> int:
    """Bytes of a row; raises ValueError unless the columns are whole blocks."""
    block, nbytes = block_size(format)
    if columns % block:
        raise ValueError(f"{format} needs columns in whole blocks of {block}, got {columns}")
    return columns // block * nbytes


def dequantize(blocks: torch.Tensor, format: str) -> torch.Tensor:
    """The f32 values [..., rows, columns] of a tensor's bytes, by the gguf package."""
    import gguf

    kind = gguf.GGMLQuantizationType[format.upper()]
    return torch.as_tensor(gguf.quants.dequantize(blocks.contiguous().numpy(), kind))


__all__ = ["GGUF_FORMATS", "block_size", "dequantize", "row_nbytes"]
