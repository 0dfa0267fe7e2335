"""Packed weight layouts in plain numpy: the C++ packer must give the same bytes.

``docs/layouts.md`` says why.  All arithmetic is f32, one operation at a time, in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

TILE_ROWS = 16
# Columns per 64-byte block
STEP = {
    "f32": 1, "bf16": 2, "f16": 2, "int8": 4, "fp8": 4, "int4": 8, "int4p": 8, "int4z": 8,
    "mxfp4": 8,
}  # fmt: skip
PAD = {  # columns are padded to these
    "f32": 1, "bf16": 32, "f16": 32, "int8": 64, "fp8": 64, "int4": 64, "int4p": 64, "int4z": 64,
    "mxfp4": 64,
}  # fmt: skip
GROUPS = {  # columns that may share a scale; others have 0
    "int8": (0, 32, 64, 128), "fp8": (128,), "int4": (32, 64, 128), "int4p": (32, 64, 128),
    "int4z": (32, 64, 128), "mxfp4": (32,),
}  # fmt: skip
E2M1_TWICE = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
# GGUF formats: columns and bytes of a block of the file; columns and 64-byte lines of a record
FILE_BLOCKS = {"q4_0": (32, 18), "q8_0": (32, 34), "q4_k": (256, 144), "q5_k": (256, 176),
               "q6_k": (256, 210), "iq4_xs": (256, 136)}  # fmt: skip
RECORDS = {"q4_0": (64, 9), "q8_0": (64, 17), "q4_k": (256, 36), "q5_k": (256, 44),
           "q6_k": (256, 53), "iq4_xs": (256, 34)}  # fmt: skip
# Candidates for an int4 scale: the group's largest element divided by each of these.
DIVISORS = (-8, -7.5, -8.5, -7, -9, -6.5, -9.5, -10, 7, 7.5, 6.5, 8, 6, 8.5, 9, 9.5)
# The same for the scale of an int4p row, whose largest group then has a factor of about 11 to 15.
ROW_DIVISORS = (105, 112, 98, 119, 91, 126, 84)


def _up(n: int, to: int) -> int:
    return -(-n // to) * to


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """f32 -> bf16 as uint16, round to nearest even (finite values)."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return (
        (u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    ).astype(np.uint16)


def bf16_values(bits: np.ndarray) -> np.ndarray:
    """bf16 as uint16 -> f32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


@dataclass(frozen=True)
class Layout:
    """Sizes of one packed matrix."""

    format: str
    rows: int
    cols: int
    group: int = 0
    gate_up: bool = False

    def __post_init__(self) -> None:
        if self.format not in (*STEP, *RECORDS):
            names = ", ".join((*STEP, *RECORDS))
            raise ValueError(f"unknown format {self.format!r}; one of {names}")
        if self.cols % FILE_BLOCKS.get(self.format, (1,))[0]:
            whole = FILE_BLOCKS[self.format][0]
            raise ValueError(f"{self.format} needs columns in whole blocks of {whole}")
        allowed = GROUPS.get(self.format, (0,))
        if self.group not in allowed:
            choices = ", ".join(map(str, allowed))
            raise ValueError(f"{self.format} with group {self.group}: expected one of {choices}")

    @property
    def tiles(self) -> int:
        if self.gate_up:
            return 2 * (_up(self.rows // 2, TILE_ROWS) // TILE_ROWS)
        return _up(self.rows, TILE_ROWS) // TILE_ROWS

    @property
    def kpad(self) -> int:
        pad = PAD[self.format] if self.format in PAD else RECORDS[self.format][0]
        return _up(self.cols, pad)

    @property
    def groups(self) -> int:
        return -(-self.kpad // self.group) if self.group else 0

    @property
    def data_nbytes(self) -> int:
        columns, lines = RECORDS.get(self.format) or (STEP[self.format], 1)
        return self.tiles * self.kpad // columns * lines * 64

    @property
    def scale_nbytes(self) -> int:
        codes = self.tiles * self.groups * TILE_ROWS
        return {
            "int8": 4 * codes if self.group else self.tiles * 64,
            "fp8": 4 * codes,
            "int4": 2 * codes,
            "int4p": _up(codes, 64) + self.tiles * 64,
            "int4z": _up(2 * codes, 64) + codes,
            "mxfp4": codes,
        }.get(self.format, 0)

    @property
    def stride(self) -> int:
        """Bytes from one matrix of a stack to the next."""
        n = _up(self.data_nbytes + self.scale_nbytes, 64)
        return n + 64 if n % 4096 == 0 else n

    def row_order(self) -> np.ndarray:
        """Logical row at every packed row; -1 is padding."""
        parts = 2 if self.gate_up else 1
        half = self.rows // parts
        order = np.full((self.tiles // parts, parts, TILE_ROWS), -1)
        for p in range(parts):
            padded = np.full(_up(half, TILE_ROWS), -1)
            padded[:half] = np.arange(half) + p * half
            order[:, p] = padded.reshape(-1, TILE_ROWS)
        return order.reshape(-1)


def quantize_int8(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows -> int8 values and one f32 scale per row."""
    scale = np.abs(w).max(axis=1, initial=0).astype(np.float32) / np.float32(127)
    safe = np.where(scale == 0, np.float32(1), scale)
    q = np.rint(np.clip(w / safe[:, None], np.float32(-127), np.float32(127)))
    return q.astype(np.int8), scale


def _parts(w: np.ndarray, group: int) -> list[np.ndarray]:
    return [w[:, k : k + group] for k in range(0, w.shape[1], group)]


def quantize_int8_groups(w: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows -> int8 values and f32 scales [rows, groups]."""
    pairs = [quantize_int8(part) for part in _parts(w, group)]
    return np.hstack([q for q, _ in pairs]), np.stack([s for _, s in pairs], axis=1)


def quantize_int4z(w: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows -> values 0..15 (uint8), f16 scales and zero points 0..15 (uint8) [rows, groups]."""
    found: list[tuple[np.ndarray, ...]] = []
    for part in _parts(w, group):
        low, high = part.min(axis=1, initial=0), part.max(axis=1, initial=0)
        s = np.minimum((high - low) / np.float32(15), np.float32(65504)).astype(np.float16)
        inv = _inverse(s.astype(np.float32))
        zero = np.rint(np.clip((np.float32(0) - low) * inv, np.float32(0), np.float32(15)))
        q = np.rint(np.clip(part * inv[:, None] + zero[:, None], np.float32(0), np.float32(15)))
        found.append((q.astype(np.uint8), s, zero.astype(np.uint8)))
    q, scales, zeros = zip(*found, strict=True)
    return np.hstack(q), np.stack(scales, axis=1), np.stack(zeros, axis=1)


def quantize_mxfp4(w: np.ndarray, group: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Rows -> e2m1 codes (uint8) and e8m0 scales (uint8: 2^(code - 127)) [rows, groups]."""
    codes, scales = [], []
    for part in _parts(w, group):
        peak = np.abs(part).max(axis=1).astype(np.float32)
        e = np.maximum((peak.view(np.uint32) >> np.uint32(23)).astype(np.int32) - 2, 0)
        inverse = ((254 - e).astype(np.uint32) << np.uint32(23)).view(np.float32)
        v = np.minimum(np.abs(part) * inverse[:, None], np.float32(6))
        half = np.float32(0.5)
        code = np.where(v < 4, np.rint(v) + np.float32(2), np.rint(v * half) + np.float32(4))
        code = np.where(v < 2, np.rint(v + v), code) + np.where(part < 0, 8, 0)
        codes.append(code.astype(np.uint8))
        scales.append(e.astype(np.uint8))
    return np.hstack(codes), np.stack(scales, axis=1)


def e8m0_values(codes: np.ndarray) -> np.ndarray:
    """Exponent codes (uint8) -> f32; 2^-127 is denormal."""
    bits = codes.astype(np.uint32) << np.uint32(23)
    return np.where(codes == 0, np.uint32(0x400000), bits).astype(np.uint32).view(np.float32)


def e4m3_codes(x: np.ndarray) -> np.ndarray:
    """f32 of magnitude at most 448 -> e4m3 codes (uint8), round to nearest even."""
    v = np.abs(np.ascontiguousarray(x, np.float32))
    bits = v.view(np.uint32)
    odd = (bits >> np.uint32(20)) & np.uint32(1)
    normal = ((bits + np.uint32(0x7FFFF) + odd) >> np.uint32(20)).astype(np.int32) - 960
    code = np.where(v < 2.0**-6, np.rint(v * np.float32(512)).astype(np.int32), normal)
    return (code + np.where(x < 0, 128, 0)).astype(np.uint8)


def e4m3_values(codes: np.ndarray) -> np.ndarray:
    """e4m3 codes (uint8) -> f32."""
    exponent, mantissa = (codes >> 3 & 15).astype(np.int32), (codes & 7).astype(np.float32)
    normal = np.ldexp(np.float32(8) + mantissa, exponent - 10).astype(np.float32)
    v = np.where(exponent == 0, mantissa * np.float32(2.0**-9), normal)
    return np.where(codes & 128, -v, v).astype(np.float32)


def quantize_fp8(w: np.ndarray, group: int = 128) -> tuple[np.ndarray, np.ndarray]:
    """Rows -> e4m3 codes (uint8) and f32 scales [rows, groups]."""
    codes, scales = [], []
    for part in _parts(w, group):
        scale = np.abs(part).max(axis=1).astype(np.float32) / np.float32(448)
        safe = np.where(scale == 0, np.float32(1), scale)
        codes.append(e4m3_codes(np.clip(part / safe[:, None], np.float32(-448), np.float32(448))))
        scales.append(scale)
    return np.hstack(codes), np.stack(scales, axis=1)


def _inverse(s: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", over="ignore"):
        inv = np.float32(1) / s
    return np.where(np.isfinite(inv), inv, np.float32(0))


def _round_int4(w: np.ndarray, inv: np.ndarray) -> np.ndarray:
    return np.rint(np.clip(w * inv, np.float32(-8), np.float32(7)))


def _group_scale(w: np.ndarray) -> np.ndarray:
    """Rows of one group -> the candidate scale of least squared error, bf16-valued f32."""
    rows = np.arange(len(w))
    peak = w[rows, np.abs(w).argmax(axis=1)]
    best = least = np.zeros(len(w), np.float32)
    for i, d in enumerate(DIVISORS):
        s = np.where(peak == 0, np.float32(0), bf16_values(bf16_bits(peak / np.float32(d))))
        inv = _inverse(s)
        error = np.zeros(len(w), np.float32)
        for k in range(w.shape[1]):
            e = w[:, k] - _round_int4(w[:, k], inv) * s
            error = error + e * e
        better = np.ones(len(w), bool) if i == 0 else error < least
        best, least = np.where(better, s, best), np.where(better, error, least)
    return best.astype(np.float32)


def quantize_int4(w: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows -> int4 values (as int8) and bf16-valued f32 scales [rows, groups]."""
    q = np.zeros(w.shape, np.int8)
    scales = []
    for k in range(0, w.shape[1], group):
        part = w[:, k : k + group]
        s = _group_scale(part)
        q[:, k : k + group] = _round_int4(part, _inverse(s)[:, None])
        scales.append(s)
    return q, np.stack(scales, axis=1)


def _bounds_int4p(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of one group -> largest magnitude; lowest integer: -7 where that element is positive."""
    peak = w[np.arange(len(w)), np.abs(w).argmax(axis=1)]
    return np.abs(peak), np.where(peak > 0, np.float32(-7), np.float32(-8))


def _best_factor(w: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of one group, the rows' scales -> the factor (0..15) of least error, and that error."""
    peak, low = _bounds_int4p(w)
    guess = np.rint(peak * _inverse(np.float32(7.5) * scale))
    best = least = np.zeros(len(w), np.float32)
    for i, step in enumerate((0, -1, -2, 1)):
        factor = np.where(peak == 0, np.float32(0), np.clip(guess + np.float32(step), 1, 15))
        s = factor.astype(np.float32) * scale
        error = np.zeros(len(w), np.float32)
        for k in range(w.shape[1]):
            e = w[:, k] - _round_int4p(w[:, k], _inverse(s), low) * s
            error = error + e * e
        better = np.ones(len(w), bool) if i == 0 else error < least
        best, least = np.where(better, factor, best), np.where(better, error, least)
    return best.astype(np.float32), least


def _round_int4p(w: np.ndarray, inv: np.ndarray, low: np.ndarray) -> np.ndarray:
    return np.rint(np.clip(w * inv, low, low + np.float32(15)))


def _row_scale(w: np.ndarray, group: int) -> np.ndarray:
    """Rows -> the candidate scale of least squared error."""
    top = np.abs(w).max(axis=1, initial=0).astype(np.float32)
    best = least = np.zeros(len(w), np.float32)
    for i, d in enumerate(ROW_DIVISORS):
        scale, error = top / np.float32(d), np.zeros(len(w), np.float32)
        for part in _parts(w, group):
            error = error + _best_factor(part, scale)[1]
        better = np.ones(len(w), bool) if i == 0 else error < least
        best, least = np.where(better, scale, best), np.where(better, error, least)
    return best.astype(np.float32)


def quantize_int4p(
    w: np.ndarray, group: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Rows -> int4 values, factors and offsets [rows, groups], and one f32 scale per row.

    A value is ``q * factor * scale``; q lies in -offset .. 15 - offset.
    """
    q = np.zeros(w.shape, np.int8)
    scale = _row_scale(w, group)
    factors, offsets = [], []
    for k in range(0, w.shape[1], group):
        part = w[:, k : k + group]
        factor, _ = _best_factor(part, scale)
        _, low = _bounds_int4p(part)
        inv = _inverse(factor * scale)
        q[:, k : k + group] = _round_int4p(part, inv[:, None], low[:, None])
        factors.append(factor)
        offsets.append(-low)
    return q, np.stack(factors, axis=1), np.stack(offsets, axis=1), scale


def _blocks(values: np.ndarray, step: int) -> np.ndarray:
    """[rows, cols] in packed row order -> [tiles, blocks, 16, step]."""
    rows, cols = values.shape
    return values.reshape(rows // TILE_ROWS, TILE_ROWS, cols // step, step).transpose(0, 2, 1, 3)


def _nibbles(u: np.ndarray) -> np.ndarray:
    """Values 0..15 in packed row order -> blocks of bytes: column k low, column k + 4 high."""
    blocks = _blocks(u.astype(np.uint8), 8)
    return blocks[..., :4] | (blocks[..., 4:] << 4)


def _by_group(values: np.ndarray, lay: Layout) -> np.ndarray:
    """[rows, groups] in packed row order -> [tiles, groups, 16]."""
    return values.reshape(lay.tiles, TILE_ROWS, lay.groups).transpose(0, 2, 1)


def from_float(format: str, w: np.ndarray, group: int = 0, gate_up: bool = False) -> np.ndarray:
    """Packs one f32 matrix; returns its bytes (uint8, `stride` long).  GGUF: from_blocks."""
    w = np.asarray(w, np.float32)
    rows, cols = w.shape
    lay = Layout(format, rows, cols, group, gate_up)
    if not np.isfinite(w).all():
        raise ValueError("weights must be finite")
    order = lay.row_order()
    padded = np.zeros((len(order), lay.kpad), np.float32)
    padded[order >= 0, : lay.cols] = w[order[order >= 0]]
    scales = np.zeros(0, np.uint8)
    if format == "f32":
        data = _blocks(padded, 1)
    elif format == "bf16":
        data = _blocks(bf16_bits(padded), 2)
    elif format == "f16":
        data = _blocks(padded.astype(np.float16), 2)
    elif format == "int8" and group:
        q, s = quantize_int8_groups(padded, group)
        data, scales = _blocks(q, 4), _by_group(s, lay)
    elif format == "fp8":
        q, s = quantize_fp8(padded, group)
        data, scales = _blocks(q, 4), _by_group(s, lay)
    elif format == "int4z":
        q, s, zeros = quantize_int4z(padded, group)
        data, scales = _nibbles(q), _scales_then_zeros(s, zeros, lay)
    elif format == "mxfp4":
        q, s = quantize_mxfp4(padded, group)
        data, scales = _nibbles(q), _by_group(s, lay)
    elif format == "int8":
        q, s = quantize_int8(padded)
        data, scales = _blocks(q, 4), s
    elif format == "int4":
        q, s = quantize_int4(padded, group)
        data = _nibbles(q + 8)
        scales = _by_group(bf16_bits(s), lay)
    else:
        q, factors, offsets, s = quantize_int4p(padded, group)
        data = _nibbles(q + np.repeat(offsets, group, axis=1)[:, : lay.kpad].astype(np.int8))
        codes = _by_group((factors + (8 - offsets) * 128).astype(np.uint8), lay).reshape(-1)
        gap = np.zeros(_up(len(codes), 64) - len(codes), np.uint8)
        scales = np.concatenate([codes, gap, s.view(np.uint8)])
    return _join(data, scales, lay)


def _scales_then_zeros(s: np.ndarray, zeros: np.ndarray, lay: Layout) -> np.ndarray:
    first, second = (np.ascontiguousarray(_by_group(a, lay)).view(np.uint8) for a in (s, zeros))
    gap = np.zeros(_up(first.size, 64) - first.size, np.uint8)
    return np.concatenate([first.reshape(-1), gap, second.reshape(-1)])


def _join(data: np.ndarray, scales: np.ndarray, lay: Layout) -> np.ndarray:
    out = np.zeros(lay.stride, np.uint8)
    out[: lay.data_nbytes] = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
    if lay.scale_nbytes:
        flat = np.ascontiguousarray(scales).view(np.uint8).reshape(-1)
        out[lay.data_nbytes : lay.data_nbytes + lay.scale_nbytes] = flat
    return out


def from_ints(
    format: str,
    q: np.ndarray,
    scales: np.ndarray,
    zeros: np.ndarray | None = None,
    group: int = 0,
    gate_up: bool = False,
) -> np.ndarray:
    """Packs integers [rows, cols] and scales [rows, groups] as they are; returns the bytes.

    q: int8; of int4z, mxfp4 and fp8 uint8.  scales: f32 that the format holds exactly.
    zeros: uint8 0..16, of int4z.
    """
    rows, cols = q.shape
    lay = Layout(format, rows, cols, group, gate_up)
    order = lay.row_order()
    there = order >= 0

    def spread(a: np.ndarray, width: int) -> np.ndarray:
        padded = np.zeros((len(order), width), a.dtype)
        padded[there, : a.shape[1]] = a[order[there]]
        return padded

    s = spread(np.asarray(scales, np.float32), lay.groups or 1)
    full = spread(q, lay.kpad)
    if format == "int4":
        return _join(_nibbles(full + 8), _by_group(bf16_bits(s), lay), lay)
    if format == "mxfp4":
        codes = np.where(s == 0, 0, s.view(np.uint32) >> np.uint32(23)).astype(np.uint8)
        return _join(_nibbles(full), _by_group(codes, lay), lay)
    if format == "int4z":
        assert zeros is not None
        z = spread(zeros, lay.groups)
        full[:, cols:] = _per_column(z, lay)[:, cols:]
        data = _nibbles(full & 15)
        return _join(data, _scales_then_zeros(s.astype(np.float16), z, lay), lay)
    return _join(_blocks(full, 4), _by_group(s, lay) if group else s, lay)


def _words(format: str, blocks: np.ndarray, lay: Layout) -> np.ndarray:
    """GGUF blocks [rows, bytes] -> u32 [rows, records, lines]: each record's words of a row."""
    _, size = FILE_BLOCKS[format]
    columns, lines = RECORDS[format]
    records = lay.kpad // columns
    each = blocks.reshape(lay.rows, -1, size)
    if columns == 256:  # a record is a block, to whole words
        padded = np.pad(each, ((0, 0), (0, 0), (0, 4 * lines - size)))
    else:  # two blocks: their scales, then their quants
        even = np.pad(each, ((0, 0), (0, 2 * records - each.shape[1]), (0, 0)))
        pairs = even.reshape(lay.rows, records, 2, size)
        halves = [pairs[..., :2], pairs[..., 2:]]
        padded = np.concatenate([h.reshape(lay.rows, records, -1) for h in halves], axis=-1)
    return np.ascontiguousarray(padded).view("<u4")


def from_blocks(format: str, blocks: np.ndarray, gate_up: bool = False) -> np.ndarray:
    """Packs a GGUF tensor's bytes [rows, bytes of a row]; returns uint8, `stride` long."""
    columns, size = FILE_BLOCKS[format]
    lay = Layout(format, len(blocks), blocks.shape[1] // size * columns, 0, gate_up)
    words, order = _words(format, blocks, lay), lay.row_order()
    rows = np.zeros((len(order), *words.shape[1:]), np.uint32)
    rows[order >= 0] = words[order[order >= 0]]
    tiles = rows.reshape(lay.tiles, TILE_ROWS, *words.shape[1:]).transpose(0, 2, 3, 1)
    out = np.zeros(lay.stride, np.uint8)
    out[: lay.data_nbytes] = np.ascontiguousarray(tiles).view(np.uint8).reshape(-1)
    return out


def to_blocks(
    format: str, data: np.ndarray, rows: int, cols: int, gate_up: bool = False
) -> np.ndarray:
    """Bytes of one packed matrix -> the GGUF tensor's bytes [rows, bytes of a row]."""
    lay = Layout(format, rows, cols, 0, gate_up)
    columns, size = FILE_BLOCKS[format]
    lines, order = RECORDS[format][1], lay.row_order()
    tiles = np.ascontiguousarray(data[: lay.data_nbytes]).view("<u4")
    words = tiles.reshape(lay.tiles, -1, lines, TILE_ROWS).transpose(0, 3, 1, 2)
    words = words.reshape(len(order), -1, lines)
    kept = np.zeros((rows, *words.shape[1:]), np.uint32)
    kept[order[order >= 0]] = words[order >= 0]
    stored = kept.view(np.uint8)
    if columns == 32:
        shape = (rows, stored.shape[1], 2, -1)
        stored = np.concatenate(
            [stored[..., :4].reshape(shape), stored[..., 4:].reshape(shape)], axis=-1
        )
    blocks = stored[..., :size].reshape(rows, -1)
    return np.ascontiguousarray(blocks[:, : cols // columns * size])


def _rows_of_groups(stored: np.ndarray, lay: Layout) -> np.ndarray:
    """[tiles, groups, 16] -> [rows, groups] in packed row order."""
    by_tile = stored.reshape(lay.tiles, lay.groups, TILE_ROWS).transpose(0, 2, 1)
    return np.ascontiguousarray(by_tile).reshape(-1, lay.groups)


def _per_column(values: np.ndarray, lay: Layout) -> np.ndarray:
    return np.repeat(values, lay.group, axis=1)[:, : lay.kpad]


def int4p_parts(
    data: np.ndarray, rows: int, cols: int, group: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes of one int4p matrix -> nibbles [rows, cols], codes [rows, groups], scales [rows]."""
    lay = Layout("int4p", rows, cols, group)
    blocks = data[: lay.data_nbytes].reshape(lay.tiles, lay.kpad // 8, TILE_ROWS, 4)
    nibbles = np.concatenate([blocks & 15, blocks >> 4], axis=-1).transpose(0, 2, 1, 3)
    scale_bytes = data[lay.data_nbytes : lay.data_nbytes + lay.scale_nbytes]
    codes = _rows_of_groups(scale_bytes[: lay.tiles * lay.groups * TILE_ROWS], lay)
    scales = np.ascontiguousarray(scale_bytes[-lay.tiles * 64 :]).view(np.float32)
    kept = -(-cols // group)
    return nibbles.reshape(-1, lay.kpad)[:rows, :cols], codes[:rows, :kept], scales[:rows]


def to_float(
    format: str, data: np.ndarray, rows: int, cols: int, group: int = 0, gate_up: bool = False
) -> np.ndarray:
    """Bytes of one packed matrix -> f32 [rows, cols]; of GGUF formats as the gguf package says."""
    if format in FILE_BLOCKS:
        import gguf  # here: it takes a while, and every use of Layout comes by

        blocks = to_blocks(format, data, rows, cols, gate_up)
        return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[format.upper()])
    lay = Layout(format, rows, cols, group, gate_up)
    raw = np.ascontiguousarray(data[: lay.data_nbytes])
    scale_bytes = np.ascontiguousarray(data[lay.data_nbytes : lay.data_nbytes + lay.scale_nbytes])
    step = STEP[format]
    shape = (lay.tiles, lay.kpad // step, TILE_ROWS, step)
    if format == "f32":
        blocks = raw.view(np.float32).reshape(shape)
    elif format == "bf16":
        blocks = bf16_values(raw.view(np.uint16)).reshape(shape)
    elif format == "f16":
        blocks = raw.view(np.float16).astype(np.float32).reshape(shape)
    elif format == "fp8":
        blocks = e4m3_values(raw).reshape(shape)
    elif format == "int8":
        blocks = raw.view(np.int8).astype(np.float32).reshape(shape)
    else:
        bytes4 = raw.reshape(*shape[:3], 4)
        blocks = np.concatenate([bytes4 & 15, bytes4 >> 4], axis=-1).astype(np.float32)
    values = blocks.transpose(0, 2, 1, 3).reshape(lay.tiles * TILE_ROWS, lay.kpad)
    places = lay.tiles * lay.groups * TILE_ROWS
    if format in ("int8", "fp8") and group:
        s = _rows_of_groups(scale_bytes.view(np.float32), lay)
        values = values * _per_column(s, lay)
    elif format == "int8":
        values = values * scale_bytes.view(np.float32)[:, None]
    if format == "mxfp4":
        s = e8m0_values(_rows_of_groups(scale_bytes, lay)) * np.float32(0.5)
        values = E2M1_TWICE[values.astype(np.int64)] * _per_column(s, lay)
    if format == "int4z":
        s = _rows_of_groups(scale_bytes[: 2 * places].view(np.float16), lay).astype(np.float32)
        zeros = _rows_of_groups(scale_bytes[-places:], lay).astype(np.float32)
        values = (values - _per_column(zeros, lay)) * _per_column(s, lay)
    if format == "int4":
        s = bf16_values(_rows_of_groups(scale_bytes.view(np.uint16), lay))
        values = (values - np.float32(8)) * _per_column(s, lay)
    if format == "int4p":
        codes = _rows_of_groups(scale_bytes[:places], lay)
        s = scale_bytes[-lay.tiles * 64 :].view(np.float32)
        scale = (codes & 15).astype(np.float32) * s[:, None]
        offset = np.float32(8) - (codes >> 7).astype(np.float32)
        values = (values - _per_column(offset, lay)) * _per_column(scale, lay)
    out = np.zeros((rows, cols), np.float32)
    order = lay.row_order()
    out[order[order >= 0]] = values[order >= 0, :cols]
    return out
