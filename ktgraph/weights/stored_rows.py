"""Rows of quantized weights as bytes, so that a recipe of whole rows moves integers and scales at
once: concat, slice, stack and reshape mean the same on `uint8 [..., rows, bytes of a row]`.

A row of GGUF blocks is the file's own bytes.  Of the other encodings it is, little-endian: the
integers, one byte each; f32 scales, one per group; of int4z the zero points, one byte per group.
These rows live for a moment, one matrix at a time: what stays are tiles.
"""

from __future__ import annotations

import torch

from ktgraph.cpu_kernels.reference_layouts import e8m0_values
from ktgraph.weights.encodings import Encoding, EncodingError, Tile, from_float, pack_matrix
from ktgraph.weights.gguf_blocks import dequantize, row_nbytes
from ktgraph.weights.relayout import StoredInts, pack_stored

INT_FORMATS = ("int8", "int4", "int4z", "mxfp4", "fp8")
_SIGNED = ("int8", "int4")


def has_rows(encoding: Encoding | None) -> bool:
    """Whether a weight in this encoding is stored as integers or blocks, row by row."""
    return encoding is not None and (encoding.name in INT_FORMATS or _gguf(encoding) != "")


def stored_row_nbytes(encoding: Encoding, columns: int) -> int:
    """Bytes of a row; raises ValueError for columns that GGUF blocks do not fill."""
    gguf = _gguf(encoding)
    if gguf:
        return row_nbytes(gguf, columns)
    groups = _groups(encoding, columns)
    return columns + 4 * groups + (groups if encoding.name == "int4z" else 0)


def to_rows(matrix: StoredInts) -> torch.Tensor:
    """uint8 [rows, bytes of a row]."""
    parts = [matrix.q.view(torch.uint8), matrix.scales.float().contiguous().view(torch.uint8)]
    if matrix.zeros is not None:
        parts.append(matrix.zeros)
    return torch.cat(parts, dim=1)


def quantized(matrix: torch.Tensor, encoding: Encoding) -> StoredInts:
    """Float values [rows, cols] in the integers of an encoding, as `from_float` rounds them."""
    parts = from_float(matrix, encoding)
    rows, cols = matrix.shape
    q, scales = parts[0], parts[1].reshape(rows, -1)
    if encoding.name in ("int4", "int4z", "mxfp4"):
        q = torch.stack([q & 15, q >> 4], dim=-1).flatten(1)[:, :cols]
    if encoding.name == "int4":
        q = q.to(torch.int8) - 8
    if encoding.name == "fp8":
        q = q.view(torch.uint8)
    if encoding.name == "mxfp4":
        scales = torch.as_tensor(e8m0_values(scales.numpy()))
    zeros = parts[2].to(torch.uint8) if encoding.name == "int4z" else None
    return StoredInts(encoding.name, encoding.get("group"), q, scales.float(), zeros)


def from_rows(rows: torch.Tensor, encoding: Encoding, columns: int) -> StoredInts:
    """What `to_rows` was given."""
    groups = _groups(encoding, columns)
    end = columns + 4 * groups
    q, scales, zeros = rows[:, :columns], rows[:, columns:end], rows[:, end:]
    return StoredInts(
        encoding.name,
        encoding.get("group"),
        q.contiguous().view(torch.int8 if encoding.name in _SIGNED else torch.uint8),
        scales.contiguous().view(torch.float32),
        zeros.contiguous() if encoding.name == "int4z" else None,
    )


def row_values(rows: torch.Tensor, encoding: Encoding, columns: int) -> torch.Tensor:
    """The f32 values [rows, columns] of one matrix's rows, by the reference decoders."""
    gguf = _gguf(encoding)
    return dequantize(rows, gguf) if gguf else from_rows(rows, encoding, columns).values()


def pack_rows(
    packed: torch.Tensor,
    number: int,
    rows: torch.Tensor,
    shape: list[int],
    encoding: Encoding,
    tile: Encoding,
) -> None:
    """Write matrix `number` of a weight of `shape`, stored in `encoding`, into its tiles.

    Exact: raises ValueError where tiles cannot hold a value or a scale.
    """
    if _gguf(encoding):
        pack_matrix(packed, number, rows, shape, tile)
        return
    found = Tile.of(tile)
    if found is None or (found.format, found.group) != (encoding.name, encoding.get("group")):
        raise EncodingError(f"{tile} does not hold the integers of {encoding}")
    count = 1
    for size in shape[:-2]:
        count *= size
    matrix = from_rows(rows, encoding, shape[-1])
    pack_stored(packed, number, matrix, count, found.gate_up)


def _gguf(encoding: Encoding) -> str:
    return encoding.name.removeprefix("gguf.") if encoding.name.startswith("gguf.") else ""


def _groups(encoding: Encoding, columns: int) -> int:
    group = encoding.get("group")
    return -(-columns // group) if group else 1


__all__ = [
    "INT_FORMATS",
    "from_rows",
    "has_rows",
    "pack_rows",
    "quantized",
    "row_values",
    "stored_row_nbytes",
    "to_rows",
]
