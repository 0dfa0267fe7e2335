"""Where weights come from: a loaded model, a folder of safetensors, or a seed.

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
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import nn

from ktgraph.errors import UnsupportedInputError
from ktgraph.ir.graph import Module
from ktgraph.ir.types import DTYPES
from ktgraph.ops.tensor import torch_dtype

if TYPE_CHECKING:
    from ktgraph.frontends.hf_keys import Recipe
    from ktgraph.frontends.safetensors_files import Entry

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
class BlockSource(WeightSource, Protocol):
    """A source whose tensors may be GGUF blocks; `get` gives the values that they mean."""

    def blocks(self, name: str, expert: int | None = None) -> torch.Tensor:
        """The tensor's bytes, uint8 [..., rows, bytes of a row]; an entry of its first axis."""
        ...


def _part(tensor: torch.Tensor, expert: int | None, rows: slice | None) -> torch.Tensor:
    tensor = tensor if expert is None else tensor[expert]
    return tensor if rows is None else tensor[rows]


def _unknown(where: str, name: str, names: Sequence[str]) -> WeightSourceError:
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
            raise _unknown(self._label, name, self.names())
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
            return _part(self._tensor(name), expert, rows)
        if expert is not None:
            return _part(self._member(name, expert), None, rows)
        return _part(torch.stack(self._members(name)), None, rows)

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
        _refuse_quantized(self.folder, config)
        twin = build_twin(model if isinstance(model, PreTrainedModel) else config)
        self._shards = Shards(folder)
        self._recipes = plan(twin.model, self._shards)
        self._values = twin.buffers  # in no file: computed from the config
        for name, tensor in twin.model.state_dict().items():
            self._check_shape(name, tuple(tensor.shape))

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

    def _entry(self, key: str) -> Entry:
        return self._shards.entries[key]

    def names(self) -> Sequence[str]:
        return [*self._recipes, *self._values]

    def _recipe(self, name: str) -> Recipe:
        if name not in self._recipes:
            raise _unknown(str(self.folder), name, self.names())
        return self._recipes[name]

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._values:
            return tuple(self._values[name].shape)
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
        recipe = self._recipe(name)
        if not recipe.stacked:
            return _part(self._joined(recipe, 0, recipe.axis), expert, rows)
        if expert is not None:
            return _part(self._joined(recipe, expert, recipe.axis - 1), None, rows)
        every = [self._joined(recipe, e, recipe.axis - 1) for e in range(len(recipe.pieces[0]))]
        return _part(torch.stack(every), None, rows)

    def _joined(self, recipe: Recipe, member: int, axis: int) -> torch.Tensor:
        """Pieces of one member (expert, or the only one); a single piece stays a mapped view."""
        parts = [self._shards.tensor(keys[member]) for keys in recipe.pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=axis)

    @property
    def nbytes(self) -> int:
        keys = {k for r in self._recipes.values() for piece in r.pieces for k in piece}
        return sum(self._entry(k).nbytes for k in keys)

    def fingerprint(self) -> str:
        return self._shards.fingerprint()


def _refuse_quantized(folder: Path, config: Any) -> None:
    given: Any = getattr(config, "quantization_config", None)
    if given is None:
        return
    method = given.get("quant_method") if isinstance(given, Mapping) else given.quant_method  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    raise WeightSourceError(
        f"{folder}: config.json says the weights are quantized ({method}), which this version "
        "does not read from safetensors. Use the bf16 checkpoint and --quantize, or a .gguf file"
    )


class RandomSource:
    """Random weights for an IR module at its present dims: miniatures and synthetic benchmarks.

    A tensor depends on seed and name only; an expert's slice is the same whether it is asked for
    alone or with the others.  Norm weights lie near 1, linears are scaled by their inputs.
    """

    def __init__(self, module: Module, seed: int = 0) -> None:
        self.seed = seed
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        for weight in module.weights.values():
            if weight.source is None:
                continue
            encoding = weight.type.encoding
            stored = weight.type.dtype if encoding is None else encoding.name
            stored = stored if stored in DTYPES else weight.type.dtype  # of blocks: their values
            for index in range(weight.lo, weight.hi + 1) if weight.is_family else (0,):
                name = weight.source.replace("{" + weight.var + "}", str(index))
                self._shapes[name] = tuple(d.at(module.dims) for d in weight.type.dims)
                self._dtypes[name] = torch_dtype(stored)

    def names(self) -> Sequence[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._shapes:
            raise _unknown("the module", name, self.names())
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        self.shape(name)
        return self._dtypes[name]

    def get(self, name: str, expert: int | None = None, rows: slice | None = None) -> torch.Tensor:
        shape = self.shape(name)
        if len(shape) < 3:
            return _part(self._draw(name, shape), expert, rows)
        if expert is not None:
            return _part(self._draw(f"{name}[{expert % shape[0]}]", shape[1:]), None, rows)
        every = [self._draw(f"{name}[{e}]", shape[1:]) for e in range(shape[0])]
        return _part(torch.stack(every), None, rows)

    def _draw(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name.endswith("inv_freq"):
            return torch.pow(10000.0, -torch.arange(shape[0]) / shape[0]).to(self._stored(name))
        digest = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
        rng = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:7], "little"))
        values = torch.randn(shape, generator=rng, device="cpu")
        if len(shape) > 1:
            values *= shape[-1] ** -0.5
        else:
            values = values * 0.1 + (0.0 if "bias" in name else 1.0)
        return values.to(self._stored(name))

    def _stored(self, name: str) -> torch.dtype:
        return self._dtypes[name.partition("[")[0]]

    @property
    def nbytes(self) -> int:
        return sum(prod(s) * self._dtypes[n].itemsize for n, s in self._shapes.items())

    def fingerprint(self) -> str:
        digest = hashlib.sha256(f"random {self.seed}".encode())
        for name, shape in sorted(self._shapes.items()):
            digest.update(f"{name} {shape} {self._dtypes[name]}".encode())
        return digest.hexdigest()[:32]


__all__ = [
    "BlockSource",
    "ModelSource",
    "RandomSource",
    "SafetensorsSource",
    "WeightSource",
    "WeightSourceError",
]
