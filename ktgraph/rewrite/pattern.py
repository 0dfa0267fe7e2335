"""Patterns: `.ktir` text without types, as the `match` and `emit` of a rule are written.

    %kvb = nn.linear %c, @kv_b, @bias?          an optional operand: may be absent
    %y   = nn.rms_norm %x, @w {eps = $e, **r}   $e takes one attribute, **r the unmentioned ones
    %o   = attn.sdpa %q, %kv, %b {layer = 3, ...}   "..." : the other attributes may be anything
    %z   = %x                                   emit only: %z is %x

Operands and attributes that a match pattern does not mention must be absent or at their default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from ktgraph.ir.graph import Attr
from ktgraph.ir.parser import Parser


@dataclass(frozen=True)
class Capture:
    """``$name``: takes an attribute's value in a match, gives it in an emit."""

    name: str


@dataclass(frozen=True)
class Ref:
    """``%x`` or ``@w``, with its sign; `is_optional` is the written ``?``."""

    name: str
    is_optional: bool = False

    @property
    def is_value(self) -> bool:
        return self.name.startswith("%")


PatternAttr = Attr | Capture | tuple["PatternAttr", ...]


@dataclass(frozen=True)
class PatternOp:
    """One line of a pattern.  `rest` is "..." or a ``**name``, None when nothing else may be set.

    An alias line ``%y = %x`` has no `name` and one operand.
    """

    results: tuple[str, ...]
    name: str
    operands: tuple[Ref | None, ...]
    attrs: Mapping[str, PatternAttr]
    rest: str | None

    @property
    def is_alias(self) -> bool:
        return not self.name


@dataclass(frozen=True)
class Pattern:
    """Lines of a pattern in order; the last op is the root of a match."""

    ops: tuple[PatternOp, ...]

    @property
    def root(self) -> int:
        return len(self.ops) - 1

    def definer(self, name: str) -> tuple[int, int] | None:
        """Op number and result number that define ``%x``, None for a captured value."""
        for number, op in enumerate(self.ops):
            if name in op.results:
                return number, op.results.index(name)
        return None

    @property
    def defined(self) -> frozenset[str]:
        return frozenset(name for op in self.ops for name in op.results)

    @property
    def used(self) -> frozenset[str]:
        return frozenset(o.name for op in self.ops for o in op.operands if o is not None)

    def captures(self) -> frozenset[str]:
        """Every ``$name`` and ``**name``."""
        found = {c for op in self.ops for a in op.attrs.values() for c in _captures(a)}
        return frozenset(found | {op.rest for op in self.ops if op.rest not in (None, "...")})


def _captures(value: PatternAttr) -> Iterator[str]:
    if isinstance(value, Capture):
        yield value.name
    elif isinstance(value, tuple):
        for item in value:
            yield from _captures(item)


@lru_cache(maxsize=512)
def parse_pattern(text: str, rule: str) -> Pattern:
    """Read a pattern; errors are ParseErrors that show the line of the rule."""
    return _PatternParser(text, f"<rule {rule}>").pattern()


class _PatternParser(Parser):
    """The `.ktir` parser with captures, optional operands and no types."""

    def pattern(self) -> Pattern:
        ops: list[PatternOp] = []
        while self.token.kind != "end":
            ops.append(self._line())
        if not ops:
            self.fail("a pattern has at least one op")
        return Pattern(tuple(ops))

    def _line(self) -> PatternOp:
        results = [self.expect_kind("value", "a value (%name)")]
        while self.take(","):
            results.append(self.expect_kind("value", "a value (%name)"))
        self.expect("=")
        if self.token.kind == "value":
            return PatternOp(tuple(results), "", (Ref(self.next().text),), {}, None)
        name = self.name()
        operands: list[Ref | None] = []
        if self.token.kind in ("value", "symbol") or self.sees("_"):
            operands = self.many(self._ref, "{")
        attrs, rest = self._pattern_attrs() if self.take("{") else ({}, None)
        return PatternOp(tuple(results), name, tuple(operands), attrs, rest)

    def _ref(self) -> Ref | None:
        if self.take("_"):
            return None
        if self.token.kind not in ("value", "symbol"):
            self.fail(f"expected %value, @weight or _, got {self.token.text or 'the end'!r}")
        name = self.next().text
        return Ref(name, self.take("?"))

    def _pattern_attrs(self) -> tuple[dict[str, PatternAttr], str | None]:
        attrs: dict[str, PatternAttr] = {}
        rest: str | None = None
        while not self.sees("}"):
            if self.take("..."):
                rest = "..."
            elif self.take("*"):
                self.expect("*")
                rest = "**" + self.name()
            else:
                key = self.name()
                self.expect("=")
                attrs[key] = self._pattern_attr()
            if not self.take(","):
                break
        self.expect("}")
        return attrs, rest

    def _pattern_attr(self) -> PatternAttr:
        if self.token.kind == "capture":
            return Capture(self.next().text)
        if not self.take("["):
            return self.attr()
        items = self.many(self._pattern_attr, "]")
        self.expect("]")
        return tuple(items)
