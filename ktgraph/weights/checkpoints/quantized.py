"""`QuantizedTensor`: file tensors that together mean one matrix, or a stack of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ktgraph.frontends.safetensors_files import CheckpointError, Entry, Shards
from ktgraph.ir.types import Encoding
from ktgraph.weights.relayout import RelayoutError, StoredInts

Parts = dict[str, torch.Tensor]


@dataclass(frozen=True)
class QuantizedTensor:
    """One quantized tensor of a checkpoint.

    key: the name that an unquantized checkpoint would give it.
    shape: of its values, [rows = out, cols = in], or [experts, rows, cols].
    parts: role (e.g. "scales") -> file tensor.
    decode: the parts of one matrix -> its integers.
    transposed: the model's parameter has the last two axes the other way round (gpt-oss).
    """

    key: str
    shape: tuple[int, ...]
    encoding: Encoding
    parts: Mapping[str, Entry]
    decode: Callable[[Parts], StoredInts]
    transposed: bool = False

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.parts.values())

    @property
    def file_shape(self) -> tuple[int, ...]:
        """The shape of the model's parameter."""
        *lead, rows, cols = self.shape
        return (*lead, cols, rows) if self.transposed else self.shape

    def read(self, shards: Shards, expert: int | None = None) -> StoredInts:
        """A matrix's integers and scales; `expert`: which one of a stack."""
        tensors = {role: shards.tensor(entry.key) for role, entry in self.parts.items()}
        if expert is not None:
            tensors = {role: tensor[expert] for role, tensor in tensors.items()}
        try:
            return self.decode(tensors)
        except RelayoutError as error:
            entry = next(iter(self.parts.values()))
            raise CheckpointError(f"{entry.file}: tensor {entry.key!r}: {error}") from error


def take(shards: Shards, stem: str, found: str, *suffixes: str) -> dict[str, Entry]:
    """The parts `stem + suffix` by suffix; raises CheckpointError naming the one that is missing.

    `found` is the suffix of the part that was seen.
    """
    parts: dict[str, Entry] = {}
    for suffix in (found, *suffixes):
        entry = shards.entries.get(stem + suffix)
        if entry is None:
            seen = shards.entries[stem + found]
            raise CheckpointError(
                f"{seen.file}: tensor {stem + found!r} is there, but {stem + suffix!r}, which "
                "belongs to it, is in no file. A shard is missing or incomplete; download the "
                "checkpoint again"
            )
        parts[suffix] = entry
    return parts


def expect_shape(entry: Entry, shape: tuple[int, ...], why: str) -> None:
    """Raises CheckpointError unless a part has the shape that the others ask for."""
    if entry.shape != shape:
        raise CheckpointError(
            f"{entry.file}: tensor {entry.key!r} is {list(entry.shape)}, expected {list(shape)}: "
            f"{why}. The file is damaged or was made by another tool; download it again"
        )


def expect_dtype(entry: Entry, *dtypes: torch.dtype) -> None:
    if entry.dtype not in dtypes:
        names = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise CheckpointError(
            f"{entry.file}: tensor {entry.key!r} is {str(entry.dtype).removeprefix('torch.')}, "
            f"expected {names}"
        )


def int4_group(entry: Entry, columns: int, groups: int) -> int:
    """Columns of a group in packed tiles, for scales of `groups` groups.

    Groups of 256, 384, ... columns become several of 128 with the same scale, which is exact.
    """
    fits = [g for g in (32, 64, 128) if -(-columns // g) == groups]
    if fits:
        return fits[0]
    if groups and columns % groups == 0 and columns // groups % 128 == 0:
        return 128
    raise CheckpointError(
        f"{entry.file}: tensor {entry.key!r} has {groups} groups for {columns} columns; groups of "
        "32, 64 or multiples of 128 columns are read"
    )


__all__ = ["Parts", "QuantizedTensor", "expect_dtype", "expect_shape", "int4_group", "take"]
