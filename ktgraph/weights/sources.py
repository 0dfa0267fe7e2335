"""Where weights come from: a loaded model, a folder of safetensors, or a seed.

A `WeightSource` knows tensors by the names that an IR module's `from` clauses use: the parameter
names of the Hugging Face model.  Nothing is read before `get`, and stacked expert tensors are
served one expert at a time, so that a checkpoint of hundreds of gigabytes never exists twice.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import nn

from ktgraph.errors import UnsupportedInputError
from ktgraph.ir.graph import Module
from ktgraph.ir.types import DTYPES, Encoding
from ktgraph.ops.tensor import torch_dtype
from ktgraph.weights.gguf_blocks import GGUF_FORMATS, block_size, random_blocks
from ktgraph.weights.stored_rows import has_rows, quantized, row_values, to_rows

if TYPE_CHECKING:
    from ktgraph.frontends.hf_keys import Recipe
    from ktgraph.frontends.safetensors_files import Entry, Shards
    from ktgraph.weights.checkpoints import QuantizedTensor

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


def _part(tensor: torch.Tensor, expert: int | None, rows: slice | None) -> torch.Tensor:
    tensor = tensor if expert is None else tensor[expert]
    return tensor if rows is None else tensor[rows]


def unknown_tensor(where: str, name: str, names: Sequence[str]) -> WeightSourceError:
    """The error for a name that a source does not have."""
    close = difflib.get_close_matches(name, names, n=2)
    hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
    return WeightSourceError(f"{where} has no tensor {name!r}{hint}")


class ModelSource:
    """Parameters and buffers of a loaded model, by name, without copies."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
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

    def names(self) -> Sequence[str]:
        return list(self._tensors)

    def _tensor(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            raise unknown_tensor(self._label, name, self.names())
        return self._tensors[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensor(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensor(name).dtype

    def get(self, name: str, expert: int | None = None, rows: slice | None = None) -> torch.Tensor:
        return _part(self._tensor(name), expert, rows)

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


class SafetensorsSource:
    """A Hugging Face checkpoint folder, by the parameter names of its model.

    Quantized tensors (`ktgraph/weights/checkpoints`) are served as values by `get` and as they are
    by `rows`.  One that the file holds transposed (gpt-oss) has its rows under `upright`'s name.
    `model` is the transformers model (it may be on the meta device) or its config; by default it is
    made from the folder's config.json.  Raises CheckpointError when a file is missing, truncated or
    does not fit the model, before anything is read.
    """

    def __init__(self, folder: str | Path, model: Any = None) -> None:
        from transformers import PreTrainedModel

        from ktgraph.frontends.hf_build import build_twin, load_config
        from ktgraph.frontends.hf_keys import plan
        from ktgraph.frontends.safetensors_files import Shards

        self.folder = Path(folder)
        config = load_config(folder) if model is None else getattr(model, "config", model)
        twin = build_twin(model if isinstance(model, PreTrainedModel) else config)
        self._shards = Shards(folder)
        self._quantized = _quantized_tensors(self._shards, config)
        self._entries = _logical_entries(self._shards, self._quantized)
        self._recipes = plan(twin.model, self.folder, self._entries)
        self._values = twin.buffers  # in no file: computed from the config
        for name, tensor in twin.model.state_dict().items():
            self._check_shape(name, tuple(tensor.shape))
            self._check_encoding(name)

    def _check_shape(self, name: str, wanted: tuple[int, ...]) -> None:
        from ktgraph.frontends.safetensors_files import CheckpointError

        recipe, got = self._recipes[name], self.shape(name)
        first = self._entry(recipe.pieces[0][0])
        if got == wanted and self._is_regular(recipe):
            return
        raise CheckpointError(
            f"{first.file}: tensor {first.key!r}: parameter {name!r} is {list(wanted)} by "
            f"config.json, the file gives {list(got)}. The files belong to another config; "
            "download the checkpoint again"
        )

    def _is_regular(self, recipe: Recipe) -> bool:
        """Every expert has each piece, in one shape."""
        counts = {len(keys) for keys in recipe.pieces}
        shapes = [{self._entry(k).shape for k in keys} for keys in recipe.pieces]
        return len(counts) == 1 and all(len(s) == 1 for s in shapes)

    def _check_encoding(self, name: str) -> None:
        """Pieces of one parameter are stored alike."""
        from ktgraph.frontends.safetensors_files import CheckpointError

        keys = [key for piece in self._recipes[name].pieces for key in piece]
        kinds = {self._encoding_of(key): key for key in keys}
        if len(kinds) > 1:
            shown = ", ".join(f"{key!r} as {kind or 'plain'}" for kind, key in kinds.items())
            raise CheckpointError(
                f"{self.folder}: parameter {name!r} is made of tensors that are stored in several "
                f"ways: {shown}. One encoding for all of them is expected"
            )

    def _entry(self, key: str) -> Entry:
        return self._entries[key]

    def _encoding_of(self, key: str) -> Encoding | None:
        found = self._quantized.get(key)
        return None if found is None else found.encoding

    def names(self) -> Sequence[str]:
        return [*self._recipes, *self._values]

    def upright(self, name: str) -> str | None:
        """The name of the transposed rows of a parameter that the file holds transposed."""
        recipe = self._recipes.get(name)
        found = None if recipe is None else self._quantized.get(recipe.pieces[0][0])
        return f"{name}{_UPRIGHT}" if found is not None and found.transposed else None

    def encoding(self, name: str) -> Encoding | None:
        if name in self._values:
            return None
        stem = name.removesuffix(_UPRIGHT)
        if self.upright(stem) == name:
            return self._encoding_of(self._recipes[stem].pieces[0][0])
        return None if self.upright(name) else self._encoding_of(self._recipe(name).pieces[0][0])

    def rows(self, name: str, expert: int | None = None) -> torch.Tensor:
        stem = name.removesuffix(_UPRIGHT)
        upright = self.upright(stem) == name
        recipe = self._recipe(stem if upright else name)
        if recipe.stacked and expert is None:
            return torch.stack([self.rows(name, e) for e in range(len(recipe.pieces[0]))])
        member, entry = (expert or 0, None) if recipe.stacked else (0, expert)
        tensors = [self._quantized[keys[member]] for keys in recipe.pieces]
        parts = [self._rows_of(tensor, entry) for tensor in tensors]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)

    def _rows_of(self, tensor: QuantizedTensor, entry: int | None) -> torch.Tensor:
        if len(tensor.shape) == 2:
            found = to_rows(tensor.read(self._shards))
            return found if entry is None else found[entry]
        if entry is not None:
            return to_rows(tensor.read(self._shards, entry))
        each = [to_rows(tensor.read(self._shards, e)) for e in range(tensor.shape[0])]
        return torch.stack(each)

    def _recipe(self, name: str) -> Recipe:
        if name not in self._recipes:
            raise unknown_tensor(str(self.folder), name, self.names())
        return self._recipes[name]

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._values:
            return tuple(self._values[name].shape)
        stem = name.removesuffix(_UPRIGHT)
        if self.upright(stem) == name:
            *lead, rows, columns = self.shape(stem)
            return (*lead, columns, rows)
        recipe = self._recipe(name)
        shapes = [self._entry(keys[0]).shape for keys in recipe.pieces]
        if recipe.stacked:
            shapes = [(len(recipe.pieces[0]), *shape) for shape in shapes]
        if len(shapes) == 1:
            return shapes[0]
        joined = list(shapes[0])
        joined[recipe.axis] = sum(shape[recipe.axis] for shape in shapes)
        return tuple(joined)

    def dtype(self, name: str) -> torch.dtype:
        if name in self._values:
            return self._values[name].dtype
        return self._entry(self._recipe(name).pieces[0][0]).dtype

    def get(self, name: str, expert: int | None = None, rows: slice | None = None) -> torch.Tensor:
        if name in self._values:
            return _part(self._values[name], expert, rows)
        stem = name.removesuffix(_UPRIGHT)
        if self.upright(stem) == name:
            return _part(self.get(stem, expert).mT, None, rows)
        recipe = self._recipe(name)
        if not recipe.stacked and expert is not None:
            return _part(self._joined(recipe, 0, recipe.axis, expert), None, rows)
        if not recipe.stacked:
            return _part(self._joined(recipe, 0, recipe.axis), expert, rows)
        if expert is not None:
            return _part(self._joined(recipe, expert, recipe.axis - 1), None, rows)
        every = [self._joined(recipe, e, recipe.axis - 1) for e in range(len(recipe.pieces[0]))]
        return _part(torch.stack(every), None, rows)

    def _joined(
        self, recipe: Recipe, member: int, axis: int, entry: int | None = None
    ) -> torch.Tensor:
        """Pieces of one member (expert, or the only one), or one `entry` of its first axis.

        A single piece that is not quantized stays a mapped view.
        """
        if entry is not None and len(recipe.pieces) > 1:
            return self._joined(recipe, member, axis)[entry]
        parts = [self._value(keys[member], entry) for keys in recipe.pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=axis)

    def _value(self, key: str, entry: int | None) -> torch.Tensor:
        """A tensor, or an entry of its first axis; a quantized one decoded to f32."""
        tensor = self._quantized.get(key)
        if tensor is None:
            return _part(self._shards.tensor(key), entry, None)
        if len(tensor.shape) == 2:
            return _part(tensor.read(self._shards).values(), entry, None)
        entries = range(tensor.shape[0]) if entry is None else (entry,)
        each = [tensor.read(self._shards, e).values() for e in entries]
        found = torch.stack(each) if entry is None else each[0]
        return found.mT if tensor.transposed else found

    @property
    def nbytes(self) -> int:
        keys = {k for r in self._recipes.values() for piece in r.pieces for k in piece}
        return sum((self._quantized.get(k) or self._entry(k)).nbytes for k in keys)

    def fingerprint(self) -> str:
        return self._shards.fingerprint()


_UPRIGHT = "_blocks"  # behind the name of a parameter: its rows, where the file has it transposed


def _quantized_tensors(shards: Shards, config: Any) -> dict[str, QuantizedTensor]:
    """By the name that an unquantized checkpoint would give each; {} for a plain checkpoint."""
    from ktgraph.weights.checkpoints import find_quantized

    given: Any = getattr(config, "quantization_config", None)
    if given is None:
        return {}
    settings: dict[str, Any] = dict(given) if isinstance(given, Mapping) else given.to_dict()
    return {tensor.key: tensor for tensor in find_quantized(shards, settings)}


def _logical_entries(
    shards: Shards, quantized: Mapping[str, QuantizedTensor]
) -> dict[str, Entry]:
    """The tensors that an unquantized checkpoint would have: parts give way to what they mean."""
    from ktgraph.frontends.safetensors_files import Entry

    used = {part.key for tensor in quantized.values() for part in tensor.parts.values()}
    found = {key: entry for key, entry in shards.entries.items() if key not in used}
    for key, tensor in quantized.items():
        file = next(iter(tensor.parts.values())).file
        found[key] = Entry(file, key, torch.float32, tensor.file_shape)
    return found


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
            return _part(self._draw(name, shape), expert, rows)
        if expert is not None:
            return _part(self._draw(_member(name, expert, shape), shape[1:]), None, rows)
        every = [self._draw(_member(name, e, shape), shape[1:]) for e in range(shape[0])]
        return _part(torch.stack(every), None, rows)

    def encoding(self, name: str) -> Encoding | None:
        return self._encodings.get(name)

    def rows(self, name: str, expert: int | None = None) -> torch.Tensor:
        shape = self.shape(name)
        if len(shape) < 3:
            return _part(self._rows(name, shape), expert, None)
        if expert is not None:
            return self._rows(_member(name, expert, shape), shape[1:])
        return torch.stack([self._rows(_member(name, e, shape), shape[1:]) for e in range(shape[0])])

    def _rows(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Rows of one matrix as its encoding stores them."""
        encoding = self._encodings[name.partition("[")[0]]
        if not encoding.name.startswith("gguf."):
            return to_rows(quantized(self._normal(name, shape), encoding))
        seed = int.from_bytes(_digest(self.seed, name)[:7], "little")
        format = encoding.name.removeprefix("gguf.")
        return random_blocks(format, *shape, np.random.default_rng(seed), shape[-1] ** -0.5)

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
    "SafetensorsSource",
    "WeightSource",
    "WeightSourceError",
    "unknown_tensor",
]
