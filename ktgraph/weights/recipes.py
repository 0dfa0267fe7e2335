"""The one table of recipes: how a derived weight is made from others, evaluated once at load.

A recipe has a meaning (a function on torch tensors in the compute dtype), a type rule, and is exact
or lossy.  Attributes are dims of the module, so a recipe is rebound with it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ktgraph.ir.dims import Dim, product
from ktgraph.ir.graph import Attr, Module, Weight
from ktgraph.ir.types import DTYPES, Encoding, TensorType
from ktgraph.ops.tensor import torch_dtype
from ktgraph.weights.encodings import (
    GGUF_FORMATS,
    Tile,
    encoding_def,
    parse_encoding,
    round_trip,
)

Tensors = Sequence[torch.Tensor]
Meaning = Callable[[Tensors, Mapping[str, Any]], torch.Tensor]
TypeRule = Callable[[Sequence[TensorType], Mapping[str, Attr]], TensorType]


class RecipeError(ValueError):
    """An unknown recipe, or arguments that do not fit one."""


@dataclass(frozen=True)
class RecipeDef:
    """One kind.  `apply` gets tensors and plain attributes; `type` gets types and dims.

    `by_entry` tells whether applying it to each entry of the first axis alone (kept as an axis of
    size 1) and joining the results is the same, so that a stack is made one matrix at a time.
    """

    kind: str
    apply: Meaning
    type: TypeRule
    is_exact: bool
    by_entry: Callable[[Mapping[str, Any], int], bool]  # of attributes and rank
    doc: str


_TABLE: dict[str, RecipeDef] = {}


def _never(attrs: Mapping[str, Any], rank: int) -> bool:
    return False


def _always(attrs: Mapping[str, Any], rank: int) -> bool:
    return rank > 2


def _off_first_axis(attrs: Mapping[str, Any], rank: int) -> bool:
    return rank > 2 and attrs.get("axis", 0) % rank != 0


def _rows_move(attrs: Mapping[str, Any], rank: int) -> bool:
    return rank > 2 and attrs.get("axis", -2) % rank != 0


def _keeps_first_axis(attrs: Mapping[str, Any], rank: int) -> bool:
    return rank > 2 and attrs.get("axes", [0])[0] == 0


def recipe(
    kind: str,
    type: TypeRule,
    *,
    lossy: bool = False,
    by_entry: Callable[[Mapping[str, Any], int], bool] = _never,
) -> Callable[[Meaning], Meaning]:
    """Declare a recipe kind; the decorated function is its meaning."""

    def register(apply: Meaning) -> Meaning:
        if kind in _TABLE:
            raise ValueError(f"recipe {kind} is declared twice")
        _TABLE[kind] = RecipeDef(
            kind, apply, type, not lossy, by_entry, (apply.__doc__ or "").strip()
        )
        return apply

    return register


def recipe_def(kind: str) -> RecipeDef:
    """The table's entry; raises RecipeError listing close names."""
    if kind in _TABLE:
        return _TABLE[kind]
    close = difflib.get_close_matches(kind, _TABLE, n=3) or sorted(_TABLE)
    raise RecipeError(f"unknown recipe {kind!r} (did you mean {', '.join(close)}?)")


def all_recipes() -> dict[str, RecipeDef]:
    """Every recipe by kind."""
    return dict(_TABLE)


def recipe_type(module: Module, weight: Weight) -> TensorType:
    """The type that a derived weight's recipe gives; raises RecipeError naming the weight."""
    made = weight.recipe
    if made is None:
        raise RecipeError(f"@{weight.name} has no recipe")
    types = [module.weight_of(ref).type for ref in made.args]
    try:
        return recipe_def(made.kind).type(types, dict(made.attrs))
    except (RecipeError, ValueError) as error:
        raise RecipeError(f"@{weight.name} = {made.kind}(…): {error}") from error


# -- type rules -----------------------------------------------------------------------------------
def _only(types: Sequence[TensorType]) -> TensorType:
    if len(types) != 1:
        raise RecipeError(f"one weight expected, got {len(types)}")
    return types[0]


def _axis(attrs: Mapping[str, Attr], rank: int) -> int:
    value = attrs.get("axis", Dim.of(0))
    axis = value.const() if isinstance(value, Dim) else rank
    if not -rank <= axis < rank:
        raise RecipeError(f"axis {value} is outside a weight of {rank} axes")
    return axis % rank


def _dim(attrs: Mapping[str, Attr], key: str) -> Dim:
    value = attrs.get(key)
    if not isinstance(value, Dim):
        raise RecipeError(f"the integer attribute {key} is missing")
    return value


def _dims(attrs: Mapping[str, Attr], key: str) -> tuple[Dim, ...]:
    value = attrs.get(key)
    if not isinstance(value, tuple):
        raise RecipeError(f"the list {key} is missing")
    return tuple(d for d in value if isinstance(d, Dim))


def _by_rows(given: TensorType, *dims: Dim) -> TensorType:
    """A result made of whole rows: every encoding that works row by row is kept."""
    tile = given.encoding is not None and encoding_def(given.encoding).is_tile
    return replace(given, dims=dims, encoding=None if tile else given.encoding)


def _by_elements(given: TensorType, *dims: Dim) -> TensorType:
    """A result whose rows are cut or mixed: only dense encodings are kept."""
    dense = given.encoding is None or encoding_def(given.encoding).is_dense
    return replace(given, dims=dims, encoding=given.encoding if dense else None)


def _along(given: TensorType, axis: int, size: Dim) -> TensorType:
    dims = (*given.dims[:axis], size, *given.dims[axis + 1 :])
    keep = _by_elements if axis == given.rank - 1 else _by_rows
    return keep(given, *dims)


def _same_type(types: Sequence[TensorType], attrs: Mapping[str, Attr]) -> TensorType:
    return _only(types)


def _cast_type(types: Sequence[TensorType], attrs: Mapping[str, Attr]) -> TensorType:
    dtype = str(attrs.get("dtype"))
    if dtype not in DTYPES:
        raise RecipeError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    return replace(_only(types), dtype=dtype, encoding=None)


def _concat_type(types: Sequence[TensorType], attrs: Mapping[str, Attr]) -> TensorType:
    first, axis = _shared(types), _axis(attrs, types[0].rank)
    total = Dim.of(0)
    for given in types:
        others = [(a, b) for i, (a, b) in enumerate(zip(first.dims, given.dims, strict=True))
                  if i != axis and a != b]  # fmt: skip
        if others:
            raise RecipeError(f"{given} and {first} differ outside axis {axis}")
        total = total + given.dims[axis]
    return _along(first, axis, total)


def _shared(types: Sequence[TensorType]) -> TensorType:
    """The first type; without encoding when the others have another one."""
    if not types:
        raise RecipeError("at least one weight expected")
    first = types[0]
    wrong = [t for t in types if t.dtype != first.dtype or t.rank != first.rank]
    if wrong:
        raise RecipeError(f"{wrong[0]} and {first} differ in dtype or rank")
    return first if all(t.encoding == first.encoding for t in types) else first.encoded(None)


def _slice_type(types: Sequence[TensorType], attrs: Mapping[str, Attr]) -> TensorType:
    given = _only(types)
    _dim(attrs, "start")
    return _along(given, _axis(attrs, given.rank), _dim(attrs, "size"))


def _stack_type(types: Sequence[TensorType], attrs: Mapping[str, Attr]) -> TensorType:
    first = _shared(types)
    wrong = [t for t in types if t.dims != first.dims]
    if wrong:
        raise RecipeError(f"{wrong[0]} and {first} have different shapes")
    return _by_rows(first, Dim.of(len(types)), *first.dims)


def _transpose_axes(attrs: Mapping[str, Attr], rank: int) -> list[int]:
    if "axes" not in attrs:
        return [*range(rank - 2), rank - 1, rank - 2]
    axes = [d.const() for d in _dims(attrs, "axes")]
    if sorted(axes) != list(range(rank)):
        raise RecipeError(f"axes {axes} are no permutation of {rank} axes")
    return axes


def _transpose_type(types: Sequence[TensorType], attrs: Mapping[str, Attr]) -> TensorType:
    given = _only(types)
    axes = _transpose_axes(attrs, given.rank)
    keep = _by_rows if axes[-1] == given.rank - 1 else _by_elements
    return keep(given, *(given.dims[a] for a in axes))


def _reshape_type(types: Sequence[TensorType], attrs: Mapping[str, Attr]) -> TensorType:
    given, shape = _only(types), _dims(attrs, "shape")
    if product(given.dims) != product(shape):
        raise RecipeError(f"{given} has another number of elements than the shape asked for")
    keep = _by_rows if shape[-1] == given.dims[-1] else _by_elements
    return keep(given, *shape)


def _deinterleaved_type(types: Sequence[TensorType], attrs: Mapping[str, Attr]) -> TensorType:
    given = _only(types)
    axis = _axis({"axis": Dim.of(-2), **attrs}, given.rank)
    return _along(given, axis, given.dims[axis])


def _heads(types: Sequence[TensorType], attrs: Mapping[str, Attr]) -> tuple[TensorType, list[Dim]]:
    """kv_b's type and [H, N, V, R]."""
    given = _only(types)
    heads, nope, value = (_dim(attrs, k) for k in ("H", "N", "V"))
    if given.rank != 2 or given.dims[0] != heads * (nope + value):
        raise RecipeError(
            f"kv_b is [H*(N+V), R] with H*(N+V) = {heads * (nope + value)}, got {given}"
        )
    return given, [heads, nope, value, given.dims[1]]


def _key_half_type(types: Sequence[TensorType], attrs: Mapping[str, Attr]) -> TensorType:
    given, (heads, nope, _, rank) = _heads(types, attrs)
    return _by_elements(given, heads, rank, nope)


def _value_half_type(types: Sequence[TensorType], attrs: Mapping[str, Attr]) -> TensorType:
    given, (heads, _, value, rank) = _heads(types, attrs)
    return _by_rows(given, heads, value, rank)


def _paired_type(types: Sequence[TensorType], attrs: Mapping[str, Attr]) -> TensorType:
    given, heads = _only(types), _dim(attrs, "H")
    if given.rank > 1:
        return _by_rows(given, *given.dims)
    if heads.is_const and given.dims[0].is_const and given.dims[0].const() % heads.const():
        raise RecipeError(f"{given} is not {heads} heads of equal size")
    return _by_elements(given, *given.dims)


def _joined_type(types: Sequence[TensorType], attrs: Mapping[str, Attr]) -> TensorType:
    if len(types) != 2 or any(t.rank != 3 for t in types):
        raise RecipeError("a key half [H, R, N] and a value half [H, V, R] expected")
    key, value = types
    heads, rank, nope = key.dims
    if value.dims[0] != heads or value.dims[2] != rank or value.dtype != key.dtype:
        raise RecipeError(f"{value} is no value half beside {key}")
    return TensorType(key.dtype, (heads * (nope + value.dims[1]), rank))


def _encoding_attr(attrs: Mapping[str, Attr]) -> Encoding:
    return parse_encoding(str(attrs.get("encoding")))


def _encoded_type(types: Sequence[TensorType], attrs: Mapping[str, Attr]) -> TensorType:
    return _only(types).encoded(_encoding_attr(attrs))


def _dequantized_type(types: Sequence[TensorType], attrs: Mapping[str, Attr]) -> TensorType:
    given = _only(types)
    if given.encoding is None or encoding_def(given.encoding).is_dense:
        raise RecipeError(f"{given} is not quantized")
    return given.encoded(None)


def _slots_type(types: Sequence[TensorType], attrs: Mapping[str, Attr]) -> TensorType:
    if types:
        raise RecipeError(f"no weight expected, got {len(types)}")
    _dim(attrs, "slots")
    return TensorType("i32", (_dim(attrs, "experts"),))


def _resident_type(types: Sequence[TensorType], attrs: Mapping[str, Attr]) -> TensorType:
    if len(types) != 2 or types[1].dtype != "i32":
        raise RecipeError("a stack of experts and a table i32[E] expected")
    stack, table = types
    if stack.dims[0] != table.dims[0]:
        raise RecipeError(f"{stack} and the table {table} have different numbers of experts")
    return _by_rows(stack, _dim(attrs, "slots"), *stack.dims[1:])


# what a weight may be stored as -> tile formats that hold the same values
_SAME_VALUES = {
    "f32": ("f32",),
    "f16": ("f16", "f32"),
    "bf16": ("bf16", "f32"),
    "int8": ("int8",),
    "int4": ("int4",),
    "int4p": ("int4p",),
    "int4z": ("int4z",),
    "mxfp4": ("mxfp4",),
    "fp8": ("fp8",),
    **{f"gguf.{format}": (format,) for format in GGUF_FORMATS},
}


def _packed_type(types: Sequence[TensorType], attrs: Mapping[str, Attr]) -> TensorType:
    given, wanted = _only(types), _encoding_attr(attrs)
    stored = given.encoding or Encoding(given.dtype)
    tile = Tile.of(wanted)
    if tile is None or tile.format not in _SAME_VALUES.get(stored.name, ()):
        raise RecipeError(f"packing is exact: {given} cannot be packed as {wanted}")
    if tile.group != stored.get("group"):
        raise RecipeError(f"{given} has groups of {stored.get('group')}, {wanted} of {tile.group}")
    return given.encoded(wanted)


# -- the table ------------------------------------------------------------------------------------
@recipe("identity", _same_type, by_entry=_always)
def identity(tensors: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    """The weight itself under another name."""
    return tensors[0]


@recipe("cast", _cast_type, lossy=True, by_entry=_always)
def cast(tensors: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    """Values rounded to `dtype`, in the dtype they came in."""
    return tensors[0].to(torch_dtype(attrs["dtype"])).to(tensors[0].dtype)


@recipe("concat", _concat_type, by_entry=_off_first_axis)
def concat(tensors: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    """The weights one after another along `axis` (default 0)."""
    return torch.cat(list(tensors), dim=attrs.get("axis", 0))


@recipe("slice", _slice_type, by_entry=_off_first_axis)
def slice_(tensors: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    """`size` entries of `axis` (default 0) from `start`."""
    return tensors[0].narrow(attrs.get("axis", 0), attrs["start"], attrs["size"])


@recipe("stack", _stack_type)
def stack(tensors: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    """The weights along a new first axis."""
    return torch.stack(list(tensors))


@recipe("transpose", _transpose_type, by_entry=_keeps_first_axis)
def transpose(tensors: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    """Axes in the order `axes`; by default the last two change places."""
    axes: list[int] | None = attrs.get("axes")
    return tensors[0].mT if axes is None else tensors[0].permute(axes)


@recipe("reshape", _reshape_type)
def reshape(tensors: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    """The same elements, row-major, under another `shape`."""
    return tensors[0].reshape(attrs["shape"])


@recipe("deinterleave", _deinterleaved_type, by_entry=_rows_move)
def deinterleave(tensors: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    """Even entries of an axis, then the odd ones: alternating gate and up rows (gpt-oss) apart.

    The axis is the rows' of a matrix or a stack; `axis` says otherwise (a bias [E, W]: -1).
    """
    axis: int = attrs.get("axis", -2)
    size = tensors[0].shape[axis]
    order = torch.cat([torch.arange(0, size, 2), torch.arange(1, size, 2)])
    return tensors[0].index_select(axis, order)


@recipe("split_pairs", _paired_type)
def split_pairs(tensors: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    """Rows of H heads: of each head the even ones, then the odd ones.

    Undoes the order in which llama.cpp keeps queries and keys whose neighbouring channels rotate.
    """
    heads = tensors[0].reshape(attrs["H"], -1, *tensors[0].shape[1:])
    return torch.cat([heads[:, 0::2], heads[:, 1::2]], dim=1).reshape(tensors[0].shape)


@recipe("mla_join", _joined_type)
def mla_join(tensors: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    """kv_b [H*(N+V), R] of its key half [H, R, N] and its value half [H, V, R]."""
    key, value = tensors
    return torch.cat([key.mT, value], dim=1).flatten(0, 1)


def _split_heads(tensors: Tensors, attrs: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    heads, nope, value = attrs["H"], attrs["N"], attrs["V"]
    both = tensors[0].reshape(heads, nope + value, -1)
    return both[:, :nope], both[:, nope:]


@recipe("mla_key_half", _key_half_type)
def mla_key_half(tensors: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    """kv_b [H*(N+V), R] -> [H, R, N]: takes a head's query into latent space (`nn.batched_linear`).

    A grouping of kv_b along R would lie across these rows, so kv_b is never quantized.
    """
    return _split_heads(tensors, attrs)[0].mT


@recipe("mla_value_half", _value_half_type)
def mla_value_half(tensors: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    """kv_b [H*(N+V), R] -> [H, V, R]: takes a head's latent result to its values."""
    return _split_heads(tensors, attrs)[1]


@recipe("quantize", _encoded_type, lossy=True, by_entry=_always)
def quantize(tensors: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    """What is left of the values in `encoding` (ktgraph/weights/encodings.py)."""
    return round_trip(tensors[0], parse_encoding(attrs["encoding"]))


@recipe("dequantize", _dequantized_type, by_entry=_always)
def dequantize(tensors: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    """The values that a quantized weight means, dense in the compute dtype (f32: every bit)."""
    return tensors[0]


@recipe("pack", _packed_type, by_entry=_always)
def pack(tensors: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    """The same values, stored in the tiles of `encoding`: only the layout changes."""
    return tensors[0]


@recipe("expert_slots", _slots_type)
def expert_slots(tensors: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    """i32[experts]: which of `slots` places on the GPU an expert has at first, or -1.

    `hot` is a text of expert numbers for each layer, of which `row` is this one: "5 2 7" gives
    expert 5 slot 0.  Slots that are left get the first experts that are not in it.
    """
    experts, slots = attrs["experts"], attrs["slots"]
    given = [int(e) for e in str(attrs["hot"][attrs["row"]]).split()] if "hot" in attrs else []
    listed = [e for e in given if e < experts]  # a miniature has fewer
    order = [*listed, *(e for e in range(experts) if e not in listed)][:slots]
    table = torch.full((experts,), -1, dtype=torch.int32)
    table[order] = torch.arange(len(order), dtype=torch.int32)
    return table


@recipe("resident", _resident_type)
def resident(tensors: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    """The experts of a stack that a table gives slots, in the order of the slots."""
    stack, table = tensors
    return stack[[expert_of_slot(table, slot) for slot in range(attrs["slots"])]]


def expert_of_slot(table: torch.Tensor, slot: int) -> int:
    """The expert that has a slot; expert 0 for an empty slot, whose bytes nothing reads."""
    found = torch.where(table == slot)[0]
    return int(found[0]) if len(found) else 0


__all__ = [
    "RecipeDef",
    "RecipeError",
    "all_recipes",
    "expert_of_slot",
    "recipe",
    "recipe_def",
    "recipe_type",
]
