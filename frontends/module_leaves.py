"""Leaf ops of traced modules: experts given as lists of parameters, and calls left to torch.

They exist between export and import only: `expert_list` becomes moe.experts on stacked weights,
`module_call` becomes torch.call.  What a call makes is not computed while tracing: `OpaqueCalls`
holds the shapes that the module's own run gave.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec

from ktgraph.frontends.errors import UnsupportedModelError

_lib = torch.library.Library("ktg", "FRAGMENT")


@dataclass(frozen=True)
class SeenCall:
    """One eager call of a module: tensors in and out, in order of their pytrees."""

    inputs: tuple[tuple[int, ...], ...]  # shapes
    outputs: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]  # of the outputs
    args: str  # how the tensors are passed, as `torch.call` writes it
    spec: TreeSpec  # of the result
    constants: tuple[Any, ...]  # leaves of the result, marked where tensors stand


@dataclass
class OpaqueCalls:
    """The calls of one trace that stay with torch, by the path of the module."""

    seen: dict[str, list[SeenCall]] = field(default_factory=dict[str, list[SeenCall]])

    def find(self, path: str, inputs: Sequence[Tensor]) -> SeenCall:
        """The eager call with these example sizes; raises UnsupportedModelError."""
        shapes = tuple(tuple(map(hint, t.shape)) for t in inputs)
        for call in self.seen[path]:
            if call.inputs == shapes:
                return call
        raise UnsupportedModelError(
            f"{path}: while tracing it is called with tensors {[list(s) for s in shapes]}, but not "
            f"when the model runs (there: {[list(s) for s in self.seen[path][0].inputs]})"
        )


_calls: ContextVar[OpaqueCalls | None] = ContextVar("ktg_opaque_calls", default=None)


@contextmanager
def opaque_calls(calls: OpaqueCalls) -> Iterator[None]:
    """Where `module_call` finds shapes while a model is traced."""
    token = _calls.set(calls)
    try:
        yield
    finally:
        _calls.reset(token)


def hint(size: Any) -> int:
    """A size, or the example's value of a symbolic one."""
    return size if isinstance(size, int) else int(size.node.hint)


# ---------------------------------------------------------------- calls left to torch


def _module_call_fake(inputs: list[Tensor], path: str) -> list[Tensor]:
    calls = _calls.get()
    assert calls is not None
    seen = calls.find(path, inputs)
    return [
        torch.empty([_size(n, axis, inputs) for axis, n in enumerate(shape)], dtype=dtype)
        if not inputs
        else inputs[0].new_empty(
            [_size(n, axis, inputs) for axis, n in enumerate(shape)], dtype=dtype
        )
        for shape, dtype in zip(seen.outputs, seen.dtypes, strict=True)
    ]


def _size(value: int, axis: int, inputs: Sequence[Tensor]) -> Any:
    """A result's size as one of the inputs' that vary: at the same axis first, then any, then a
    product of two neighbours; else a constant.  Other example sizes check it later."""
    sizes = [(a, s) for t in inputs for a, s in enumerate(t.shape) if not isinstance(s, int)]
    same = [s for a, s in sizes if hint(s) == value]
    here = [s for a, s in sizes if hint(s) == value and a == axis]
    if here or same:
        return (here or same)[0]
    for t in inputs:
        for a, b in zip(t.shape, t.shape[1:], strict=False):
            if not (isinstance(a, int) and isinstance(b, int)) and hint(a) * hint(b) == value:
                return a * b
    return value


# ---------------------------------------------------------------- experts as lists


def _expert_list_fake(x: Tensor, ids: Tensor, weights: Tensor, *lists: Any, **_: Any) -> Tensor:
    first: list[Tensor] = lists[0]
    torch._check(x.shape[-1] == first[0].shape[-1])  # the width is the weights', not a size to vary
    return torch.empty_like(x)


def _define(schema: str, fake: Any) -> None:
    """A leaf op that is traced, never run: torch says so where somebody calls it."""
    name = schema.split("(", 1)[0]
    _lib.define(schema)
    torch.library.register_fake(f"ktg::{name}", fake, lib=_lib)


_define("module_call(Tensor[] inputs, str path) -> Tensor[]", _module_call_fake)
_define(
    "expert_list(Tensor x, Tensor ids, Tensor weights, Tensor[] first, Tensor[] second, "
    "Tensor[] down, Tensor[] first_bias, Tensor[] second_bias, Tensor[] down_bias, str act, "
    "str order) -> Tensor",
    _expert_list_fake,
)

__all__ = ["OpaqueCalls", "SeenCall", "hint", "opaque_calls"]
