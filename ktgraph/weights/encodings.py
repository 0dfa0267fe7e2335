"""The one table of encodings: how the bytes of a weight lie, how large they are, what they mean.

A plain encoding (``bf16``, ``int8(group=64)``, ``mxfp4``) keeps rows in order.  A tile encoding
(``tile.int8``) is what CPU kernels read: docs/layouts.md.  ``from_float`` gives the stored arrays,
``to_float`` the f32 values that those arrays mean.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from ktgraph.ir.parser import parse_type
from ktgraph.ir.types import DTYPES, Encoding, TensorType
from ktgraph.ops.tensor import torch_dtype
from ktgraph.weights.gguf_blocks import (
    GGUF_FORMATS,
    GGUF_OTHERS,
    block_size,
    dequantize,
    row_nbytes,
)

Stored = tuple[torch.Tensor, ...]  # e.g. the integers, then their scales
Shape = Sequence[int]


class EncodingError(ValueError):
    """An unknown encoding, a wrong parameter, or a shape that an encoding cannot hold."""


@dataclass(frozen=True)
class EncodingDef:
    """One encoding.  `params` lists the values each parameter may have; the first is the default.

    from_float takes finite values [..., rows, cols]; to_float gives f32 of the same shape.
    """

    name: str
    doc: str
    is_lossy: bool
    nbytes: Callable[[Shape, Encoding], int]
    from_float: Callable[[torch.Tensor, Encoding], Stored]
    to_float: Callable[[Stored, Shape, Encoding], torch.Tensor]
    params: Mapping[str, tuple[int | str, ...]]
    block: int = 1  # elements of a row that share one scale; 0: a whole row

    @property
    def is_tile(self) -> bool:
        return self.name.startswith("tile.")

    @property
    def is_dense(self) -> bool:
        return self.name in DTYPES


_TABLE: dict[str, EncodingDef] = {}


def register_encoding(definition: EncodingDef) -> EncodingDef:
    """Add an encoding to the table; raises ValueError for a name that is taken."""
    if definition.name in _TABLE:
        raise ValueError(f"encoding {definition.name} is declared twice")
    _TABLE[definition.name] = definition
    return definition


def all_encodings() -> dict[str, EncodingDef]:
    """Every encoding by name."""
    return dict(_TABLE)


def encoding_def(encoding: Encoding) -> EncodingDef:
    """The table's entry; raises EncodingError for an unknown name or parameter value."""
    found = _TABLE.get(encoding.name)
    if found is None:
        close = difflib.get_close_matches(encoding.name, _TABLE, n=3) or sorted(_TABLE)
        raise EncodingError(f"unknown encoding {encoding} (did you mean {', '.join(close)}?)")
    for key, value in encoding.params:
        allowed = found.params.get(key)
        if allowed is None:
            names = ", ".join(found.params) or "none"
            raise EncodingError(f"encoding {encoding}: unknown parameter {key} (known: {names})")
        if value not in allowed:
            choices = ", ".join(map(str, allowed))
            raise EncodingError(f"encoding {encoding}: {key} must be one of {choices}")
    return found


def parse_encoding(text: str) -> Encoding:
    """Read ``int4(group=64)``, with defaults filled in; raises EncodingError or ParseError."""
    given = parse_type(f"f32[]<{text}>")
    assert isinstance(given, TensorType)
    assert given.encoding is not None
    return with_defaults(given.encoding)


def with_defaults(encoding: Encoding) -> Encoding:
    """The encoding with every parameter in the table's order; "no", group 0 and absent are one."""
    found, given = encoding_def(encoding), dict(encoding.params)
    values = {key: given.get(key, allowed[0]) for key, allowed in found.params.items()}
    return Encoding(encoding.name, tuple((k, v) for k, v in values.items() if v not in ("no", 0)))


def nbytes(type: TensorType, bindings: Mapping[str, int]) -> int:
    """Bytes of a tensor as it is stored."""
    shape = [d.at(bindings) for d in type.dims]
    return shape_nbytes(shape, type.encoding or Encoding(type.dtype))


def shape_nbytes(shape: Shape, encoding: Encoding) -> int:
    """Bytes of a weight of this shape; raises EncodingError when the encoding cannot hold it."""
    return encoding_def(encoding).nbytes(shape, encoding)


def from_float(values: torch.Tensor, encoding: Encoding) -> Stored:
    """The stored arrays of finite float values [..., rows, cols]."""
    found = encoding_def(encoding)
    if not found.is_dense and not bool(values.isfinite().all()):
        raise EncodingError(f"{encoding}: the values hold inf or NaN")
    return found.from_float(values, encoding)


def to_float(stored: Stored, shape: Shape, encoding: Encoding) -> torch.Tensor:
    """The f32 values of stored arrays."""
    return encoding_def(encoding).to_float(stored, shape, encoding)


def round_trip(values: torch.Tensor, encoding: Encoding) -> torch.Tensor:
    """What is left of values [..., rows, cols] after storing them, in their own dtype."""
    stored = from_float(values.float(), encoding)
    return to_float(stored, values.shape, encoding).to(values.dtype)


# -- dense: one element after the other, row-major ------------------------------------------------
def _dense(dtype: str) -> EncodingDef:
    kept = torch_dtype(dtype)
    return EncodingDef(
        dtype,
        f"dense {dtype}, row-major",
        dtype not in ("f32", "f64"),
        lambda shape, encoding: prod(shape) * DTYPES[dtype],
        lambda values, encoding: (values.to(kept),),
        lambda stored, shape, encoding: stored[0].float().reshape(tuple(shape)),
        {},
    )


# -- plain integers with scales -------------------------------------------------------------------
def _matrices(values: torch.Tensor) -> torch.Tensor:
    """[count, rows, cols] of [..., rows, cols]."""
    if values.dim() < 2:
        raise EncodingError(f"quantized weights have rows and columns, got {list(values.shape)}")
    return values.reshape(-1, *values.shape[-2:])


def quantize_matrix(matrix: torch.Tensor, encoding: Encoding) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers i8[rows, cols] and f32 scales [rows, groups] of one f32 matrix (docs/layouts.md)."""
    from ktgraph.cpu_kernels import quantize

    format = encoding.name.removeprefix("tile.")
    source = matrix.detach().float().contiguous().numpy()
    q, scales = quantize(format, encoding.get("group"), source)
    return torch.as_tensor(q), torch.as_tensor(scales)


def _quantize(values: torch.Tensor, encoding: Encoding) -> tuple[torch.Tensor, torch.Tensor]:
    pairs = [quantize_matrix(m, encoding) for m in _matrices(values)]
    lead = values.shape[:-2]
    q, scales = (torch.stack(parts) for parts in zip(*pairs, strict=True))
    return q.reshape(values.shape), scales.reshape(*lead, values.shape[-2], -1)


def _groups(shape: Shape, encoding: Encoding) -> int:
    """Scales of one row."""
    group = encoding.get("group")
    return -(-shape[-1] // group) if group else 1


def _per_column(scales: torch.Tensor, shape: Shape, encoding: Encoding) -> torch.Tensor:
    """f32 scales (or zero points) [..., groups] for each column."""
    group = encoding.get("group") or shape[-1]
    return scales.float().repeat_interleave(group, dim=-1)[..., : shape[-1]]


def _int8_from(values: torch.Tensor, encoding: Encoding) -> Stored:
    q, scales = _quantize(values, encoding)
    return q, scales if encoding.get("group") else scales[..., 0]


def _int8_to(stored: Stored, shape: Shape, encoding: Encoding) -> torch.Tensor:
    q, scales = stored
    by_group = scales if encoding.get("group") else scales[..., None]
    return (q.float() * _per_column(by_group, shape, encoding)).reshape(tuple(shape))


def _int8_nbytes(shape: Shape, encoding: Encoding) -> int:
    return prod(shape) + 4 * prod(shape[:-1]) * _groups(shape, encoding)


def _int4_from(values: torch.Tensor, encoding: Encoding) -> Stored:
    """Nibbles hold q + 8; scales are bf16."""
    q, scales = _quantize(values, encoding)
    return _two_a_byte((q + 8).to(torch.uint8), 8), scales.to(torch.bfloat16)


def _int4_to(stored: Stored, shape: Shape, encoding: Encoding) -> torch.Tensor:
    packed, scales = stored
    q = _from_bytes(packed, shape).float() - 8
    return (q * _per_column(scales, shape, encoding)).reshape(tuple(shape))


def _two_a_byte(nibbles: torch.Tensor, end: int) -> torch.Tensor:
    """Bytes hold columns 2c (low nibble) and 2c+1 (high); an odd end is padded by `end`."""
    if nibbles.shape[-1] % 2:
        nibbles = torch.nn.functional.pad(nibbles, (0, 1), value=end)
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def _from_bytes(packed: torch.Tensor, shape: Shape) -> torch.Tensor:
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)[..., : shape[-1]]


def _nibbles_nbytes(per_group: int) -> Callable[[Shape, Encoding], int]:
    def count(shape: Shape, encoding: Encoding) -> int:
        rows, cols = prod(shape[:-1]), shape[-1]
        return rows * (-(-cols // 2) + per_group * _groups(shape, encoding))

    return count


def _by_reference(values: torch.Tensor, encoding: Encoding) -> Stored:
    """What the specification makes of each matrix: integers, scales and, of int4z, zero points."""
    from ktgraph.cpu_kernels import reference_layouts

    quantize = {
        "int4z": reference_layouts.quantize_int4z,
        "mxfp4": reference_layouts.quantize_mxfp4,
        "fp8": reference_layouts.quantize_fp8,
    }[encoding.name]
    found = [quantize(m.numpy(), encoding.get("group")) for m in _matrices(values.float())]
    each = (torch.as_tensor(np.stack(parts)) for parts in zip(*found, strict=True))
    return tuple(part.reshape(*values.shape[:-1], -1) for part in each)


def _int4z_from(values: torch.Tensor, encoding: Encoding) -> Stored:
    q, scales, zeros = _by_reference(values, encoding)
    return _two_a_byte(q, 0), scales, zeros


def _int4z_to(stored: Stored, shape: Shape, encoding: Encoding) -> torch.Tensor:
    packed, scales, zeros = stored
    q = _from_bytes(packed, shape).float() - _per_column(zeros, shape, encoding)
    return (q * _per_column(scales, shape, encoding)).reshape(tuple(shape))


def _mxfp4_from(values: torch.Tensor, encoding: Encoding) -> Stored:
    codes, scales = _by_reference(values, encoding)
    return _two_a_byte(codes, 0), scales


def _mxfp4_to(stored: Stored, shape: Shape, encoding: Encoding) -> torch.Tensor:
    from ktgraph.cpu_kernels.reference_layouts import E2M1_TWICE, e8m0_values

    packed, scales = stored
    twice = torch.as_tensor(E2M1_TWICE)[_from_bytes(packed, shape).long()].float()
    values = torch.as_tensor(e8m0_values(scales.numpy()))
    return (twice * (_per_column(values, shape, encoding) * 0.5)).reshape(tuple(shape))


def _fp8_from(values: torch.Tensor, encoding: Encoding) -> Stored:
    codes, scales = _by_reference(values, encoding)
    return codes.view(torch.float8_e4m3fn), scales


def _fp8_to(stored: Stored, shape: Shape, encoding: Encoding) -> torch.Tensor:
    codes, scales = stored
    return (codes.float() * _per_column(scales, shape, encoding)).reshape(tuple(shape))


def _int4p_from(values: torch.Tensor, encoding: Encoding) -> Stored:
    """Nibbles two columns a byte, as int4; then codes (u8) and row scales: docs/layouts.md."""
    from ktgraph.cpu_kernels import reference_layouts

    tile = Encoding("tile.int4p", encoding.params)
    rows, cols = values.shape[-2:]
    parts: list[tuple[np.ndarray[Any, Any], ...]] = []
    for matrix in _matrices(values):
        packed = empty_packed((rows, cols), tile)
        pack_matrix(packed, 0, matrix, (rows, cols), tile)
        parts.append(
            reference_layouts.int4p_parts(packed.numpy(), rows, cols, encoding.get("group"))
        )
    nibbles, codes, scales = (
        torch.as_tensor(np.stack(p)).reshape(*values.shape[:-2], *p[0].shape)
        for p in zip(*parts, strict=True)
    )
    if cols % 2:
        nibbles = torch.nn.functional.pad(nibbles, (0, 1))
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4), codes, scales


def _int4p_to(stored: Stored, shape: Shape, encoding: Encoding) -> torch.Tensor:
    packed, codes, scales = stored
    nibbles = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)[..., : shape[-1]]
    code = codes.int().repeat_interleave(encoding.get("group"), dim=-1)[..., : shape[-1]]
    factor, offset = (code & 15).float() * scales[..., None], 8 - (code >> 7)
    return ((nibbles.int() - offset).float() * factor).reshape(tuple(shape))


def _int4p_nbytes(shape: Shape, encoding: Encoding) -> int:
    rows, cols = prod(shape[:-1]), shape[-1]
    return rows * (-(-cols // 2) + -(-cols // encoding.get("group")) + 4)


# -- blocks of a GGUF file ------------------------------------------------------------------------
def _gguf_nbytes(shape: Shape, encoding: Encoding) -> int:
    return prod(shape[:-1]) * row_nbytes(_gguf_format(encoding), shape[-1])


def _gguf_from(values: torch.Tensor, encoding: Encoding) -> Stored:
    raise EncodingError(f"{encoding} is read from a GGUF file; nothing here quantizes to it")


def _gguf_to(stored: Stored, shape: Shape, encoding: Encoding) -> torch.Tensor:
    return dequantize(stored[0], _gguf_format(encoding)).reshape(tuple(shape))


def _gguf_format(encoding: Encoding) -> str:
    return encoding.name.removeprefix("gguf.")


# -- tiles: what CPU kernels read -----------------------------------------------------------------
@dataclass(frozen=True)
class Tile:
    """The parameters of a tile encoding as the native packer and kernels take them."""

    format: str  # f32, bf16, f16, fp8, int8, int4, int4p, int4z, mxfp4, or one of GGUF blocks
    group: int  # columns per scale; 0: none, or one per row
    gate_up: bool  # gate and up tiles alternate
    rows: str = "f32"  # what rows of x are rounded to: f32 (not at all), bf16, int8

    @staticmethod
    def of(encoding: Encoding | None) -> Tile | None:
        """None when the encoding is not a tile encoding."""
        if encoding is None or not encoding.name.startswith("tile."):
            return None
        params, name = dict(encoding.params), encoding.name.removeprefix("tile.")
        rows = params.get("rows", "int8" if name in INT8_ROWS_ONLY else "f32")
        return Tile(name, encoding.get("group"), params.get("gate_up") == "yes", str(rows))

    @property
    def encoding(self) -> Encoding:
        params: list[tuple[str, int | str]] = [("group", self.group)] if self.group else []
        params += [("gate_up", "yes")] if self.gate_up else []
        says_rows = self.rows != "f32" and self.format not in INT8_ROWS_ONLY
        params += [("rows", self.rows)] if says_rows else []
        return Encoding(f"tile.{self.format}", tuple(params))


def _tile(encoding: Encoding) -> Tile:
    found = Tile.of(encoding)
    assert found is not None
    return found


def _stack(shape: Shape, encoding: Encoding) -> tuple[int, int, int]:
    """Matrices, rows, columns of a weight [rows, cols] or [..., rows, cols]."""
    if len(shape) < 2:
        raise EncodingError(f"{encoding} holds matrices, got the shape {list(shape)}")
    if _tile(encoding).gate_up and shape[-2] % 2:
        raise EncodingError(f"{encoding}: gate and up rows are as many, got {shape[-2]} rows")
    return prod(shape[:-2]), shape[-2], shape[-1]


def _tile_nbytes(shape: Shape, encoding: Encoding) -> int:
    from ktgraph.cpu_kernels.reference_layouts import Layout

    count, rows, cols = _stack(shape, encoding)
    tile = _tile(encoding)
    return count * Layout(tile.format, rows, cols, tile.group, tile.gate_up).stride


def empty_packed(shape: Shape, encoding: Encoding) -> torch.Tensor:
    """Aligned bytes for a packed weight; contents unspecified until every matrix is packed."""
    from ktgraph.cpu_kernels import empty_packed as native_empty

    return torch.as_tensor(native_empty(_tile_nbytes(shape, encoding)))


def pack_matrix(
    packed: torch.Tensor, number: int, matrix: torch.Tensor, shape: Shape, encoding: Encoding
) -> None:
    """Write matrix `number` ([rows, cols], any float) of a weight of `shape` into its bytes.

    An integer format quantizes here, so give the values before any quantization.  A format of GGUF
    blocks takes the file's bytes (uint8 [rows, bytes of a row]) and keeps every bit.
    """
    from ktgraph.cpu_kernels import pack_into, repack_into

    count, rows, cols = _stack(shape, encoding)
    tile, at = _tile(encoding), packed.data_ptr()
    if tile.format not in GGUF_FORMATS:
        source = _native_source(matrix)
        pack_into(at, number, tile.format, rows, cols, tile.group, count, tile.gate_up, source)
        return
    if matrix.dtype != torch.uint8:
        raise EncodingError(f"{encoding} is packed from a GGUF file's blocks, got {matrix.dtype}")
    blocks = matrix.contiguous().numpy()
    repack_into(at, number, tile.format, rows, cols, 0, count, tile.gate_up, blocks)


def _native_source(matrix: torch.Tensor) -> Any:
    kept = matrix.dtype in (torch.float32, torch.bfloat16)
    dense = matrix.detach() if kept else matrix.detach().float()
    return dense if dense.stride(-1) == 1 or dense.shape[-1] == 1 else dense.contiguous()


def _tile_from(values: torch.Tensor, encoding: Encoding) -> Stored:
    packed = empty_packed(values.shape, encoding)
    for number, matrix in enumerate(_matrices(values)):
        pack_matrix(packed, number, matrix, values.shape, encoding)
    return (packed,)


def _tile_to(stored: Stored, shape: Shape, encoding: Encoding) -> torch.Tensor:
    from ktgraph.cpu_kernels import unpack

    count, rows, cols = _stack(shape, encoding)
    tile, at = _tile(encoding), stored[0].data_ptr()
    found: list[np.ndarray[Any, Any]] = [
        unpack(at, i, tile.format, rows, cols, tile.group, count, tile.gate_up)
        for i in range(count)
    ]
    return torch.as_tensor(np.stack(found)).reshape(tuple(shape))


# Tile formats whose kernels take rows of x rounded to int8 and no other: the encoding need not say.
INT8_ROWS_ONLY = ("int4p", *GGUF_FORMATS)
_GROUPS: tuple[int | str, ...] = (32, 64, 128)
_YES_NO: tuple[int | str, ...] = ("no", "yes")

for _dtype in DTYPES:
    register_encoding(_dense(_dtype))
register_encoding(
    EncodingDef(
        "int8", "8-bit integers, one f32 scale per row or group of columns: absmax / 127",
        True, _int8_nbytes, _int8_from, _int8_to, {"group": (0, *_GROUPS)}, block=0,
    )
)  # fmt: skip
register_encoding(
    EncodingDef(
        "int4", "4-bit integers -8..7, one bf16 scale per group of columns",
        True, _nibbles_nbytes(2), _int4_from, _int4_to, {"group": _GROUPS}, block=32,
    )
)  # fmt: skip
register_encoding(
    EncodingDef(
        "int4p", "4-bit integers with an integer factor per group in one f32 scale per row",
        True, _int4p_nbytes, _int4p_from, _int4p_to, {"group": _GROUPS}, block=0,
    )
)  # fmt: skip
register_encoding(
    EncodingDef(
        "int4z", "4-bit integers 0..15, an f16 scale and a zero point per group of columns",
        True, _nibbles_nbytes(3), _int4z_from, _int4z_to, {"group": _GROUPS}, block=32,
    )
)  # fmt: skip
register_encoding(
    EncodingDef(
        "mxfp4", "e2m1 floats, one power of two (e8m0) per 32 columns",
        True, _nibbles_nbytes(1), _mxfp4_from, _mxfp4_to, {"group": (32,)}, block=32,
    )
)  # fmt: skip
register_encoding(
    EncodingDef(
        "fp8", "e4m3 floats, one f32 scale per 128 columns: absmax / 448",
        True, _int8_nbytes, _fp8_from, _fp8_to, {"group": (128,)}, block=128,
    )
)  # fmt: skip
for _format in (*GGUF_FORMATS, *GGUF_OTHERS):
    register_encoding(
        EncodingDef(
            f"gguf.{_format}", f"blocks of {_format.upper()} as a GGUF file holds them",
            True, _gguf_nbytes, _gguf_from, _gguf_to, {}, block=block_size(_format)[0],
        )
    )  # fmt: skip
# tile format -> its groups, and what rows of x may be rounded to ("no" is not at all)
_Values = tuple[int | str, ...]
_TILE_FORMATS: Mapping[str, tuple[_Values, _Values]] = {
    "f32": ((), ("no",)),
    "bf16": ((), ("no", "bf16")),
    "f16": ((), ("no",)),
    "fp8": ((128,), ("no", "bf16")),
    "int8": ((0, *_GROUPS), ("no", "int8")),
    "int4": (_GROUPS, ("no", "int8")),
    "int4p": (_GROUPS, ("no",)),
    "int4z": (_GROUPS, ("no", "int8")),
    "mxfp4": ((32,), ("no", "int8")),
    **{_format: ((), ("no",)) for _format in GGUF_FORMATS},
}
for _format, (_choices, _rows) in _TILE_FORMATS.items():
    register_encoding(
        EncodingDef(
            f"tile.{_format}", f"{_format} in tiles of 16 rows (docs/layouts.md)",
            _format != "f32", _tile_nbytes, _tile_from, _tile_to,
            ({"group": _choices} if _choices else {}) | {"gate_up": _YES_NO, "rows": _rows},
        )
    )  # fmt: skip

__all__ = [
    "GGUF_FORMATS",
    "INT8_ROWS_ONLY",
    "Encoding",
    "EncodingDef",
    "EncodingError",
    "Stored",
    "Tile",
    "all_encodings",
    "empty_packed",
    "encoding_def",
    "from_float",
    "nbytes",
    "pack_matrix",
    "parse_encoding",
    "quantize_matrix",
    "register_encoding",
    "round_trip",
    "shape_nbytes",
    "to_float",
    "with_defaults",
]
