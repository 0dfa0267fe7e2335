"""`SafetensorsSource`: a Hugging Face checkpoint folder, by the parameter names of its model."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ktgraph.frontends.declared_forms import UPRIGHT
from ktgraph.frontends.safetensors_files import CheckpointError, Entry, Recipe, Shards
from ktgraph.ir.types import Encoding
from ktgraph.start_cache import folder_key, read_entry
from ktgraph.weights.checkpoints import QuantizedTensor, find_quantized
from ktgraph.weights.sources import part_of, unknown_tensor
from ktgraph.weights.stored_rows import to_rows

LAYOUT = "layout"  # the kind of entry in `start_cache`


class SafetensorsSource:
    """A Hugging Face checkpoint folder, by the parameter names of its model.

    Quantized tensors (`ktgraph/weights/checkpoints`) are served as values by `get` and as they are
    by `rows`.  One that the file holds transposed (gpt-oss) has its rows under `upright`'s name.
    `model` is the transformers model (it may be on the meta device) or its config; by default it is
    made from the folder's config.json.  Raises CheckpointError when a file is missing, truncated or
    does not fit the model, before anything is read.
    """

    def __init__(self, folder: str | Path, model: Any = None) -> None:
        self.folder = Path(folder)
        key = folder_key(self.folder) if model is None else None
        kept = None if key is None else read_entry(key, LAYOUT)
        if kept is not None:
            self._restore(json.loads(kept))
        else:
            self._find(model)

    def _find(self, model: Any) -> None:
        """By transformers, which takes seconds to import."""
        from transformers import PreTrainedModel

        from ktgraph.frontends.hf_build import build_twin, load_config, quantization_of
        from ktgraph.frontends.hf_keys import plan

        folder = self.folder
        config = load_config(folder) if model is None else getattr(model, "config", model)
        is_model = isinstance(model, PreTrainedModel)
        twin = build_twin(model if is_model else config, forms=False)
        self._shards = Shards(folder)
        self._settings = quantization_of(config)
        self._quantized = _quantized_tensors(self._shards, self._settings)
        self._entries = _logical_entries(self._shards, self._quantized)
        self._recipes = plan(twin.model, self.folder, self._entries)
        self._values = twin.buffers  # in no file: computed from the config
        for name, tensor in twin.model.state_dict().items():
            self._check_shape(name, tuple(tensor.shape))
            self._check_encoding(name)

    def layout(self) -> str:
        """What was found, as JSON, for `start_cache`: the files themselves say the rest."""
        recipes = {n: [r.pieces, r.stacked, r.axis] for n, r in self._recipes.items()}
        values = {
            name: [str(t.dtype).removeprefix("torch."), list(t.shape), _base64(t)]
            for name, t in self._values.items()
        }
        settings = None if self._settings is None else dict(self._settings)
        return json.dumps({"settings": settings, "recipes": recipes, "values": values})

    def _restore(self, kept: dict[str, Any]) -> None:
        """What `layout` gave of files with the same headers, which were checked then."""
        self._shards = Shards(self.folder)
        self._settings = kept["settings"]
        self._quantized = _quantized_tensors(self._shards, self._settings)
        self._entries = _logical_entries(self._shards, self._quantized)
        self._recipes = {name: Recipe(*found) for name, found in kept["recipes"].items()}
        self._values = {
            name: torch.frombuffer(bytearray(b64decode(data)), dtype=getattr(torch, dtype)).view(
                shape
            )
            for name, (dtype, shape, data) in kept["values"].items()
        }

    def _check_shape(self, name: str, wanted: tuple[int, ...]) -> None:
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
        return f"{name}{UPRIGHT}" if found is not None and found.transposed else None

    def encoding(self, name: str) -> Encoding | None:
        if name in self._values:
            return None
        stem = name.removesuffix(UPRIGHT)
        if self.upright(stem) == name:
            return self._encoding_of(self._recipes[stem].pieces[0][0])
        return None if self.upright(name) else self._encoding_of(self._recipe(name).pieces[0][0])

    def rows(self, name: str, expert: int | None = None) -> torch.Tensor:
        stem = name.removesuffix(UPRIGHT)
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
        stem = name.removesuffix(UPRIGHT)
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
            return part_of(self._values[name], expert, rows)
        stem = name.removesuffix(UPRIGHT)
        if self.upright(stem) == name:
            return part_of(self.get(stem, expert).mT, None, rows)
        recipe = self._recipe(name)
        if not recipe.stacked and expert is not None:
            return part_of(self._joined(recipe, 0, recipe.axis, expert), None, rows)
        if not recipe.stacked:
            return part_of(self._joined(recipe, 0, recipe.axis), expert, rows)
        if expert is not None:
            return part_of(self._joined(recipe, expert, recipe.axis - 1), None, rows)
        every = [self._joined(recipe, e, recipe.axis - 1) for e in range(len(recipe.pieces[0]))]
        return part_of(torch.stack(every), None, rows)

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
            return part_of(self._shards.tensor(key), entry, None)
        if len(tensor.shape) == 2:
            return part_of(tensor.read(self._shards).values(), entry, None)
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


def _base64(tensor: torch.Tensor) -> str:
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return b64encode(data.numpy().tobytes()).decode()


def _quantized_tensors(
    shards: Shards, settings: Mapping[str, Any] | None
) -> dict[str, QuantizedTensor]:
    """By the name that an unquantized checkpoint would give each; {} for a plain checkpoint."""
    if settings is None:
        return {}
    return {tensor.key: tensor for tensor in find_quantized(shards, settings)}


def _logical_entries(shards: Shards, quantized: Mapping[str, QuantizedTensor]) -> dict[str, Entry]:
    """The tensors that an unquantized checkpoint would have: parts give way to what they mean."""
    used = {part.key for tensor in quantized.values() for part in tensor.parts.values()}
    found = {key: entry for key, entry in shards.entries.items() if key not in used}
    for key, tensor in quantized.items():
        file = next(iter(tensor.parts.values())).file
        found[key] = Entry(file, key, torch.float32, tensor.file_shape)
    return found


__all__ = ["LAYOUT", "SafetensorsSource"]
