"""GGUF files: metadata and tensors, mapped; split files are read as one.

Format: github.com/ggml-org/ggml, docs/gguf.md.  A file is checked when it is opened.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from ktgraph.frontends.safetensors_files import CheckpointError

_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_SAMPLES, _SAMPLE = 8, 4096  # fingerprint: reads per file, bytes each


@dataclass(frozen=True)
class GgufTensor:
    """One tensor.  `format` in lower case (q4_k, f16); `shape` of its values, rows before columns.

    data: the file's bytes, uint8 [..., rows, bytes of a row], or an array of f32 or f16.
    """

    file: Path
    name: str
    format: str
    shape: tuple[int, ...]
    data: np.ndarray[Any, Any]


class GgufFile:
    """A GGUF model.  Raises CheckpointError for what is no GGUF file, or an incomplete one."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise CheckpointError(f"{self.path}: no such file, and ktgraph downloads nothing")
        self.files = _parts(self.path)
        readers = [_open(file) for file in self.files]
        self._fields = readers[0].fields
        self.tensors: dict[str, GgufTensor] = {}
        for file, reader in zip(self.files, readers, strict=True):
            self.tensors.update({t.name: _tensor(file, t) for t in reader.tensors})
        wanted = self.get("split.tensors.count")
        if wanted is not None and wanted != len(self.tensors):
            raise CheckpointError(
                f"{self.path}: its parts hold {len(self.tensors)} tensors, the first says "
                f"{wanted}. They belong to different models, download them again"
            )

    @property
    def architecture(self) -> str:
        """What llama.cpp calls the model, e.g. deepseek2."""
        found = self.get("general.architecture")
        if not isinstance(found, str):
            raise CheckpointError(f"{self.path}: general.architecture is missing from its metadata")
        return found

    def get(self, key: str) -> Any:
        """A value of the metadata, None when absent."""
        field = self._fields.get(key)
        return None if field is None else field.contents()

    def of_model(self, key: str) -> Any:
        """The architecture's own value ``{architecture}.{key}``."""
        return self.get(f"{self.architecture}.{key}")

    def need(self, key: str) -> Any:
        """`of_model`; raises CheckpointError when it is absent."""
        found = self.of_model(key)
        if found is None:
            raise CheckpointError(
                f"{self.path}: {self.architecture}.{key} is missing from its metadata; convert the "
                "model again with a current llama.cpp"
            )
        return found

    @property
    def nbytes(self) -> int:
        return sum(t.data.nbytes for t in self.tensors.values())

    def fingerprint(self) -> str:
        """Changes with any file's size or sampled byte; reads 32 KiB a file."""
        digest = hashlib.sha256()
        for file in self.files:
            size = file.stat().st_size
            digest.update(f"{file.name} {size} ".encode())
            with file.open("rb") as data:
                for n in range(_SAMPLES):
                    data.seek(max(0, size - _SAMPLE) * n // (_SAMPLES - 1))
                    digest.update(data.read(_SAMPLE))
        return digest.hexdigest()[:32]


def _parts(path: Path) -> list[Path]:
    """Every file of a split model, the first one first; `path` alone otherwise."""
    found = _SPLIT.search(path.name)
    if found is None:
        return [path]
    stem, count = path.name[: found.start()], int(found.group(2))
    parts = [path.with_name(f"{stem}-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1)]
    missing = [p.name for p in parts if not p.is_file()]
    if missing:
        raise CheckpointError(
            f"{path}: {len(missing)} of {count} parts are missing beside it: "
            f"{', '.join(missing[:3])}. Finish the download"
        )
    return parts


def _open(file: Path) -> gguf.GGUFReader:
    try:
        return gguf.GGUFReader(file)
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{file}: truncated, corrupt or no GGUF file ({reason[:120]}). Download it again"
        ) from error


def _tensor(file: Path, tensor: gguf.ReaderTensor) -> GgufTensor:
    format, data = tensor.tensor_type.name.lower(), tensor.data
    shape = tuple(int(n) for n in reversed(tensor.shape.tolist()))
    if format == "bf16":
        data = data.view(np.uint16)
    return GgufTensor(file, tensor.name, format, shape, data)


__all__ = ["GgufFile", "GgufTensor"]
