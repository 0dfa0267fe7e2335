"""Rules that tidy views: reshapes, permutes, expands, casts, splits that cancel or merge.

Permutes move towards each other (up through pointwise ops, down through unit reshapes and sums) so
that the transposes which frontends put between ``[b, s, H, d]`` and ``[b, H, s, d]`` meet and
cancel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ktgraph.ir.dims import Dim
from ktgraph.ir.graph import Attr, Weight
from ktgraph.rewrite.derive import derived_weight
from ktgraph.rewrite.matching import Match
from ktgraph.rewrite.rule import Rule

_WIDER = {"bf16": ("f32", "f64"), "f16": ("f32", "f64"), "f32": ("f64",), "i32": ("i64",)}
Dims = tuple[Dim, ...]


class _Tidy(Rule):
    quiet = True


class ReshapeOfReshape(_Tidy):
    """Only the last shape counts."""

    name = "reshape-of-reshape"
    match = """
      %y = tensor.reshape %x {shape = $a}
      %z = tensor.reshape %y {shape = $b}"""
    emit = "%z = tensor.reshape %x {shape = $b}"
    keep = ("%y",)


class IdentityReshape(_Tidy):
    name = "identity-reshape"
    match = "%y = tensor.reshape %x {...}"
    emit = "%y = %x"

    def check(self, m: Match) -> bool:
        return m.dims("%x") == m.dims("%y")


class IdentityExpand(IdentityReshape):
    name = "identity-expand"
    match = "%y = tensor.expand %x {...}"


class ExpandOfExpand(_Tidy):
    name = "expand-of-expand"
    match = """
      %y = tensor.expand %x {shape = $a}
      %z = tensor.expand %y {shape = $b}"""
    emit = "%z = tensor.expand %x {shape = $b}"
    keep = ("%y",)


class IdentitySlice(IdentityReshape):
    name = "identity-slice"
    match = "%y = tensor.slice %x {...}"


class IdentityCast(_Tidy):
    name = "identity-cast"
    match = "%y = tensor.cast %x {...}"
    emit = "%y = %x"

    def check(self, m: Match) -> bool:
        return m.type("%x").dtype == m.type("%y").dtype


class CastOfWiderCast(_Tidy):
    """A detour through a wider dtype changes nothing."""

    name = "cast-of-wider-cast"
    match = """
      %y = tensor.cast %x {dtype = $wide}
      %z = tensor.cast %y {dtype = $last}"""
    emit = "%z = tensor.cast %x {dtype = $last}"
    keep = ("%y",)

    def check(self, m: Match) -> bool:
        return m.attr("$wide") in _WIDER.get(m.type("%x").dtype, ())


class ScaleByOne(_Tidy):
    name = "scale-by-one"
    match = "%y = tensor.scale %x {by = 1.0}"
    emit = "%y = %x"


class SplitInOne(_Tidy):
    name = "split-in-one"
    match = "%y = tensor.split %x {sizes = [$n], ...}"
    emit = "%y = %x"


class ConcatOfOne(_Tidy):
    name = "concat-of-one"
    match = "%y = tensor.concat %x {...}"
    emit = "%y = %x"


class ConcatOfSplit(_Tidy):
    """Two pieces joined again in their order."""

    name = "concat-of-split"
    match = """
      %a, %b = tensor.split %x {sizes = [$m, $n], axis = $k}
      %y = tensor.concat %a, %b {axis = $k}"""
    emit = "%y = %x"
    keep = ("%a", "%b")


class IdentityPermute(_Tidy):
    name = "identity-permute"
    match = "%y = tensor.permute %x {order = $o}"
    emit = "%y = %x"

    def check(self, m: Match) -> bool:
        order = _ints(m, "$o")
        return order == sorted(order)


class PermuteOfPermute(_Tidy):
    name = "permute-of-permute"
    match = """
      %y = tensor.permute %x {order = $a}
      %z = tensor.permute %y {order = $b}"""
    emit = "%z = tensor.permute %x {order = $c}"
    keep = ("%y",)

    def values(self, m: Match) -> Mapping[str, Attr]:
        first = _ints(m, "$a")
        return {"$c": _dims([first[i] for i in _ints(m, "$b")])}


class UnitPermute(_Tidy):
    """A permute that moves only axes of size 1 is a reshape."""

    name = "unit-permute"
    match = "%y = tensor.permute %x {order = $o}"
    emit = "%y = tensor.reshape %x {shape = $s}"

    def check(self, m: Match) -> bool:
        given, order = m.dims("%x"), _ints(m, "$o")
        wide = [axis for axis in order if given[axis] != 1]
        return order != sorted(order) and wide == sorted(wide)

    def values(self, m: Match) -> Mapping[str, Attr]:
        return {"$s": m.dims("%y")}


class PermuteOfPointwise(_Tidy):
    """permute(f(permute(x))) becomes f(permute(permute(x))), where the permutes merge."""

    name = "permute-of-cast"
    match = """
      %p = tensor.permute %x {order = $a}
      %y = tensor.cast %p {**f}
      %z = tensor.permute %y {order = $b}"""
    emit = """
      %moved = tensor.permute %p {order = $b}
      %z = tensor.cast %moved {**f}"""
    keep = ("%p",)


class PermuteOfAct(PermuteOfPointwise):
    name = "permute-of-act"
    match = PermuteOfPointwise.match.replace("tensor.cast", "nn.act")
    emit = PermuteOfPointwise.emit.replace("tensor.cast", "nn.act")


class PermuteOfScale(PermuteOfPointwise):
    name = "permute-of-scale"
    match = PermuteOfPointwise.match.replace("tensor.cast", "tensor.scale")
    emit = PermuteOfPointwise.emit.replace("tensor.cast", "tensor.scale")


class PermuteOfNorm(PermuteOfPointwise):
    """The same for a norm of the last axis, when that axis stays the last."""

    name = "permute-of-norm"
    match = PermuteOfPointwise.match.replace("tensor.cast %p", "nn.rms_norm %p, @w")
    emit = PermuteOfPointwise.emit.replace("tensor.cast %moved", "nn.rms_norm %moved, @w")

    def check(self, m: Match) -> bool:
        order = _ints(m, "$b")
        return order[-1] == len(order) - 1


class AddOfPermutes(_Tidy):
    """A sum of two values permuted alike is the permuted sum."""

    name = "add-of-permutes"
    match = """
      %p = tensor.permute %x {order = $o}
      %q = tensor.permute %y {order = $o}
      %z = tensor.add %p, %q"""
    emit = """
      %sum = tensor.add %x, %y
      %z = tensor.permute %sum {order = $o}"""


class MulOfPermutes(AddOfPermutes):
    name = "mul-of-permutes"
    match = AddOfPermutes.match.replace("tensor.add", "tensor.mul")
    emit = AddOfPermutes.emit.replace("tensor.add", "tensor.mul").replace("%sum", "%product")


class UnitReshapeOfPermute(_Tidy):
    """A reshape that only adds or drops axes of size 1 moves above a permute."""

    name = "unit-reshape-of-permute"
    match = """
      %y = tensor.permute %x {order = $o}
      %z = tensor.reshape %y {shape = $s}"""
    emit = """
      %base = tensor.reshape %x {shape = $t}
      %z = tensor.permute %base {order = $p}"""
    keep = ("%y",)

    def check(self, m: Match) -> bool:
        meets = any(u.name == "tensor.permute" for u in m.value("%z").users)
        return meets and _wide(m.dims("%y")) == _wide(m.dims("%z"))

    def values(self, m: Match) -> Mapping[str, Attr]:
        given, order, shape = m.dims("%x"), _ints(m, "$o"), m.dims_attr("$s")
        kept = [axis for axis in range(len(given)) if given[axis] != 1]
        place = {axis: i for i, axis in enumerate(kept)}
        wide = iter([place[axis] for axis in order if axis in place])
        units = iter(range(len(kept), len(shape)))
        base = (*(given[a] for a in kept), *[Dim.of(1)] * (len(shape) - len(kept)))
        return {"$t": base, "$p": _dims([next(units if d == 1 else wide) for d in shape])}


class LinearOfTransposedWeight(_Tidy):
    """A weight transposed in the graph is transposed once, at load."""

    name = "linear-of-transposed-weight"
    match = """
      %t = tensor.permute @w {order = [1, 0]}
      %y = nn.linear %x, %t, @b?"""
    emit = "%y = nn.linear %x, @t, @b"
    keep = ("%t",)

    def weights(self, m: Match) -> Mapping[str, Weight]:
        given = m.type("@w")
        turned = given.with_dims(*reversed(given.dims))
        leaf = m.ref("@w").name.rpartition(".")[2] + ".t"
        return {"@t": derived_weight(m.module, [m.ref("@w")], leaf, "transpose", turned)}


SHAPE_RULES: tuple[type[Rule], ...] = (
    ReshapeOfReshape,
    IdentityReshape,
    IdentityExpand,
    ExpandOfExpand,
    IdentitySlice,
    IdentityCast,
    CastOfWiderCast,
    ScaleByOne,
    SplitInOne,
    ConcatOfOne,
    ConcatOfSplit,
    IdentityPermute,
    PermuteOfPermute,
    UnitPermute,
    PermuteOfPointwise,
    PermuteOfAct,
    PermuteOfScale,
    PermuteOfNorm,
    AddOfPermutes,
    MulOfPermutes,
    UnitReshapeOfPermute,
    LinearOfTransposedWeight,
)


def _ints(m: Match, name: str) -> list[int]:
    return [d.const() for d in m.dims_attr(name)]


def _dims(values: Sequence[int]) -> Dims:
    return tuple(Dim.of(v) for v in values)


def _wide(dims: Dims) -> list[Dim]:
    return [d for d in dims if d != 1]


__all__ = ["SHAPE_RULES"]
