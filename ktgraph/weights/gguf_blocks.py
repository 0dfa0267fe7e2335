"""Blocks of GGUF files: which formats there are, their sizes, and the values they mean.

A tensor's bytes are uint8 [..., rows, bytes of a row]; a row is its blocks in column order.
"""

from __future__ import annotations

import numpy as np
import torch

GGUF_FORMATS = ("q4_0", "q8_0", "q4_k", "q5_k", "q6_k", "iq4_xs")  # those that there are tiles for
GGUF_OTHERS = (
    "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "iq4_nl", "iq3_s", "iq3_xxs", "iq2_s", "iq2_xs",
    "iq2_xxs", "iq1_s", "iq1_m", "mxfp4",
)  # fmt: skip
# Of random blocks: where a block's f16 scale (and the scale of its minima) lies, the scale that
# brings values near 1, and how many times that the minima's is.
_RANDOM = {
    "q4_0": ((0,), 0.2, 0.0),
    "q8_0": ((0,), 0.0135, 0.0),
    "q4_k": ((0, 2), 0.006, 7.5),
    "q5_k": ((0, 2), 0.003, 15.5),
    "q6_k": ((208,), 0.0007, 0.0),
    "iq4_xs": ((0,), 0.0007, 0.0),
}


def block_size(format: str) -> tuple[int, int]:
    """Columns and bytes of one block."""
    import gguf

    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[format.upper()]]


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


_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def as_q8_0(blocks: torch.Tensor, format: str) -> torch.Tensor:
    """Blocks of q5_0 or iq4_nl as blocks of q8_0 with the same values, bit by bit.

    All three have 32 columns and an f16 scale; element i lies in the low nibble of byte i, element
    i + 16 in its high nibble, the fifth bits of q5_0 in a word before.
    """
    nbytes = block_size(format)[1]
    each = blocks.reshape(*blocks.shape[:-1], -1, nbytes)
    nibbles = each[..., nbytes - 16 :]
    q = torch.cat([nibbles & 15, nibbles >> 4], dim=-1)
    if format == "q5_0":
        fifth = each[..., 2:6, None] >> torch.arange(8, dtype=torch.uint8) & 1
        signed = (q | fifth.flatten(-2) << 4).to(torch.int8) - 16
    else:
        signed = torch.tensor(_IQ4_VALUES, dtype=torch.int8)[q.long()]
    return torch.cat([each[..., :2], signed.view(torch.uint8)], dim=-1).flatten(-2)


def random_blocks(
    format: str, rows: int, columns: int, rng: np.random.Generator, size: float
) -> torch.Tensor:
    """uint8 [rows, bytes of a row]: any bits under finite scales; values of about `size`."""
    block, nbytes = block_size(format)
    places, unit, minimum = _RANDOM[format]
    each = rng.integers(0, 256, (rows, columns // block, nbytes), np.uint8)
    scale = size * unit * rng.uniform(0.5, 1.5, each.shape[:2])
    for place, factor in zip(places, (1.0, minimum), strict=False):
        each[..., place : place + 2] = (scale * factor).astype(np.float16)[..., None].view(np.uint8)
    return torch.as_tensor(each.reshape(rows, -1))


__all__ = [
    "GGUF_FORMATS",
    "GGUF_OTHERS",
    "as_q8_0",
    "block_size",
    "dequantize",
    "random_blocks",
    "row_nbytes",
]
