"""GPTQ and AWQ checkpoints: 4-bit integers with zero points and f16 scales per group of columns.

    X.qweight  GPTQ: I32 [in / 8, out]; AWQ: I32 [in, out / 8]
    X.qzeros   I32 [groups, out / 8]
    X.scales   F16 [groups, out]
    X.g_idx    I32 [in], of GPTQ: the group of each column

Source: AutoGPTQ / GPTQModel ("gptq": zero points less one; "gptq_v2": as they are), AutoAWQ (gemm).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from ktgraph.weights.relayout import StoredInts, awq, gptq

_Q, _ZEROS, _SCALES, _INDEX = ".qweight", ".qzeros", ".scales", ".g_idx"
_VERSIONS = {"gptq": 1, "gptq_v2": 2}


def find_gptq(shards: Shards, settings: Mapping[str, Any]) -> list[QuantizedTensor]:
    """Every quantized linear.  Act-order (a g_idx that permutes) shows when a tensor is read."""
    _expect_4_bits(shards, settings, "gptq")
    format = settings.get("checkpoint_format", "gptq")
    if format not in _VERSIONS:
        raise CheckpointError(
            f"{shards.folder}: config.json says GPTQ in checkpoint_format {format!r}; "
            f"{' and '.join(_VERSIONS)} are read"
        )
    decode = partial(_decode_gptq, _VERSIONS[format])
    found = [_gptq_tensor(shards, stem, decode) for stem in _stems(shards)]
    if found and settings.get("desc_act"):
        most = max(found, key=lambda tensor: tensor.parts[_SCALES].shape[0])
        most.read(shards)  # says at once that act-order is not read
    return found


def find_awq(shards: Shards, settings: Mapping[str, Any]) -> list[QuantizedTensor]:
    """Every quantized linear."""
    _expect_4_bits(shards, settings, "awq")
    version = str(settings.get("version", "gemm")).lower()
    if version != "gemm":
        raise CheckpointError(
            f"{shards.folder}: config.json says AWQ version {version!r}; gemm is read"
        )
    return [_awq_tensor(shards, stem) for stem in _stems(shards)]


def _expect_4_bits(shards: Shards, settings: Mapping[str, Any], method: str) -> None:
    bits = settings.get("bits", settings.get("w_bit"))
    if bits != 4:
        raise CheckpointError(
            f"{shards.folder}: config.json says {method} with {bits} bits; 4 bits are read"
        )


def _stems(shards: Shards) -> list[str]:
    return [k.removesuffix(_Q) for k in shards.entries if k.endswith(_Q)]


def _gptq_tensor(
    shards: Shards, stem: str, decode: Callable[[Parts], StoredInts]
) -> QuantizedTensor:
    parts = take(shards, stem, _Q, _ZEROS, _SCALES)
    if stem + _INDEX in shards.entries:
        parts[_INDEX] = shards.entries[stem + _INDEX]
    words = _matrix(parts[_Q])
    return _tensor(stem, (words[1], 8 * words[0]), parts, decode)


def _awq_tensor(shards: Shards, stem: str) -> QuantizedTensor:
    parts = take(shards, stem, _Q, _ZEROS, _SCALES)
    words = _matrix(parts[_Q])
    return _tensor(stem, (8 * words[1], words[0]), parts, _decode_awq)


def _matrix(entry: Entry) -> tuple[int, int]:
    if len(entry.shape) != 2:
        raise CheckpointError(
            f"{entry.file}: tensor {entry.key!r} is {list(entry.shape)}, expected a matrix"
        )
    return entry.shape[0], entry.shape[1]


def _tensor(
    stem: str,
    shape: tuple[int, int],
    parts: dict[str, Entry],
    decode: Callable[[Parts], StoredInts],
) -> QuantizedTensor:
    (rows, cols), groups = shape, _matrix(parts[_SCALES])[0]
    expect_dtype(parts[_Q], torch.int32)
    expect_dtype(parts[_ZEROS], torch.int32)
    expect_dtype(parts[_SCALES], torch.float16, torch.bfloat16)
    expect_shape(parts[_SCALES], (groups, rows), f"a scale per group of each of {rows} outputs")
    expect_shape(parts[_ZEROS], (groups, rows // 8), f"{groups} groups of {rows} zero points")
    if _INDEX in parts:
        expect_shape(parts[_INDEX], (cols,), f"the group of each of {cols} columns")
    group = int4_group(parts[_SCALES], cols, groups)
    encoding = Encoding("int4z", (("group", group),))
    return QuantizedTensor(f"{stem}.weight", (rows, cols), encoding, parts, decode)


def _decode_gptq(version: int, parts: Parts) -> StoredInts:
    return gptq(parts[_Q], parts[_ZEROS], parts[_SCALES], parts.get(_INDEX), version=version)


def _decode_awq(parts: Parts) -> StoredInts:
    return awq(parts[_Q], parts[_ZEROS], parts[_SCALES])


__all__ = ["find_awq", "find_gptq"]
