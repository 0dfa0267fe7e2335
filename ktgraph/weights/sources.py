"""Where weights come from: what a source is, a loaded model, a seed.

Checkpoints: `safetensors_source.py`, `gguf_source.py`.

A `WeightSource` knows tensors by the names that an IR module's `from` clauses use: the parameter
names of the Hugging Face model.  Nothing is read before `get`, and stacked expert tensors are
served one expert at a time, so that a checkpoint of hundreds of gigabytes never exists twice.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from math import prod
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import nn

from ktgraph.errors import UnsupportedInputError
from ktgraph.ir.graph import Module
from ktgraph.ir.types import DTYPES, Encoding
from ktgraph.ops.tensor import torch_dtype
from ktgraph.weights.gguf_blocks import GGUF_FORMATS, block_size, random_blocks
from ktgraph.weights.stored_rows import has_rows, quantized, row_values, to_rows

_SAMPLED = 64  # elements of each tensor that a fingerprint of a loaded model reads


class WeightSourceError(UnsupportedInputError):
    """A tensor that a source does not have, or has in another shape."""


@runtime_checkable
class WeightSource(Protocol):
    """Tensors by name, read when asked for."""

    def names(self) -> Sequence[str]:
        """Every name that `get` takes."""
        ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype:
        """The dtype the tensor is stored in."""
        ...

    def get(self, name: str, expert: int | None = None, rows: slice | None = None) -> torch.Tensor:
        """The tensor, or one entry of its first axis (`expert`), or `rows` of what remains.

        The result may be a view of mapped memory or of a live parameter: do not write to it.
        """
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as stored."""
        ...

    def fingerprint(self) -> str:
        """Cheap and stable: changes when the weights do, for keys of caches."""
        ...


@runtime_checkable
class EncodedSource(WeightSource, Protocol):
    """A source whose tensors may be quantized; `get` gives the values that they mean."""

    def encoding(self, name: str) -> Encoding | None:
        """How the tensor is stored; None: as the plain dtype that `dtype` says."""
        ...

    def rows(self, name: str, expert: int | None = None) -> torch.Tensor:
        """Rows of an encoded tensor as bytes, uint8 [..., rows, bytes of a row]
        (`ktgraph/weights/stored_rows.py`); `expert`: an entry of its first axis."""
        ...


def part_of(tensor: torch.Tensor, expert: int | None, rows: slice | None) -> torch.Tensor:
    tensor = tensor if expert is None else tensor[expert]
    return tensor if rows is None else tensor[rows]


def unknown_tensor(where: str, name: str, names: Sequence[str]) -> WeightSourceError:
    """The error for a name that a source does not have."""
    close = difflib.get_close_matches(name, names, n=2)
    hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
    return WeightSourceError(f"{where} has no tensor {name!r}{hint}")


class ModelSource:
    """Parameters and buffers of a loaded model, by name, without copies.

    ``experts.*.w1.weight`` is the stack of that parameter over a list's members, 0, 1, 2 …
    `constants`: tensors by name that the model holds nowhere, but its code makes.
    """

    def __init__(
        self, model: nn.Module, constants: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        self._tensors: dict[str, torch.Tensor] = dict(constants or {})
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._tensors[name] = parameter.detach()
        for name, buffer in model.named_buffers(remove_duplicate=False):
            self._tensors[name] = buffer.detach()
        self._label = type(model).__name__
        empty = [name for name, t in self._tensors.items() if t.is_meta]
        if empty:
            raise WeightSourceError(
                f"{self._label}: {empty[0]!r} and {len(empty) - 1} more are on the meta device and "
                "hold no values; load the model with weights, or give its folder"
            )

    @staticmethod
    def of_tensors(tensors: Mapping[str, torch.Tensor], label: str) -> ModelSource:
        """Tensors that no module holds under these names; `label` names their owner in errors."""
        found = ModelSource(nn.Module())
        found._tensors.update({name: t.detach() for name, t in tensors.items()})
        found._label = label
        return found

    def release(self, prefix: str) -> None:
        """Let go of the tensors whose names begin so, for a caller that frees them."""
        for name in [n for n in self._tensors if n.startswith(prefix)]:
            del self._tensors[name]

    def names(self) -> Sequence[str]:
        return list(self._tensors)

    def _tensor(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            raise unknown_tensor(self._label, name, self.names())
        return self._tensors[name]

    def _member(self, name: str, member: int) -> torch.Tensor:
        return self._tensor(name.replace("*", str(member), 1))

    def _members(self, name: str) -> list[torch.Tensor]:
        """Of a name with a star: the members' tensors, in order."""
        numbers = itertools.takewhile(
            lambda n: name.replace("*", str(n), 1) in self._tensors, itertools.count()
        )
        found = [self._member(name, n) for n in numbers]
        return found or [self._member(name, 0)]  # which says what is missing

    def shape(self, name: str) -> tuple[int, ...]:
        if "*" not in name:
            return tuple(self._tensor(name).shape)
        members = self._members(name)
        return (len(members), *members[0].shape)

    def dtype(self, name: str) -> torch.dtype:
        return (self._member(name, 0) if "*" in name else self._tensor(name)).dtype

    def get(self, name: str, expert: int | None = None, rows: slice | None = None) -> torch.Tensor:
        if "*" not in name:
            return part_of(self._tensor(name), expert, rows)
        if expert is not None:
            return part_of(self._member(name, expert), None, rows)
        return part_of(torch.stack(self._members(name)), None, rows)

    @property
    def nbytes(self) -> int:
        unique = {t.data_ptr(): t.nbytes for t in self._tensors.values()}
        return sum(unique.values())

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for name, tensor in sorted(self._tensors.items()):
            flat = tensor.reshape(-1) if tensor.is_contiguous() else tensor.flatten()
            step = max(1, flat.numel() // _SAMPLED)
            some = flat[::step][: 2 * _SAMPLED].double().cpu().numpy().tobytes()
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode() + some)
        return digest.hexdigest()[:32]


def _member(name: str, expert: int, shape: tuple[int, ...]) -> str:
    return f"{name}[{expert % shape[0]}]"


def _digest(seed: int, name: str) -> bytes:
    return hashlib.sha256(f"{seed} {name}".encode()).digest()


def _is_packable(encoding: Encoding, shape: tuple[int, ...]) -> bool:
    """Whether tiles hold it, so that kernels and references must see one set of values."""
    if not encoding.name.startswith("gguf."):
        return True
    format = encoding.name.removeprefix("gguf.")
    return format in GGUF_FORMATS and shape[-1] % block_size(format)[0] == 0


class RandomSource:
    """Random weights for an IR module at its present dims: miniatures and synthetic benchmarks.

    A tensor depends on seed and name only; an expert's slice is the same whether it is asked for
    alone or with the others.  Norm weights lie near 1, linears are scaled by their inputs.
    """

    def __init__(self, module: Module, seed: int = 0) -> None:
        self.seed = seed
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._encodings: dict[str, Encoding] = {}
        for weight in module.weights.values():
            if weight.source is None:
                continue
            encoding = weight.type.encoding
            stored = weight.type.dtype if encoding is None else encoding.name
            stored = stored if stored in DTYPES else weight.type.dtype  # of integers: their values
            for index in range(weight.lo, weight.hi + 1) if weight.is_family else (0,):
                name = weight.source.replace("{" + weight.var + "}", str(index))
                self._shapes[name] = tuple(d.at(module.dims) for d in weight.type.dims)
                self._dtypes[name] = torch_dtype(stored)
                if encoding is not None and has_rows(encoding):
                    self._encodings[name] = encoding

    def names(self) -> Sequence[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._shapes:
            raise unknown_tensor("the module", name, self.names())
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        self.shape(name)
        return self._dtypes[name]

    def get(self, name: str, expert: int | None = None, rows: slice | None = None) -> torch.Tensor:
        shape = self.shape(name)
        if len(shape) < 3:
            return part_of(self._draw(name, shape), expert, rows)
        if expert is not None:
            return part_of(self._draw(_member(name, expert, shape), shape[1:]), None, rows)
        every = [self._draw(_member(name, e, shape), shape[1:]) for e in range(shape[0])]
        return part_of(torch.stack(every), None, rows)

    def encoding(self, name: str) -> Encoding | None:
        return self._encodings.get(name)

    def rows(self, name: str, expert: int | None = None) -> torch.Tensor:
        shape = self.shape(name)
        if len(shape) < 3:
            return part_of(self._rows(name, shape), expert, None)
        if expert is not None:
            return self._rows(_member(name, expert, shape), shape[1:])
        every = [self._rows(_member(name, e, shape), shape[1:]) for e in range(shape[0])]
        return torch.stack(every)

    def _rows(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Rows of one matrix as its encoding stores them."""
        encoding = self._encodings[name.partition("[")[0]]
        if not encoding.name.startswith("gguf."):
            return to_rows(quantized(self._normal(name, shape), encoding))
        seed = int.from_bytes(_digest(self.seed, name)[:7], "little")
        format = encoding.name.removeprefix("gguf.")
        rng, (matrix_rows, columns) = np.random.default_rng(seed), shape
        return random_blocks(format, matrix_rows, columns, rng, columns**-0.5)

    def _draw(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        kind = self._dtypes[name.partition("[")[0]]
        if name.endswith("inv_freq"):
            return torch.pow(10000.0, -torch.arange(shape[0]) / shape[0]).to(kind)
        encoding = self._encodings.get(name.partition("[")[0])
        if encoding is not None and _is_packable(encoding, shape):
            return row_values(self._rows(name, shape), encoding, shape[-1]).to(kind)
        return self._normal(name, shape).to(kind)

    def _normal(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        rng = torch.Generator("cpu").manual_seed(
            int.from_bytes(_digest(self.seed, name)[:7], "little")
        )
        values = torch.randn(shape, generator=rng, device="cpu")
        if len(shape) > 1:
            return values * shape[-1] ** -0.5
        return values * 0.1 + (0.0 if "bias" in name else 1.0)

    @property
    def nbytes(self) -> int:
        return sum(prod(s) * self._dtypes[n].itemsize for n, s in self._shapes.items())

    def fingerprint(self) -> str:
        digest = hashlib.sha256(f"random {self.seed}".encode())
        for name, shape in sorted(self._shapes.items()):
            digest.update(f"{name} {shape} {self._dtypes[name]}".encode())
        return digest.hexdigest()[:32]


__all__ = [
    "EncodedSource",
    "ModelSource",
    "RandomSource",
    "WeightSource",
    "WeightSourceError",
    "part_of",
    "unknown_tensor",
]
