"""The shards of a safetensors checkpoint: validated before mapping, read lazily.

A truncated or corrupt file would otherwise show late, as garbage or a bus error: every header is
checked against its file's size when the folder is opened.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ktgraph.errors import UnsupportedInputError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
INDEX = "model.safetensors.index.json"
_MAX_HEADER = 100 << 20  # the format's own limit, bytes
_SAMPLES, _SAMPLE = 8, 4096  # fingerprint: reads per shard, bytes each


class CheckpointError(UnsupportedInputError):
    """A checkpoint that is incomplete or damaged: names file, tensor, expected and got."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a shard, as its header says."""

    file: Path
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass
class Recipe:
    """How a parameter is made: ``pieces[p][e]`` are file tensors of source pattern p, expert e.

    stacked: one tensor per expert, stacked on a new first axis.  Pieces of several patterns are
    joined along `axis` of the result.
    """

    pieces: list[list[str]]
    stacked: bool = False
    axis: int = 0


class Shards:
    """All tensors of a checkpoint folder; values are mapped, never copied."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.entries: dict[str, Entry] = {}
        self._headers: dict[Path, bytes] = {}
        self._open: dict[Path, Any] = {}
        listed = _listed_files(self.folder)
        for file in sorted(set(listed.values()) or _loose_files(self.folder)):
            header, entries = read_header(file)
            self._headers[file] = header
            self.entries.update(entries)
        self._check_index(listed)

    def _check_index(self, listed: dict[str, Path]) -> None:
        for key, file in listed.items():
            entry = self.entries.get(key)
            if entry is None or entry.file != file:
                raise CheckpointError(
                    f"{file}: tensor {key!r} is not in it, though {INDEX} says so; the shard and "
                    "the index belong to different checkpoints, download both again"
                )

    def tensor(self, key: str) -> Tensor:
        """The tensor as a view of the mapped file."""
        entry = self.entries[key]
        if entry.file not in self._open:
            self._open[entry.file] = safe_open(entry.file, framework="pt")
        return self._open[entry.file].get_tensor(key)

    def layout_digest(self) -> str:
        """Changes with any file's name or header; no tensor is read."""
        digest = hashlib.sha256()
        for file, header in sorted(self._headers.items()):
            digest.update(file.name.encode() + hashlib.sha256(header).digest())
        return digest.hexdigest()

    def fingerprint(self) -> str:
        """Changes with any header, file size, or sampled byte; reads 32 KiB a shard."""
        digest = hashlib.sha256()
        for file, header in sorted(self._headers.items()):
            size = file.stat().st_size
            digest.update(f"{file.name} {size} ".encode() + hashlib.sha256(header).digest())
            with file.open("rb") as data:
                for n in range(_SAMPLES):
                    data.seek(max(0, size - _SAMPLE) * n // (_SAMPLES - 1))
                    digest.update(data.read(_SAMPLE))
        return digest.hexdigest()[:32]


def _listed_files(folder: Path) -> dict[str, Path]:
    """Tensor -> shard by the index, {} without one; every shard must be there."""
    index = folder / INDEX
    if not index.is_file():
        return {}
    try:
        names: dict[str, str] = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError) as error:
        raise CheckpointError(
            f"{index}: not an index of shards ({type(error).__name__}: {error}); it should hold "
            "a weight_map. Download it again"
        ) from error
    missing = sorted({n for n in names.values() if not (folder / n).is_file()})
    if missing:
        shown = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        count = len(set(names.values()))
        raise CheckpointError(
            f"{folder}: {len(missing)} of {count} shards of {INDEX} are missing: {shown}. "
            "Finish the download"
        )
    return {key: folder / name for key, name in names.items()}


def _loose_files(folder: Path) -> list[Path]:
    single = folder / "model.safetensors"
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if files:
        return files
    others = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".gguf"))
    hint = f" (found {', '.join(others[:3])})" if others else ""
    raise CheckpointError(
        f"{folder}: no *.safetensors in it{hint}. Load the checkpoint with transformers and save "
        "it with `model.save_pretrained(folder)`"
    )


def read_header(file: Path) -> tuple[bytes, dict[str, Entry]]:
    """Header bytes and entries of one shard; every offset is checked against the file's size."""
    size = file.stat().st_size
    with file.open("rb") as data:
        first = data.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        if not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise _damaged(file, f"its header claims {length} bytes of a file of {size}")
        header = data.read(length)
    try:
        table: dict[str, Any] = json.loads(header)
        table.pop("__metadata__", None)
        entries = {key: _entry(file, key, info, size - 8 - length) for key, info in table.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise _damaged(file, f"its header is not valid ({type(error).__name__})") from error
    _check_tiling(file, table, size - 8 - length)
    return header, entries


def _entry(file: Path, key: str, info: dict[str, Any], data_size: int) -> Entry:
    begin, end = info["data_offsets"]
    shape = tuple(int(n) for n in info["shape"])
    dtype = DTYPES.get(info["dtype"])
    if dtype is None:
        known = ", ".join(DTYPES)
        raise CheckpointError(
            f"{file}: tensor {key!r} has dtype {info['dtype']}, expected one of {known}"
        )
    if not 0 <= begin <= end <= data_size:
        raise _damaged(
            file, f"tensor {key!r} ends at byte {end} of its data, which has {data_size} bytes"
        )
    entry = Entry(file, key, dtype, shape)
    if entry.nbytes != end - begin:
        raise _damaged(
            file,
            f"tensor {key!r} {info['dtype']}{list(shape)} needs {entry.nbytes} bytes, "
            f"has {end - begin}",
        )
    return entry


def _check_tiling(file: Path, table: dict[str, Any], data_size: int) -> None:
    """Tensors follow each other without gaps and fill the file."""
    at = 0
    for begin, end in sorted(info["data_offsets"] for info in table.values()):
        if begin != at:
            raise _damaged(file, f"its data has a gap or overlap at byte {min(begin, at)}")
        at = end
    if at != data_size:
        raise _damaged(file, f"its tensors end at byte {at}, its data has {data_size} bytes")


def _damaged(file: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{file}: truncated or corrupt, {what}. Download this file again")
