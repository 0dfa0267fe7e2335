"""Matching: a pattern against the ops of a function, backwards from the root."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from ktgraph.ir.dims import Dim
from ktgraph.ir.graph import Attr, Function, Module, Op, Operand, Value, Weight, WeightRef
from ktgraph.ir.printer import print_attr, print_op
from ktgraph.ir.types import TensorType
from ktgraph.ops import op_def
from ktgraph.rewrite.pattern import Capture, Pattern, PatternAttr, PatternOp, Ref

_COMMUTATIVE = frozenset({"tensor.add", "tensor.mul"})
Rest = Mapping[str, Attr]


@dataclass(frozen=True)
class Match:
    """What a pattern stands for at one place; names are written with their sign (%, @, $, **)."""

    pattern: Pattern
    module: Module
    function: Function
    root: Op
    ops: Mapping[int, Op]  # by line of the pattern
    operands: Mapping[str, Operand] = field(default_factory=dict[str, Operand])
    attrs: Mapping[str, Attr] = field(default_factory=dict[str, Attr])
    rests: Mapping[str, Rest] = field(default_factory=dict[str, Rest])

    def value(self, name: str) -> Value:
        """The value ``%x`` stands for."""
        found = self.operands[name]
        if not isinstance(found, Value):
            raise TypeError(f"{name} is {found}, not a value")
        return found

    def ref(self, name: str) -> WeightRef:
        """The weight reference ``@w`` stands for."""
        found = self.operands[name]
        if not isinstance(found, WeightRef):
            raise TypeError(f"{name} is {found}, not a weight")
        return found

    def has(self, name: str) -> bool:
        """Whether an optional operand is there."""
        return self.operands.get(name) is not None

    def weight(self, name: str) -> Weight:
        """The declaration behind ``@w``."""
        return self.module.weight_of(self.ref(name))

    def type(self, name: str) -> TensorType:
        """The tensor type of ``%x`` or ``@w``."""
        return self.weight(name).type if name.startswith("@") else self.value(name).tensor

    def dims(self, name: str) -> tuple[Dim, ...]:
        return self.type(name).dims

    def attr(self, name: str) -> Attr:
        """The attribute that ``$name`` took."""
        return self.attrs[name]

    def dim_attr(self, name: str) -> Dim:
        found = self.attrs[name]
        if not isinstance(found, Dim):
            raise TypeError(f"{name} is {found!r}, not an integer")
        return found

    def dims_attr(self, name: str) -> tuple[Dim, ...]:
        found = self.attrs[name]
        if not isinstance(found, tuple):
            raise TypeError(f"{name} is {found!r}, not a list")
        return tuple(d for d in found if isinstance(d, Dim))

    def op(self, name: str) -> Op:
        """The matched op that defines ``%x`` in the pattern."""
        definer = self.pattern.definer(name)
        if definer is None:
            raise KeyError(f"{name} is defined by no op of the pattern")
        return self.ops[definer[0]]

    def outside_users(self, name: str) -> list[Op]:
        """Ops that read ``%x`` and are no part of the match (a block's end counts)."""
        inside = list(self.ops.values())
        return [user for user in self.value(name).users if user not in inside]


@dataclass(frozen=True)
class Miss:
    """The longest partial match of one candidate: how many ops fit, and why the next did not."""

    matched: int
    reason: str


class Matcher:
    """Tries one candidate root; after a failure `miss` says how far the best attempt came."""

    def __init__(self, pattern: Pattern, module: Module, function: Function, root: Op) -> None:
        self.pattern = pattern
        self.root = root
        self.start = Match(pattern, module, function, root, {})
        self.miss = Miss(0, "")

    def matches(self) -> Iterator[Match]:
        """Every way the pattern fits with its last op at `root`."""
        yield from self._op(self.pattern.root, self.root, self.start)

    def _fail(self, so_far: Match, reason: str) -> Iterator[Match]:
        if len(so_far.ops) >= self.miss.matched:
            self.miss = Miss(len(so_far.ops), reason)
        return iter(())

    def _op(self, number: int, op: Op, so_far: Match) -> Iterator[Match]:
        pattern = self.pattern.ops[number]
        if number in so_far.ops:
            same = so_far.ops[number] is op
            return iter((so_far,)) if same else self._fail(so_far, _found(pattern, op))
        if op.name != pattern.name or len(op.results) != len(pattern.results):
            return self._fail(so_far, _found(pattern, op))
        if op.block is not self.root.block:
            return self._fail(so_far, f"{pattern.results[0]} is computed outside the root's block")
        bound = _bind_attrs(pattern, op, so_far)
        if isinstance(bound, str):
            return self._fail(so_far, f"{bound} in: {print_op(op)}")
        values = dict(zip(pattern.results, op.results, strict=True))
        bound = replace(bound, ops={**bound.ops, number: op}, operands={**bound.operands, **values})
        return self._orders(pattern, op, bound)

    def _orders(self, pattern: PatternOp, op: Op, so_far: Match) -> Iterator[Match]:
        count = max(len(pattern.operands), len(op.operands))
        wanted = [*pattern.operands, *[None] * (count - len(pattern.operands))]
        given = [op.operand(i) for i in range(count)]
        yield from self._operands(list(zip(wanted, given, strict=True)), op, so_far)
        if op.name in _COMMUTATIVE:
            yield from self._operands(list(zip(wanted, reversed(given), strict=True)), op, so_far)

    def _operands(
        self, pairs: list[tuple[Ref | None, Operand]], op: Op, so_far: Match
    ) -> Iterator[Match]:
        if not pairs:
            yield so_far
            return
        (wanted, given), rest = pairs[0], pairs[1:]
        for found in self._operand(wanted, given, op, so_far):
            yield from self._operands(rest, op, found)

    def _operand(
        self, wanted: Ref | None, given: Operand, op: Op, so_far: Match
    ) -> Iterator[Match]:
        if wanted is None:
            if given is None:
                return iter((so_far,))
            return self._fail(so_far, f"operand {_show(given)} is not in the rule: {print_op(op)}")
        if given is None and not wanted.is_optional:
            return self._fail(so_far, f"operand {wanted.name} is missing in: {print_op(op)}")
        if given is not None and isinstance(given, Value) != wanted.is_value:
            return self._fail(so_far, f"{wanted.name} cannot be {_show(given)}: {print_op(op)}")
        if wanted.name in so_far.operands:
            return self._again(wanted, given, so_far)
        definer = self.pattern.definer(wanted.name)
        if definer is None or not isinstance(given, Value):
            bound = {**so_far.operands, wanted.name: given}
            return iter((replace(so_far, operands=bound),))
        return self._producer(definer, wanted, given, so_far)

    def _again(self, wanted: Ref, given: Operand, so_far: Match) -> Iterator[Match]:
        before = so_far.operands[wanted.name]
        if before == given:
            return iter((so_far,))
        return self._fail(so_far, f"{wanted.name} is both {_show(before)} and {_show(given)}")

    def _producer(
        self, definer: tuple[int, int], wanted: Ref, given: Value, so_far: Match
    ) -> Iterator[Match]:
        number, result = definer
        op = given.producer
        if op is None:
            want = self.pattern.ops[number].name
            return self._fail(so_far, f"{wanted.name}: expected {want}, found an argument")
        if result >= len(op.results) or op.results[result] is not given:
            return self._fail(so_far, _found(self.pattern.ops[number], op))
        return self._op(number, op, so_far)


def _found(pattern: PatternOp, op: Op) -> str:
    return f"{pattern.results[0]}: expected {pattern.name}, found {print_op(op)}".split("\n")[0]


def _show(operand: Operand) -> str:
    if operand is None:
        return "absent"
    return f"%{operand.name}" if isinstance(operand, Value) else str(operand)


def _bind_attrs(pattern: PatternOp, op: Op, so_far: Match) -> Match | str:
    """The match with the op's attributes bound, or what does not fit."""
    signature = op_def(op.name).signature
    full = signature.full_attrs(op.attrs)
    attrs = dict(so_far.attrs)
    for key, wanted in pattern.attrs.items():
        if key not in full:
            return f"no attribute {key}"
        reason = _bind_attr(key, wanted, full[key], attrs)
        if reason:
            return reason
    left = {k: v for k, v in op.attrs.items() if k not in pattern.attrs}
    if pattern.rest is None and left:
        key, value = next(iter(left.items()))
        return f"{key} = {print_attr(value)} is not the default"
    rests = dict(so_far.rests)
    if pattern.rest not in (None, "..."):
        if rests.get(pattern.rest, left) != left:
            return f"{pattern.rest} differs between two ops"
        rests[pattern.rest] = left
    return replace(so_far, attrs=attrs, rests=rests)


def _bind_attr(key: str, wanted: PatternAttr, given: Attr, attrs: dict[str, Attr]) -> str:
    """Fill `attrs`; returns what does not fit, or an empty string."""
    if isinstance(wanted, Capture):
        if attrs.setdefault(wanted.name, given) == given:
            return ""
        before = print_attr(attrs[wanted.name])
        return f"{wanted.name} is both {before} and {print_attr(given)}"
    if not isinstance(wanted, tuple):
        fits = wanted == given and isinstance(given, type(wanted))
        return "" if fits else f"{key} is {print_attr(given)}, not {print_attr(wanted)}"
    if not isinstance(given, tuple) or len(given) != len(wanted):
        return f"{key} is {print_attr(given)}, not a list of {len(wanted)}"
    reasons = (_bind_attr(key, w, g, attrs) for w, g in zip(wanted, given, strict=True))
    return next((r for r in reasons if r), "")


__all__ = ["Match", "Matcher", "Miss"]
