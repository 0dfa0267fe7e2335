"""`GgufSource`: the weights of a GGUF file, by the file's own names, in its own bits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from ktgraph.frontends.gguf_file import GgufFile, GgufTensor
from ktgraph.frontends.safetensors_files import CheckpointError
from ktgraph.ir.types import Encoding
from ktgraph.weights.encodings import all_encodings
from ktgraph.weights.gguf_blocks import as_q8_0, dequantize

_PLAIN = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
# 4- and 5-bit formats whose values are an f16 scale times a signed byte: q8_0 holds them exactly
_AS_Q8_0 = ("q5_0", "iq4_nl")


class GgufSource:
    """Tensors of a GGUF file, and `values`: what is in no file, by parameter (rope frequencies)."""

    def __init__(self, file: GgufFile | str | Path, values: dict[str, torch.Tensor]) -> None:
        self.file = file if isinstance(file, GgufFile) else GgufFile(file)
        self._values = values
        for tensor in self.file.tensors.values():
            if tensor.format not in _PLAIN and f"gguf.{tensor.format}" not in all_encodings():
                raise CheckpointError(
                    f"{tensor.file}: tensor {tensor.name!r} is stored as {tensor.format.upper()}, "
                    "which ktgraph does not read. Use a file with K-quants, e.g. Q4_K_M"
                )

    def names(self) -> Sequence[str]:
        return [*self.file.tensors, *self._values]

    def _tensor(self, name: str) -> GgufTensor:
        from ktgraph.weights.sources import unknown_tensor

        if name not in self.file.tensors:
            raise unknown_tensor(str(self.file.path), name, self.names())
        return self.file.tensors[name]

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._values:
            return tuple(self._values[name].shape)
        return self._tensor(name).shape

    def dtype(self, name: str) -> torch.dtype:
        if name in self._values:
            return self._values[name].dtype
        return _PLAIN.get(self._tensor(name).format, torch.float32)

    def encoding(self, name: str) -> Encoding | None:
        """The file's format; q5_0 and iq4_nl as q8_0, which holds the same values."""
        if name in self._values or self._tensor(name).format in _PLAIN:
            return None
        format = self._tensor(name).format
        return Encoding(f"gguf.{'q8_0' if format in _AS_Q8_0 else format}")

    def get(self, name: str, expert: int | None = None, rows: slice | None = None) -> torch.Tensor:
        if name in self._values:
            found = self._values[name]
            found = found if expert is None else found[expert]
            return found if rows is None else found[rows]
        tensor = self._tensor(name)
        data = tensor.data if expert is None else tensor.data[expert]
        data = data if rows is None else data[rows]
        if tensor.format == "bf16":
            return torch.as_tensor(np.array(data)).view(torch.bfloat16)
        if tensor.format in _PLAIN:
            return torch.as_tensor(np.array(data))
        return dequantize(torch.as_tensor(np.array(data)), tensor.format)

    def rows(self, name: str, expert: int | None = None) -> torch.Tensor:
        tensor = self._tensor(name)
        data = torch.as_tensor(np.array(tensor.data if expert is None else tensor.data[expert]))
        return as_q8_0(data, tensor.format) if tensor.format in _AS_Q8_0 else data

    @property
    def nbytes(self) -> int:
        return self.file.nbytes

    def fingerprint(self) -> str:
        return self.file.fingerprint()


__all__ = ["GgufSource"]
