"""Weights that are views of others in a GPU's memory: both halves of MLA's kv_b.

The absorbed form reads kv_b by halves, the expanded form whole.  Kernels of a GPU take strided
matrices, so the halves need no bytes of their own; tiles of the CPU do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ktgraph.ir.graph import Module, Recipe
from ktgraph.ir.interp import evaluate_attr
from ktgraph.runtime.operands import WeightUse
from ktgraph.weights.recipes import recipe_def

VIEWS = frozenset({"mla_key_half", "mla_value_half"})  # recipes


@dataclass(frozen=True)
class WeightView:
    """`use` is `recipe` of the tensor of `base`, which is loaded itself."""

    use: WeightUse
    base: str  # key
    recipe: Recipe
    attrs: Mapping[str, Any]

    def of(self, base: torch.Tensor) -> torch.Tensor:
        """The view; shares the memory of `base`."""
        return recipe_def(self.recipe.kind).apply([base], self.attrs)


def weight_views(module: Module, uses: Sequence[WeightUse]) -> dict[str, WeightView]:
    """By key, the uses on a GPU that are views of another use on it."""
    dense = {u.key: u for u in uses if u.device != "cpu" and u.form == "stored"}
    found: dict[str, WeightView] = {}
    for use in dense.values():
        weight = module.weight_of(use.ref)
        made = weight.recipe
        if made is None or made.kind not in VIEWS:
            continue
        (argument,) = made.args
        bound = {} if use.index is None else {weight.var: use.index}
        index = None if argument.index is None else argument.index.at(bound)
        base = WeightUse(argument, index, "stored", use.type, use.device).key
        if base in dense and dense[base].type.dtype == use.type.dtype:
            attrs = {k: evaluate_attr(v, {**module.dims, **bound}) for k, v in made.attrs}
            found[use.key] = WeightView(use, base, made, attrs)
    return found


__all__ = ["VIEWS", "WeightView", "weight_views"]
