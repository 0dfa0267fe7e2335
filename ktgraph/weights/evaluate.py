"""Values of weights: sources and recipes evaluated, whole, matrix by matrix, or as stored bytes.

`matrices` yields a stack of experts or heads one matrix at a time, and reads one expert at a time
from the source, so that a checkpoint of hundreds of gigabytes never exists twice.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ktgraph.ir.graph import Module, Recipe, Weight, WeightRef
from ktgraph.ir.interp import evaluate_attr
from ktgraph.ops.tensor import torch_dtype
from ktgraph.weights.encodings import (
    Encoding,
    Stored,
    Tile,
    empty_packed,
    from_float,
    pack_matrix,
    parse_encoding,
)
from ktgraph.weights.recipes import expert_of_slot, recipe_def
from ktgraph.weights.sources import EncodedSource, WeightSource
from ktgraph.weights.stored_rows import has_rows, pack_rows, stored_row_nbytes


@dataclass(frozen=True)
class _Reader:
    """What is read of a source's tensors: values, or rows as they are stored (`stored_rows`).

    Recipes of whole rows, the only ones that keep an encoding of rows, mean the same for both.
    """

    get: Callable[[str, int | None], torch.Tensor]  # of a name; of an entry of the first axis
    row_size: Callable[[int], int]  # of the last axis, for so many columns


class WeightError(ValueError):
    """A weight whose value cannot be had; the message names the weight."""


class WeightEvaluator:
    """Values of the weights of a module; a `WeightProvider` for the interpreter.

    `dtype`: what values come in; None: each weight's own compute dtype.  `bindings`: values of the
    dims, the module's own by default.  `lossless` skips lossy recipes, so that structure can be
    checked apart from rounding.  At most `cache_nbytes` of evaluated values are kept.
    """

    def __init__(
        self,
        module: Module,
        source: WeightSource,
        dtype: torch.dtype | None = None,
        bindings: Mapping[str, int] | None = None,
        *,
        lossless: bool = False,
        cache_nbytes: int = 1 << 28,
    ) -> None:
        self.module = module
        self.source = source
        self.dtype = dtype
        self.bindings = dict(module.dims if bindings is None else bindings)
        self.lossless = lossless
        self.cache_nbytes = cache_nbytes
        self._cache: OrderedDict[tuple[str, int | None], torch.Tensor] = OrderedDict()
        self._held = 0  # bytes in the cache

    def tensor(self, ref: WeightRef, index: int | None = None) -> torch.Tensor:
        """The value of a weight (member `index` of a family) in the compute dtype."""
        key = (ref.name, index)
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        value = self._value(ref, index, self._values(self._in_compute_dtype(ref)))
        self._keep(key, value)
        return value

    def matrices(self, ref: WeightRef, index: int | None = None) -> Iterator[torch.Tensor]:
        """The matrices of a weight [..., rows, cols], each made when its turn comes."""
        yield from self._matrices(ref, index, self._values(self._in_compute_dtype(ref)))

    def sample(
        self, ref: WeightRef, index: int | None = None, most: int = 4
    ) -> Iterator[torch.Tensor]:
        """At most `most` of the matrices, evenly spaced; the others are not read."""
        shape = self.shape(ref)
        if len(shape) != 3:
            yield from self.matrices(ref, index)
            return
        reader = self._values(self._in_compute_dtype(ref))
        for entry in range(0, shape[0], -(-shape[0] // most)):
            yield self._entry(ref, index, entry, reader)

    def stored(self, ref: WeightRef, index: int | None = None) -> Stored:
        """The arrays of the weight in its declared encoding, made from the unrounded values.

        A weight that a source stores in that encoding: its rows (`stored_rows`), or, in tiles, the
        very integers and scales.
        """
        type = self.module.weight_of(ref).type
        encoding = type.encoding or Encoding(type.dtype)
        if Tile.of(encoding) is not None:
            return (self._packed(ref, index, encoding),)
        if self._is_kept(ref):
            return (self._value(ref, index, self._rows(encoding)),)
        inner, at = self._unencoded(ref, index)
        return from_float(self._value(inner, at, self._values(_as_it_is)), encoding)

    # -- storing --------------------------------------------------------------------------------
    def _packed(self, ref: WeightRef, index: int | None, encoding: Encoding) -> torch.Tensor:
        shape = self.shape(ref)
        packed = empty_packed(shape, encoding)
        inner, at = self._unencoded(ref, index)
        kept = self.module.weight_of(inner).type.encoding
        if kept is None or not self._is_kept(inner) or not _holds(encoding, kept):
            for number, matrix in enumerate(self._matrices(inner, at, self._values(_as_it_is))):
                pack_matrix(packed, number, matrix, shape, encoding)
            return packed
        for number, rows in enumerate(self._matrices(inner, at, self._rows(kept))):
            try:
                pack_rows(packed, number, rows, shape, kept, encoding)
            except ValueError as error:
                raise WeightError(f"@{inner.name}, matrix {number}: {error}") from error
        return packed

    def _is_kept(self, ref: WeightRef) -> bool:
        """Whether the weight is stored in its encoding, so that nothing is quantized here."""
        weight, made = self._derived(ref)
        if made is None or not has_rows(weight.type.encoding):
            return has_rows(weight.type.encoding)
        stored = [a for a in made.args if not self._is_table(a)]
        return made.kind != "quantize" and all(map(self._is_kept, stored))

    def _is_table(self, ref: WeightRef) -> bool:
        return self.module.weight_of(ref).type.dtype == "i32"

    def _unencoded(self, ref: WeightRef, index: int | None) -> tuple[WeightRef, int | None]:
        """The weight under `pack` and `quantize`, so that it is rounded once, not twice."""
        weight, made = self._derived(ref)
        if made is not None and made.kind == "pack":
            wanted, at = self._argument(weight, made.args[0], index)
            inner, under = self._derived(wanted)
            if under is None or not _same_numbers(under, weight.type.encoding):
                return wanted, at
            return self._argument(inner, under.args[0], at)
        if made is not None and made.kind == "quantize":
            return self._argument(weight, made.args[0], index)
        return ref, index

    def _derived(self, ref: WeightRef) -> tuple[Weight, Recipe | None]:
        weight = self.module.weight_of(ref)
        return weight, weight.recipe

    # -- reading --------------------------------------------------------------------------------
    def _values(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> _Reader:
        return _Reader(lambda name, entry: convert(self.source.get(name, entry)), lambda n: n)

    def _rows(self, encoding: Encoding) -> _Reader:
        source = self.source
        if not isinstance(source, EncodedSource):
            raise WeightError(
                f"{type(source).__name__} gives values, but rows of {encoding} are packed bit by "
                "bit: they come from a source with `rows` (ktgraph/weights/sources.py)"
            )
        return _Reader(source.rows, lambda columns: stored_row_nbytes(encoding, columns))

    def _reader_of(self, ref: WeightRef, reader: _Reader) -> _Reader:
        """For a recipe's argument: a table of slots has no rows in an encoding."""
        return self._values(_as_it_is) if self._is_table(ref) else reader

    # -- values ---------------------------------------------------------------------------------
    def shape(self, ref: WeightRef) -> list[int]:
        """Sizes of a weight at the bindings."""
        return [d.at(self.bindings) for d in self.module.weight_of(ref).type.dims]

    def _read_shape(self, ref: WeightRef, reader: _Reader) -> list[int]:
        shape = self.shape(ref)
        return [*shape[:-1], reader.row_size(shape[-1])] if shape else shape

    def _in_compute_dtype(self, ref: WeightRef) -> Callable[[torch.Tensor], torch.Tensor]:
        wanted = self.dtype or torch_dtype(self.module.weight_of(ref).type.dtype)
        return lambda x: x.to(wanted) if x.is_floating_point() else x

    def _value(self, ref: WeightRef, index: int | None, reader: _Reader) -> torch.Tensor:
        weight, made = self._derived(ref)
        if made is None:
            value = reader.get(source_name(weight, index), None)
        else:
            refs = [self._argument(weight, arg, index) for arg in made.args]
            tensors = [self._value(r, i, self._reader_of(r, reader)) for r, i in refs]
            value = self._apply(made, tensors, reader, self._member(weight, index))
        return self._checked(weight, index, value, self._read_shape(ref, reader))

    def _matrices(
        self, ref: WeightRef, index: int | None, reader: _Reader
    ) -> Iterator[torch.Tensor]:
        shape = self.shape(ref)
        if len(shape) != 3:
            shape = self._read_shape(ref, reader)
            yield from self._value(ref, index, reader).reshape(-1, *shape[-2:])
            return
        for entry in range(shape[0]):
            yield self._entry(ref, index, entry, reader)

    def _entry(
        self, ref: WeightRef, index: int | None, entry: int, reader: _Reader
    ) -> torch.Tensor:
        """Entry `entry` of the first axis, without the others where the recipe allows it."""
        weight, made = self._derived(ref)
        if made is None:
            value = reader.get(source_name(weight, index), entry)
            return self._checked(weight, index, value, self._read_shape(ref, reader)[1:])
        refs = [self._argument(weight, arg, index) for arg in made.args]
        if made.kind == "stack":
            return self._value(*refs[entry], reader)
        if made.kind == "resident":
            table = self._value(*refs[1], self._reader_of(refs[1][0], reader))
            return self._entry(*refs[0], expert_of_slot(table, entry), reader)
        member = self._member(weight, index)
        if not recipe_def(made.kind).by_entry(self._attrs(made, member), weight.type.rank):
            return self._value(ref, index, reader)[entry]
        parts = [self._entry(r, i, entry, reader)[None] for r, i in refs]
        return self._apply(made, parts, reader, member)[0]

    def _member(self, weight: Weight, index: int | None) -> dict[str, int]:
        """The family's index, which attributes of its recipe may name."""
        return {} if index is None else {weight.var: index}

    def _apply(
        self,
        made: Recipe,
        tensors: list[torch.Tensor],
        reader: _Reader,
        member: Mapping[str, int] | None = None,
    ) -> torch.Tensor:
        definition, attrs = recipe_def(made.kind), self._attrs(made, member)
        if self.lossless and not definition.is_exact:
            return tensors[0]
        if "shape" in attrs:
            *lead, columns = attrs["shape"]
            attrs["shape"] = [*lead, reader.row_size(columns)]
        return definition.apply(tensors, attrs)

    def _attrs(self, made: Recipe, member: Mapping[str, int] | None = None) -> dict[str, Any]:
        bound = {**self.bindings, **(member or {})}
        return {k: evaluate_attr(v, bound) for k, v in made.attrs}

    def _argument(
        self, owner: Weight, arg: WeightRef, index: int | None
    ) -> tuple[WeightRef, int | None]:
        """A recipe's argument and which member of its family is meant."""
        if arg.index is None:
            return arg, None
        return arg, arg.index.at({**self.bindings, **self._member(owner, index)})

    def _checked(
        self, weight: Weight, index: int | None, value: torch.Tensor, shape: list[int]
    ) -> torch.Tensor:
        if list(value.shape) != shape:
            member = "" if index is None else f" (member {index})"
            raise WeightError(
                f"@{weight.name}{member} is {weight.type} = {shape}, its "
                f"{'recipe' if weight.recipe else 'source'} gives {list(value.shape)}"
            )
        return value

    def _keep(self, key: tuple[str, int | None], value: torch.Tensor) -> None:
        self._cache[key] = value
        self._held += value.nbytes
        while self._held > self.cache_nbytes:
            self._held -= self._cache.popitem(last=False)[1].nbytes


def _as_it_is(value: torch.Tensor) -> torch.Tensor:
    return value


def _holds(tile: Encoding, stored: Encoding) -> bool:
    """Whether tiles take the very integers of a stored encoding."""
    found = Tile.of(tile)
    assert found is not None
    return (found.format, found.group) == (stored.name.removeprefix("gguf."), stored.get("group"))


def _same_numbers(made: Recipe, encoding: Encoding | None) -> bool:
    """Whether a `quantize` below a `pack` makes the very numbers that the tiles hold."""
    tile = Tile.of(encoding)
    if made.kind != "quantize" or tile is None:
        return False
    inner = parse_encoding(str(made.get("encoding")))
    return (inner.name, inner.get("group")) == (tile.format, tile.group)


def source_name(weight: Weight, index: int | None) -> str:
    """The checkpoint's name of a weight, or of member `index` of a family."""
    if weight.source is None:
        raise WeightError(f"@{weight.name} has neither a source nor a recipe")
    if not weight.is_family:
        return weight.source
    if index is None:
        raise WeightError(f"@{weight.name} is a family: say which member")
    return weight.source.replace("{" + weight.var + "}", str(index))


__all__ = ["WeightError", "WeightEvaluator", "source_name"]
