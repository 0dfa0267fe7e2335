"""compressed-tensors checkpoints: 4-bit groups (Kimi-K2-Thinking), and int8.

    pack-quantized  X.weight_packed      I32 [out, ceil(in / 8)] of q + 8
                    X.weight_scale       BF16 or F16 [out, groups]
                    X.weight_shape       I64 or I32 [2]: out, in
                    X.weight_zero_point  I32 [out / 8, groups] of zero + 8; absent when symmetric
    int-quantized   X.weight             I8 [out, in]
                    X.weight_scale       [out, 1] or [out, groups]

Which linears are quantized is said by config_groups and ignore; here the file's own tensors decide.
Source: compressed_tensors.compressors (pack_quantized.py, naive_quantized.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ktgraph.frontends.safetensors_files import CheckpointError, Entry, Shards
from ktgraph.ir.types import Encoding
from ktgraph.weights.checkpoints.quantized import (
    Parts,
    QuantizedTensor,
    expect_dtype,
    expect_shape,
    int4_group,
    take,
)
from ktgraph.weights.relayout import StoredInts, compressed_tensors_int4, compressed_tensors_int8

_PACKED, _WEIGHT, _SCALE = ".weight_packed", ".weight", ".weight_scale"
_SHAPE, _ZERO, _INDEX = ".weight_shape", ".weight_zero_point", ".weight_g_idx"
_BITS = {"pack-quantized": 4, "int-quantized": 8}  # format -> bits that are read


def find_compressed_tensors(shards: Shards, settings: Mapping[str, Any]) -> list[QuantizedTensor]:
    """Every quantized linear; those that `ignore` names are stored plainly."""
    groups: Mapping[str, Any] = settings.get("config_groups") or {}
    formats = {str(_format(settings, group)) for group in groups.values()}
    for name, group in groups.items():
        _check_group(shards, name, _format(settings, group), group.get("weights") or {})
    found: list[QuantizedTensor] = []
    if "pack-quantized" in formats:
        stems = [k.removesuffix(_PACKED) for k in shards.entries if k.endswith(_PACKED)]
        found += [_packed(shards, stem) for stem in stems]
    if "int-quantized" in formats:
        keys = [k for k, e in shards.entries.items() if e.dtype == torch.int8]
        found += [_int8(shards, k.removesuffix(_WEIGHT)) for k in keys if k.endswith(_WEIGHT)]
    return found


def _format(settings: Mapping[str, Any], group: Mapping[str, Any]) -> Any:
    return group.get("format") or settings.get("format")


def _check_group(shards: Shards, name: str, format: Any, weights: Mapping[str, Any]) -> None:
    bits, kind = weights.get("num_bits"), weights.get("type", "int")
    if kind != "int" or _BITS.get(str(format)) != bits:
        known = ", ".join(f"{f} with {b} bits" for f, b in _BITS.items())
        raise CheckpointError(
            f"{shards.folder}: config.json, {name} of compressed-tensors: {kind} weights of {bits} "
            f"bits in format {format!r} are not read (read are {known})"
        )


def _packed(shards: Shards, stem: str) -> QuantizedTensor:
    parts = take(shards, stem, _PACKED, _SCALE, _SHAPE)
    for optional in (_ZERO, _INDEX):
        if stem + optional in shards.entries:
            parts[optional] = shards.entries[stem + optional]
    rows, cols = _read_shape(shards, parts[_SHAPE])
    expect_dtype(parts[_PACKED], torch.int32)
    expect_dtype(parts[_SCALE], torch.bfloat16, torch.float16)
    expect_shape(parts[_PACKED], (rows, -(-cols // 8)), f"[{rows}, {cols}] by {stem}{_SHAPE}")
    groups = _groups(parts[_SCALE], rows)
    if _ZERO in parts:
        expect_shape(parts[_ZERO], (-(-rows // 8), groups), "eight zero points a word")
    # tiles of int4 have bf16 scales; f16 ones are exact in int4z, with 8 as the zero point
    format = "int4z" if _ZERO in parts or parts[_SCALE].dtype == torch.float16 else "int4"
    encoding = Encoding(format, (("group", int4_group(parts[_SCALE], cols, groups)),))
    decode = partial(_decode_packed, (rows, cols), format)
    return QuantizedTensor(f"{stem}.weight", (rows, cols), encoding, parts, decode)


def _read_shape(shards: Shards, entry: Entry) -> tuple[int, int]:
    found = [int(size) for size in shards.tensor(entry.key).flatten()]
    if len(found) != 2 or min(found) < 1:
        raise CheckpointError(f"{entry.file}: tensor {entry.key!r} is {found}, expected [out, in]")
    return found[0], found[1]


def _groups(scale: Entry, rows: int) -> int:
    if len(scale.shape) != 2:
        raise CheckpointError(
            f"{scale.file}: tensor {scale.key!r} is {list(scale.shape)}, expected [{rows}, groups]"
        )
    expect_shape(scale, (rows, scale.shape[1]), f"a row of scales for each of {rows} outputs")
    return scale.shape[1]


def _decode_packed(shape: Sequence[int], format: str, parts: Parts) -> StoredInts:
    zeros, index = parts.get(_ZERO), parts.get(_INDEX)
    found = compressed_tensors_int4(parts[_PACKED], parts[_SCALE], shape, zeros, index)
    if found.format == format:
        return found
    q = (found.q + 8).to(torch.uint8)
    eights = torch.full(found.scales.shape, 8, dtype=torch.uint8)
    return StoredInts(format, found.group, q, found.scales, eights)


def _int8(shards: Shards, stem: str) -> QuantizedTensor:
    parts = take(shards, stem, _WEIGHT, _SCALE)
    entry = parts[_WEIGHT]
    if len(entry.shape) != 2:
        raise CheckpointError(
            f"{entry.file}: tensor {entry.key!r} is {list(entry.shape)}, expected a matrix"
        )
    if stem + _ZERO in shards.entries:
        raise CheckpointError(
            f"{entry.file}: tensor {entry.key!r} has zero points; int8 is read without them"
        )
    rows, cols = entry.shape
    expect_dtype(parts[_SCALE], torch.bfloat16, torch.float16, torch.float32)
    groups = _groups(parts[_SCALE], rows)
    group = 0 if groups == 1 else int4_group(parts[_SCALE], cols, groups)
    params = (("group", group),) if group else ()
    return QuantizedTensor(
        entry.key, (rows, cols), Encoding("int8", params), parts, _decode_int8
    )  # fmt: skip


def _decode_int8(parts: Parts) -> StoredInts:
    return compressed_tensors_int8(parts[_WEIGHT], parts[_SCALE])


__all__ = ["find_compressed_tensors"]
