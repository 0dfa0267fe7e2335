"""Passes for tests of validation and bisection: good rules, and one that is wrong in one place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ktgraph.ir.graph import Module
from ktgraph.ops import build
from ktgraph.pass_api import Numerics, Pass, PassContext, exact, reorder, requant
from ktgraph.rewrite import Rule, RulePass


class SumOfThree(Rule):
    """Right."""

    name = "sum-of-three"
    match = """
      %s = tensor.add %a, %b
      %t = tensor.add %s, %c"""
    emit = "%t = tensor.add3 %a, %b, %c"


class DropsEps(Rule):
    """Wrong: the norm's epsilon changes."""

    name = "drops-eps"
    match = "%h = nn.rms_norm %x, @w {eps = $e, ...}"
    emit = "%h = nn.rms_norm %x, @w {eps = 0.5}"

    def check(self, m):
        return m.ref("@w").name == "norm" and m.attr("$e") != 0.5


class FuseLayerNorm(Rule):
    """Right: sums and norms inside layers become one op."""

    name = "fuse-layer-norm"
    match = """
      %s = tensor.add %x, %y
      %h = nn.rms_norm %s, @w {**norm}"""
    emit = "%s, %h = nn.add_rms_norm %x, %y, @w {**norm}"

    def check(self, m):
        return m.ref("@w").name != "norm"


@dataclass(frozen=True)
class Good(RulePass):
    name: ClassVar[str] = "good"
    numerics: ClassVar[Numerics] = exact()
    rules: ClassVar[Sequence[type[Rule]]] = (SumOfThree,)


@dataclass(frozen=True)
class OneBadRule(RulePass):
    """Three right rewrites, then the wrong one."""

    name: ClassVar[str] = "one-bad-rule"
    numerics: ClassVar[Numerics] = reorder()
    rules: ClassVar[Sequence[type[Rule]]] = (FuseLayerNorm, DropsEps)


@dataclass(frozen=True)
class Untyped(Pass):
    """Leaves a value with the type of another one: invalid IR."""

    name: ClassVar[str] = "untyped"

    def run(self, module: Module, ctx: PassContext) -> None:
        op = next(op for op in module.walk() if op.name == "logits.gather")
        op.result.type = op.value(0).type


@dataclass(frozen=True)
class Crashes(Pass):
    """Three harmless rewrites; the third one raises."""

    name: ClassVar[str] = "crashes"

    def run(self, module: Module, ctx: PassContext) -> None:
        for count, op in enumerate([o for o in module.walk() if o.name == "nn.linear"]):
            if ctx.may_rewrite("mark", op):
                op.loc = f"seen {count}"
                if count == 2:
                    raise KeyError("lost")


@dataclass(frozen=True)
class Halves(Pass):
    """Lossy by declaration: halves the logits' bits, in truth scales them a little."""

    name: ClassVar[str] = "halves"
    numerics: ClassVar[Numerics] = requant(1e-4)

    def run(self, module: Module, ctx: PassContext) -> None:
        func = module.functions["main"]
        logits = func.body.returns[0]
        op = build(module, "tensor.scale", [logits], ["logits.s"], {"by": 1.001})
        func.body.append(op)
        func.body.set_returns([op.result, *func.body.returns[1:]])


@dataclass(frozen=True)
class Nothing(Pass):
    """Says it does much, and does nothing."""

    name: ClassVar[str] = "nothing"
    numerics: ClassVar[Numerics] = requant(1.0)

    def run(self, module: Module, ctx: PassContext) -> None:
        ctx.note("looked around")
        ctx.artifacts["looked.txt"] = "everywhere\n"


@dataclass(frozen=True)
class Renames(Pass):
    """Changes names only: no change by the structural hash."""

    name: ClassVar[str] = "renames"

    def run(self, module: Module, ctx: PassContext) -> None:
        for value in module.functions["main"].values():
            value.name += ".z"


@dataclass(frozen=True)
class Needs(Pass):
    name: ClassVar[str] = "needs"
    requires: ClassVar[Sequence[str]] = ("placed",)

    def run(self, module: Module, ctx: PassContext) -> None: ...


@dataclass(frozen=True)
class Promises(Pass):
    name: ClassVar[str] = "promises"
    ensures: ClassVar[Sequence[str]] = ("lowered",)

    def run(self, module: Module, ctx: PassContext) -> None: ...
