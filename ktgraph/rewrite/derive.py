"""Derived weights: names, recipes and families of weights that a rewrite makes from others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ktgraph.ir.dims import Dim
from ktgraph.ir.graph import Module, Recipe, Weight, WeightRef, attr
from ktgraph.ir.types import TensorType


def derived_weight(
    module: Module,
    refs: Sequence[WeightRef],
    leaf: str,
    kind: str,
    type: TensorType,
    attrs: Mapping[str, object] | None = None,
    replaced: int = 1,
) -> Weight:
    """A weight (not yet declared) with the recipe ``kind(refs) attrs``, beside the first of `refs`.

    The name is the first ref's, with `leaf` in place of its last component, or of as many as
    `replaced` says.  When a ref is a member of a family, so is the new weight, over the indices
    that every family has.  A weight declared before with the same recipe is returned itself.
    """
    base = next((r for r in refs if r.index is not None), None)
    owner = module.weight_of(base) if base is not None else None
    var = owner.var if owner is not None else "i"
    args = tuple(_relative(ref, base, var) for ref in refs)
    pairs = tuple((k, attr(v)) for k, v in (attrs or {}).items())
    name = _sibling((base or refs[0]).name, leaf, replaced)
    weight = Weight(name, type, recipe=Recipe(kind, args, pairs), var=var)
    if base is not None:
        weight.lo, weight.hi = _span(module, args)
    return _unique(module, weight)


def reference(weight: Weight, refs: Sequence[WeightRef]) -> WeightRef:
    """How an op that uses `refs` names the weight derived from them."""
    if not weight.is_family:
        return weight.ref()
    base = next(r for r in refs if r.index is not None)
    return weight.ref(base.index)


def _relative(ref: WeightRef, base: WeightRef | None, var: str) -> WeightRef:
    """The ref as the recipe of a family writes it: its index relative to the first ref's."""
    if ref.index is None or base is None or base.index is None:
        return ref
    return WeightRef(ref.name, Dim.of(var) + ref.index - base.index)


def _span(module: Module, args: Sequence[WeightRef]) -> tuple[int, int]:
    """The indices at which every arg has a member."""
    lows: list[int] = []
    highs: list[int] = []
    for ref in (a for a in args if a.index is not None):
        weight = module.weight_of(ref)
        assert ref.index is not None
        offset = ref.index.subst(dict.fromkeys(ref.index.names, 0)).const()
        lows.append(weight.lo - offset)
        highs.append(weight.hi - offset)
    return max(lows), min(highs)


def _sibling(name: str, leaf: str, replaced: int = 1) -> str:
    return ".".join([*name.split(".")[:-replaced], leaf])


def _unique(module: Module, weight: Weight) -> Weight:
    stem, count = weight.name, 0
    while weight.name in module.weights:
        known = module.weights[weight.name]
        if known.recipe == weight.recipe and known.type == weight.type:
            return known
        count += 1
        weight.name = f"{stem}.{count}"
    return weight
