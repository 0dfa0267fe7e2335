"""How a checkpoint's files store a model's parameters, where that is not one tensor of their own.

Quantized files and GGUF have other names, encodings and cuts; what a parameter is made of becomes
weights and recipes of the traced module, so that the text says it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ktgraph.ir.dims import Dim
from ktgraph.ir.types import Encoding

Dims = tuple[Dim, ...]
Attrs = dict[str, object]


@dataclass(frozen=True)
class Made:
    """A parameter made by a recipe from tensors of the source; `heads` of a query or key."""

    kind: str  # transpose, concat, mla_join, split_pairs or reshape
    sources: tuple[str, ...]
    heads: str = ""  # the config's field that has their number


@dataclass(frozen=True)
class FileForms:
    """By parameter: its name in the source, or what it is made of.  By name in the source: how it
    is stored, an encoding or a plain dtype."""

    names: Mapping[str, str] = field(default_factory=dict[str, str])
    made: Mapping[str, Made] = field(default_factory=dict[str, Made])
    encodings: Mapping[str, Encoding] = field(default_factory=dict[str, Encoding])
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict[str, torch.dtype])


def shapes_and_attrs(made: Made, dims: Dims, config: Any) -> tuple[list[Dims], Attrs]:
    """Shapes of what a parameter of `dims` is made of, and the recipe's attributes."""
    return _RULES[made.kind](made, dims, config)


def _transpose(made: Made, dims: Dims, config: Any) -> tuple[list[Dims], Attrs]:
    *lead, columns, rows = dims
    return [(*lead, rows, columns)], {}


def _concat(made: Made, dims: Dims, config: Any) -> tuple[list[Dims], Attrs]:
    """Equal pieces one after another along the rows of every expert."""
    experts, rows, columns = dims
    piece = Dim.of(rows.const() // len(made.sources))
    return [(experts, piece, columns)] * len(made.sources), {"axis": 1}


def _mla_join(made: Made, dims: Dims, config: Any) -> tuple[list[Dims], Attrs]:
    """kv_b [H*(N+V), R] of its key half [H, R, N] and its value half [H, V, R]."""
    sizes = config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim
    heads, nope, value = map(Dim.of, sizes)
    return [(heads, dims[1], nope), (heads, value, dims[1])], {}


def _split_pairs(made: Made, dims: Dims, config: Any) -> tuple[list[Dims], Attrs]:
    return [dims], {"H": getattr(config, made.heads)}


def _reshape(made: Made, dims: Dims, config: Any) -> tuple[list[Dims], Attrs]:
    return [tuple(d for d in dims if d != 1)], {"shape": dims}


_RULES: Mapping[str, Callable[[Made, Dims, Any], tuple[list[Dims], Attrs]]] = {
    "concat": _concat,
    "mla_join": _mla_join,
    "reshape": _reshape,
    "split_pairs": _split_pairs,
    "transpose": _transpose,
}


__all__ = ["FileForms", "Made", "shapes_and_attrs"]
