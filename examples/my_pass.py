"""sum-in-one-pass: two sums in a row become one op, which reads and writes the tokens once less.

Before:  %s = tensor.add %a, %b … %t = tensor.add %s, %c
After:   %t = tensor.add3 %a, %b, %c

A pass outside the package, explained in docs/write-a-pass.md:

    ktgraph opt examples/moe_layer.ktir -p examples/my_pass.py:sum-in-one-pass --validate 1
"""

from dataclasses import dataclass
from typing import ClassVar

from ktgraph.pass_api import Numerics, exact, register_pass
from ktgraph.rewrite import Rule, RulePass


class SumOfThree(Rule):
    name = "sum-of-three"
    match = """
      %s = tensor.add %a, %b
      %t = tensor.add %s, %c"""
    emit = "%t = tensor.add3 %a, %b, %c"


@register_pass
@dataclass(frozen=True)
class SumInOnePass(RulePass):
    name: ClassVar[str] = "sum-in-one-pass"
    numerics: ClassVar[Numerics] = exact()
    rules = (SumOfThree,)
