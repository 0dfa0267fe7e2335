"""Quantized checkpoints to packed weights, exactly: no integer and no scale is rounded.

Each function takes one matrix as its checkpoint stores it and gives `StoredInts`, which
`pack_stored` writes into tiles.  Matrices are W[rows = out, cols = in], as everywhere.

    gptq, awq                  int4z   (q - zero) * scale, f16 scales
    compressed_tensors_int4    int4    symmetric, bf16 scales; int4z with zero points
    compressed_tensors_int8    int8
    mxfp4                      mxfp4   gpt-oss
    fp8_blocks                 fp8     DeepSeek-V3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ktgraph.errors import UnsupportedInputError
from ktgraph.weights.encodings import Encoding, Tile, shape_nbytes

_IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)  # element i of eight is nibble _IN_ORDER[i] of a word
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


class RelayoutError(UnsupportedInputError):
    """A quantized tensor that no packed format holds exactly, or whose parts do not fit."""


@dataclass(frozen=True)
class StoredInts:
    """One matrix in integers.

    format: int4, int4z, int8, mxfp4 or fp8.  group: columns that share a scale; 0: a row (int8).
    q: [rows, cols], i8 (int4: -8..7, int8) or u8 (int4z: 0..15; mxfp4: e2m1 codes; fp8: bytes).
    scales: f32 [rows, groups].  zeros: u8 [rows, groups], of int4z.
    """

    format: str
    group: int
    q: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None

    def encoding(self, gate_up: bool = False) -> Encoding:
        """The tile encoding that holds it."""
        return Tile(self.format, self.group, gate_up).encoding

    def values(self) -> torch.Tensor:
        """The f32 values [rows, cols] that the integers mean: the reference decoder."""
        from ktgraph.cpu_kernels.reference_layouts import E2M1_TWICE

        if self.format == "mxfp4":
            q = torch.as_tensor(E2M1_TWICE)[self.q.long()].float() * 0.5
        elif self.format == "fp8":
            q = self.q.view(torch.float8_e4m3fn).float()
        else:
            q = self.q.float()
        if self.zeros is not None:
            q = q - self._per_column(self.zeros)
        return q * self._per_column(self.scales)

    def _per_column(self, each: torch.Tensor) -> torch.Tensor:
        """[rows, groups] for each column."""
        cols = self.q.shape[1]
        return each.float().repeat_interleave(self.group or cols, dim=1)[:, :cols]


def pack_stored(
    packed: torch.Tensor, number: int, matrix: StoredInts, count: int, gate_up: bool = False
) -> None:
    """Write matrix `number` of `count` into the bytes of a packed weight (`empty_packed`).

    Raises ValueError where the format cannot keep a value or a scale.
    """
    from ktgraph.cpu_kernels import pack_ints_into

    rows, cols = matrix.q.shape
    expected = shape_nbytes((count, rows, cols), matrix.encoding(gate_up))
    if packed.nbytes < expected:
        raise RelayoutError(
            f"{count} matrices [{rows}, {cols}] as {matrix.encoding(gate_up)} take {expected} "
            f"bytes, got {packed.nbytes}"
        )
    zeros = None if matrix.zeros is None else matrix.zeros.contiguous()
    pack_ints_into(
        packed.data_ptr(), number, matrix.format, rows, cols, matrix.group, count, gate_up,
        matrix.q.contiguous(), matrix.scales.contiguous(), zeros,
    )  # fmt: skip


def gptq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    g_idx: torch.Tensor | None = None,
    *,
    version: int = 1,
) -> StoredInts:
    """GPTQ, 4 bits: qweight i32 [in/8, out], qzeros i32 [groups, out/8], scales f16 [groups, out].

    version 1 ("gptq") stores zero points less one, so they may reach 16; 2 ("gptq_v2") as they are.
    g_idx [in]: must be k // group; the permuted groups of act-order are refused.
    """
    if version not in (1, 2):
        raise RelayoutError(f"gptq: version {version}; expected 1 (zero points less one) or 2")
    q = _nibbles(qweight.T, _IN_ORDER)
    zeros = _nibbles(qzeros, _IN_ORDER).T + (1 if version == 1 else 0)
    return _grouped("gptq", "int4z", q, scales.T, zeros, g_idx)


def awq(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> StoredInts:
    """AWQ (gemm), 4 bits: qweight i32 [in, out/8], qzeros i32 [groups, out/8], scales f16
    [groups, out].  The eight outputs of a word lie as 0 2 4 6 1 3 5 7, lowest nibble first."""
    q, zeros = (_nibbles(words, _AWQ_ORDER).T for words in (qweight, qzeros))
    return _grouped("awq", "int4z", q, scales.T, zeros)


def compressed_tensors_int4(
    weight_packed: torch.Tensor,
    weight_scale: torch.Tensor,
    shape: Sequence[int],
    weight_zero_point: torch.Tensor | None = None,
    g_idx: torch.Tensor | None = None,
) -> StoredInts:
    """compressed-tensors "pack-quantized", 4 bits: weight_packed i32 [out, in/8] of q + 8.

    weight_scale: [out, groups], bf16.  shape: (out, in), from weight_shape.
    weight_zero_point: i32 [out/8, groups] of zero + 8, absent when symmetric.
    """
    rows, cols = shape
    name, q = "compressed-tensors", _nibbles(weight_packed, _IN_ORDER)[:, :cols]
    if weight_zero_point is not None:
        zeros = _nibbles(weight_zero_point.T, _IN_ORDER).T[:rows]
        return _grouped(name, "int4z", q, weight_scale, zeros, g_idx)
    return _grouped(name, "int4", q.to(torch.int8) - 8, weight_scale, None, g_idx)


def compressed_tensors_int8(weight: torch.Tensor, weight_scale: torch.Tensor) -> StoredInts:
    """int8 [out, in] with a scale per row [out] or [out, 1], or per group [out, groups]."""
    scales = weight_scale.reshape(len(weight), -1)
    if scales.shape[1] == 1:
        return StoredInts("int8", 0, weight, scales.float())
    return _grouped("compressed-tensors", "int8", weight, scales)


def mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> StoredInts:
    """MXFP4 as in gpt-oss: blocks u8 [rows, cols/32, 16], low nibble first; scales u8
    [rows, cols/32], 2^(code - 127).

    gpt-oss interleaves gate and up: give blocks[0::2] and blocks[1::2] one after the other.
    """
    if blocks.dim() != 3 or blocks.shape[2] != 16 or blocks.shape[:2] != scales.shape:
        raise RelayoutError(
            f"mxfp4: blocks {list(blocks.shape)} and scales {list(scales.shape)}; expected "
            "[rows, cols/32, 16] and [rows, cols/32]"
        )
    if bool((scales == 255).any()):
        raise RelayoutError("mxfp4: a scale is NaN (code 255)")
    q = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(1)
    bits = scales.to(torch.int32) << 23
    values = torch.where(scales == 0, 0x400000, bits).view(torch.float32)  # 2^-127 is denormal
    return StoredInts("mxfp4", 32, q, values)


def fp8_blocks(weight: torch.Tensor, weight_scale_inv: torch.Tensor) -> StoredInts:
    """DeepSeek-V3: weight float8_e4m3fn [rows, cols], weight_scale_inv f32
    [ceil(rows / 128), ceil(cols / 128)], which the values are multiplied with."""
    rows, cols = weight.shape
    expected = (-(-rows // 128), -(-cols // 128))
    if tuple(weight_scale_inv.shape) != expected:
        raise RelayoutError(
            f"fp8: weight_scale_inv is {list(weight_scale_inv.shape)}; a weight of "
            f"[{rows}, {cols}] in blocks of 128 has {list(expected)}"
        )
    scales = weight_scale_inv.float().repeat_interleave(128, dim=0)[:rows]
    return StoredInts("fp8", 128, weight.view(torch.uint8), scales)


def _nibbles(words: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """i32 [a, b/8] -> u8 [a, b]; element i of eight is nibble order[i] of a word."""
    if words.dtype != torch.int32 or words.dim() != 2:
        raise RelayoutError(f"packed integers are i32 of two axes, got {words.dtype} {words.shape}")
    bytes = words.contiguous().view(torch.uint8)
    each = torch.stack([bytes & 15, bytes >> 4], dim=-1).reshape(*words.shape, 8)
    return (each if order == _IN_ORDER else each[..., list(order)]).flatten(1)


def _grouped(
    name: str,
    format: str,
    q: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    g_idx: torch.Tensor | None = None,
) -> StoredInts:
    """With scales and zeros [rows, groups]; groups of 256 or more columns become several of 128."""
    rows, cols = q.shape
    if (
        scales.dim() != 2
        or len(scales) != rows
        or (zeros is not None and zeros.shape != scales.shape)
    ):
        found = [list(t.shape) for t in (scales, zeros) if t is not None]
        raise RelayoutError(
            f"{name}: integers {[rows, cols]} with scales (and zero points) {found}; "
            "expected a row of scales per row of integers, and as many zero points"
        )
    groups = scales.shape[1]
    fits = [g for g in (32, 64, 128) if -(-cols // g) == groups]
    size = fits[0] if fits else cols // groups
    if not fits and (cols % groups or size % 128):
        raise RelayoutError(
            f"{name}: {groups} groups in {cols} columns; packed formats have groups of 32, 64 or "
            "multiples of 128 columns"
        )
    if g_idx is not None and not torch.equal(g_idx.long(), torch.arange(cols) // size):
        raise RelayoutError(
            f"{name}: g_idx permutes the columns (act-order); packed groups are consecutive "
            "columns. Use a checkpoint that was quantized with desc_act=false"
        )
    copies = 1 if fits else size // 128
    scales = scales.float().repeat_interleave(copies, dim=1)
    if zeros is not None:
        zeros = zeros.repeat_interleave(copies, dim=1)
    return StoredInts(format, size // copies, q, scales, zeros)
