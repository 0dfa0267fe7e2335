"""fuse-norms: a residual sum and the norm that reads it are computed in one pass over the tokens.

What: `tensor.add` followed by `nn.rms_norm` becomes `nn.add_rms_norm`; a chain of two sums that no
norm follows becomes `tensor.add3`.

Why: the sum is read once instead of twice, and a decode step has one launch less.

Before:  %s = tensor.add %x, %y … %h = nn.rms_norm %s, @w
After:   %s, %h = nn.add_rms_norm %x, %y, @w
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ktgraph.pass_api import Numerics, exact, register_pass
from ktgraph.rewrite import Match, Refusal, Rule, RulePass, no


class AddRmsNorm(Rule):
    """Both results may be used further on."""

    name = "add-rms-norm"
    match = """
      %s = tensor.add %x, %y
      %h = nn.rms_norm %s, @w {**norm}"""
    emit = "%s, %h = nn.add_rms_norm %x, %y, @w {**norm}"

    def check(self, m: Match) -> bool | Refusal:
        return _same_shapes(m, "%x", "%y")


class Add3(Rule):
    """(x + y) + z in the same order, so that no bit changes."""

    name = "add3"
    match = """
      %s = tensor.add %x, %y
      %t = tensor.add %s, %z"""
    emit = "%t = tensor.add3 %x, %y, %z"

    def check(self, m: Match) -> bool | Refusal:
        return _same_shapes(m, "%x", "%y", "%z")


@register_pass
@dataclass(frozen=True)
class FuseNorms(RulePass):
    name: ClassVar[str] = "fuse-norms"
    numerics: ClassVar[Numerics] = exact()
    rules: ClassVar[Sequence[type[Rule]]] = (AddRmsNorm, Add3)


def _same_shapes(m: Match, *names: str) -> bool | Refusal:
    first = m.type(names[0])
    other = next((n for n in names[1:] if m.type(n) != first), None)
    return True if other is None else no(f"{names[0]} is {first}, {other} is {m.type(other)}")
