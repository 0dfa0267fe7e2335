"""`Rule`: a rewrite written as two pieces of `.ktir` text, and what decides about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from ktgraph.ir.graph import Attr, Weight
from ktgraph.ops import Refusal, is_op, op_def
from ktgraph.ops.registry import UnknownOpError
from ktgraph.rewrite.matching import Match
from ktgraph.rewrite.pattern import Pattern, parse_pattern


class Rule:
    """Subclass it: `match` and `emit` are patterns (`ktgraph.rewrite.pattern`).

        class AddRmsNorm(Rule):
            name = "add-rms-norm"
            match = '''
              %s = tensor.add %x, %y
              %h = nn.rms_norm %s, @w {**norm}'''
            emit = "%s, %h = nn.add_rms_norm %x, %y, @w {**norm}"

    The last op of `match` is its root; every other op must lead to it.  Types of emitted ops are
    inferred.  Every result of the root must be emitted; an inner value that `emit` defines again is
    replaced everywhere, one that is read outside the match refuses it, unless `keep` names it:
    then its op stays.
    """

    name: ClassVar[str] = ""
    match: ClassVar[str] = ""
    emit: ClassVar[str] = ""
    keep: ClassVar[Sequence[str]] = ()
    quiet: ClassVar[bool] = False  # tidying: report matches only

    def check(self, m: Match) -> bool | Refusal:
        """True; ``no("reason", op)`` to refuse; False when the rule is not about this place."""
        return True

    def weights(self, m: Match) -> Mapping[str, Weight]:
        """Weights that `emit` names and `match` does not, e.g. from `derived_weight`."""
        return {}

    def values(self, m: Match) -> Mapping[str, Attr]:
        """Attributes ``$name`` that `emit` names and `match` does not."""
        return {}

    def __init__(self) -> None:
        self.pattern = parse_pattern(self.match, self.name)
        self.emission = parse_pattern(self.emit, self.name)
        for op in (*self.pattern.ops, *self.emission.ops):
            if not op.is_alias and not is_op(op.name):
                try:
                    op_def(op.name)
                except UnknownOpError as error:
                    raise ValueError(f"rule {self.name}: {error}") from None
        self._check_pattern()
        self._check_emission()

    def _check_pattern(self) -> None:
        if any(op.is_alias for op in self.pattern.ops):
            raise ValueError(f"rule {self.name}: an alias line belongs into emit, not into match")
        reached = {self.pattern.root}
        for number in range(self.pattern.root, -1, -1):
            if number not in reached:
                line = self.pattern.ops[number]
                raise ValueError(
                    f"rule {self.name}: {line.results[0]} = {line.name} does not lead to the last "
                    "op of match; write its users after it, the root last"
                )
            reached |= set(_feeding(self.pattern, number))

    def _check_emission(self) -> None:
        root = self.pattern.ops[self.pattern.root]
        missing = [r for r in root.results if r not in self.emission.defined]
        if missing:
            raise ValueError(f"rule {self.name}: emit does not define {missing[0]} of the root")
        unknown = [k for k in self.keep if k not in self.pattern.defined]
        if unknown:
            raise ValueError(f"rule {self.name}: keep names {unknown[0]}, which match lacks")
        known = self.pattern.defined | self.pattern.used
        for op in self.emission.ops:
            values = [o.name for o in op.operands if o is not None and o.is_value]
            for name in (n for n in values if n not in known):
                raise ValueError(f"rule {self.name}: emit reads {name}, which nothing defines")
            if op.rest is not None and op.rest not in self.pattern.captures():
                raise ValueError(f"rule {self.name}: emit writes {op.rest}, which match lacks")
            known |= set(op.results)


def _feeding(pattern: Pattern, number: int) -> list[int]:
    definers = [pattern.definer(o.name) for o in pattern.ops[number].operands if o is not None]
    return [d[0] for d in definers if d is not None]


__all__ = ["Rule"]
