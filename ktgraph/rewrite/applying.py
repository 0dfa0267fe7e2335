"""Applying rules: build what a match emits, find its place, replace, erase, report."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from ktgraph.ir.graph import Attr, Block, Function, Module, Op, Operand, Value, Weight, WeightRef
from ktgraph.ir.printer import print_op
from ktgraph.ir.types import StateType
from ktgraph.ops import Refusal, SignatureError, build, no
from ktgraph.pass_api import Pass, PassContext
from ktgraph.rewrite.derive import reference
from ktgraph.rewrite.matching import Match, Matcher
from ktgraph.rewrite.pattern import Capture, PatternAttr, PatternOp
from ktgraph.rewrite.rule import Rule

_PREFIX = re.compile(r"l\d+\.")  # names of a traced layer: %l3.q_proj


@dataclass(frozen=True)
class RulePass(Pass):
    """A pass that is a list of rules, applied in order until none fits any more."""

    rules: ClassVar[Sequence[type[Rule]]] = ()

    def run(self, module: Module, ctx: PassContext) -> None:
        rewrite(module, ctx, [rule() for rule in self.rules])


@dataclass
class _Report:
    """Refusals and partial matches of one sweep; the last sweep's are what remains."""

    refused: list[tuple[str, Op, str]] = field(default_factory=list[tuple[str, Op, str]])
    partial: list[tuple[str, Op, str]] = field(default_factory=list[tuple[str, Op, str]])

    def send(self, ctx: PassContext) -> None:
        for rule, op, reason in self.refused:
            ctx.refused(rule, op, reason)
        for rule, op, reason in self.partial:
            ctx.partial(rule, op, reason)


_MOST_SWEEPS = 256  # a sweep applies every rule everywhere; real modules settle in a few


class RewriteError(RuntimeError):
    """Rules that never come to an end; the message names them."""


def rewrite(module: Module, ctx: PassContext, rules: Sequence[Rule]) -> int:
    """Apply the rules in order, again and again until none fits; returns how many rewrites.

    Reports matches as they happen, refusals and best partial matches of what is left at the end.
    """
    total, done = 0, dict[str, int]()
    for _ in range(_MOST_SWEEPS):
        report = _Report()
        done = {rule.name: _sweep(module, ctx, rule, report) for rule in rules}
        total += sum(done.values())
        if not any(done.values()):
            report.send(ctx)
            return total
    busy = ", ".join(name for name, count in done.items() if count)
    raise RewriteError(
        f"after {_MOST_SWEEPS} sweeps these rules still match: {busy}; a rule's `emit` must not "
        "be matched again by its own `match` (or two rules undo each other)"
    )


def _sweep(module: Module, ctx: PassContext, rule: Rule, report: _Report) -> int:
    """One rule over every op; returns how many rewrites."""
    done = 0
    root_name = rule.pattern.ops[rule.pattern.root].name
    for function in module.functions.values():
        for op in [op for op in function.walk() if op.name == root_name]:
            if not _is_in_block(op):
                continue
            found = find_match(rule, module, function, op, report)
            if found is not None and apply_match(rule, found, ctx, report):
                done += 1
    return done


def _is_in_block(op: Op) -> bool:
    return op.block is not None and any(op is o for o in op.block.ops)


def find_match(
    rule: Rule, module: Module, function: Function, root: Op, report: _Report | None = None
) -> Match | None:
    """The first way the rule fits at `root` that nothing refuses."""
    matcher = Matcher(rule.pattern, module, function, root)
    refusal: Refusal | None = None
    for match in matcher.matches():
        answer = _allowed(rule, match)
        if answer:
            return match
        if refusal is None and isinstance(answer, Refusal):
            refusal = answer
    if report is None or rule.quiet:
        return None
    if refusal is not None:
        report.refused.append((rule.name, refusal.op or root, refusal.reason))
    elif matcher.miss.matched:
        count = len(rule.pattern.ops)
        reason = f"best partial match {matcher.miss.matched}/{count} ops: {matcher.miss.reason}"
        report.partial.append((rule.name, root, reason))
    return None


def _allowed(rule: Rule, match: Match) -> bool | Refusal:
    """Inner values must not be read outside the match; then the rule's own check."""
    root = rule.pattern.ops[rule.pattern.root]
    free = {*rule.keep, *rule.emission.defined, *root.results}
    for line in rule.pattern.ops:
        for name in (r for r in line.results if r not in free):
            users = match.outside_users(name)
            if users:
                return no(f"{name} has other users: {print_op(users[0])}", match.op(name))
    return rule.check(match)


def apply_match(rule: Rule, match: Match, ctx: PassContext, report: _Report | None = None) -> bool:
    """Rewrite one match; False when it has no legal form or place, or the limit is met."""
    emitter = _Emitter(rule, match)
    answer = emitter.build()
    if answer and not ctx.may_rewrite(rule.name, match.root):
        emitter.discard()
        return False
    if answer:
        emitter.commit()
        return True
    emitter.discard()
    if report is not None and isinstance(answer, Refusal) and not rule.quiet:
        report.refused.append((rule.name, answer.op or match.root, answer.reason))
    return False


def apply_together(matches: Sequence[tuple[Rule, Match]]) -> bool | Refusal:
    """Rewrite all matches, or none when one has no legal form; the caller asked the context."""
    emitters: list[_Emitter] = []
    for rule, match in matches:
        emitters.append(_Emitter(rule, match))
        answer = emitters[-1].build()
        if not answer:
            for emitter in reversed(emitters):
                emitter.discard()
            return answer
    for emitter in emitters:
        emitter.commit()
    return True


class _Emitter:
    """Builds the emitted ops apart from the block, so that a refusal leaves no trace."""

    def __init__(self, rule: Rule, match: Match) -> None:
        self.rule = rule
        self.match = match
        self.module = match.module
        block = match.root.block
        assert block is not None
        self.block: Block = block
        self.env: dict[str, Operand] = dict(match.operands)
        self.ops: list[Op] = []
        self.declared: list[Weight] = []
        self.anchor = match.root

    def build(self) -> bool | Refusal:
        """Make the ops and choose their place; falsy with the reason when that is impossible."""
        for name, weight in self.rule.weights(self.match).items():
            self.env[name] = self._declare(weight)
        self.attrs = {**self.match.attrs, **self.rule.values(self.match)}
        try:
            for line in self.rule.emission.ops:
                self._emit(line)
        except SignatureError as error:
            return no(f"the emitted ops do not fit: {error}")
        return self._check_types() and self._choose_place()

    def _declare(self, weight: Weight) -> WeightRef:
        if weight.name not in self.module.weights:
            self.module.add_weight(weight)
            self.declared.append(weight)
        bound = [r for r in self.match.operands.values() if isinstance(r, WeightRef)]
        args = weight.recipe.args if weight.recipe is not None else ()
        refs = [r for a in args for r in bound if r.name == a.name]
        return reference(weight, refs)

    def _emit(self, line: PatternOp) -> None:
        if line.is_alias:
            assert line.operands[0] is not None
            self.env[line.results[0]] = self.env[line.operands[0].name]
            return
        operands = [None if o is None else self.env[o.name] for o in line.operands]
        attrs = {k: self._attr(v) for k, v in line.attrs.items()}
        rest: Mapping[str, Attr] = self.match.rests[line.rest] if line.rest else {}
        root = self.match.root
        op = build(
            self.module,
            line.name,
            operands,
            [name[1:] for name in line.results],
            {**attrs, **rest},
            loc=root.loc,
            device=root.result.type.device,
        )
        self.ops.append(op)
        self.env.update(zip(line.results, op.results, strict=True))

    def _attr(self, value: PatternAttr) -> Attr:
        if isinstance(value, Capture):
            return self.attrs[value.name]
        if isinstance(value, tuple):
            return tuple(self._attr(v) for v in value)
        return value

    # -- checks ---------------------------------------------------------------------------------
    def replaced(self) -> Mapping[Value, Value]:
        """Matched values and what takes their place."""
        names = self.rule.emission.defined & self.rule.pattern.defined
        found = ((self.match.value(n), self.env[n]) for n in names)
        return {old: new for old, new in found if isinstance(new, Value)}

    def _check_types(self) -> bool | Refusal:
        for old, new in self.replaced().items():
            if old.type != new.type:
                return no(f"%{old.name} would become a {new.type}, it is a {old.type}")
        return True

    def _choose_place(self) -> bool | Refusal:
        """The root's place, or earlier when replaced values are read before the root."""
        at = {id(op): i for i, op in enumerate(self.block.ops)}
        inside = {id(op) for op in self.match.ops.values()}
        place = at[id(self.match.root)]
        for old in self.replaced():
            outside = [u for u in old.users if id(u) not in inside and u.block is not None]
            place = min([place, *(_position(self.block, u, at) for u in outside)])
        ready = max([0, *(_ready(self.block, v, at) for v in self._captured())])
        if place < ready:
            late = print_op(self.block.ops[place])
            return no(f"a result is read before every operand is there, by: {late}")
        self.anchor = self.block.ops[place]
        return self._check_states(place, at, inside)

    def _captured(self) -> list[Value]:
        """Values that the emitted ops and aliases read and do not define."""
        made = {id(r) for op in self.ops for r in op.results}
        read = [v for op in self.ops for v in op.values]
        read += [v for v in self.replaced().values()]
        return [v for v in read if id(v) not in made]

    def _check_states(self, place: int, at: dict[int, int], inside: set[int]) -> bool | Refusal:
        """A state is read after the append it must see, and before the one that consumes it."""
        for state in {v for v in self._captured() if isinstance(v.type, StateType)}:
            consumed_here = any(state in op.values and _consumes(op) for op in self.ops)
            placed = [u for u in state.users if u.block is not None]  # without the emitted ops
            for user in (u for u in placed if id(u) not in inside):
                where = _position(self.block, user, at)
                before = where < place
                if before and _consumes(user):
                    return no(f"%{state.name} is consumed before, by: {print_op(user)}", user)
                if consumed_here and not before:
                    return no(f"%{state.name} is still read after, by: {print_op(user)}", user)
        return True

    # -- edits ----------------------------------------------------------------------------------
    def discard(self) -> None:
        """Undo `build`."""
        for op in reversed(self.ops):
            op.erase()
        for weight in self.declared:
            del self.module.weights[weight.name]

    def commit(self) -> None:
        """Insert, replace, erase, and give names."""
        replaced = self.replaced()
        for op in self.ops:
            self.block.insert_before(self.anchor, op)
        for old, new in replaced.items():
            old.replace_by(new)
        erased = self._erase_matched()
        self._give_names(replaced, erased)

    def _erase_matched(self) -> set[int]:
        """Erase matched ops that nobody reads any more, users first; returns their results' ids."""
        erased: set[int] = set()
        order = {id(op): i for i, op in enumerate(self.block.ops)}
        for op in sorted(self.match.ops.values(), key=lambda o: -order[id(o)]):
            if not any(r.users for r in op.results):
                op.erase()
                erased |= {id(r) for r in op.results}
        return erased

    def _give_names(self, replaced: Mapping[Value, Value], erased: set[int]) -> None:
        """A result keeps the name of the value it replaces; others get a fresh one."""
        made = {id(r) for op in self.ops for r in op.results}
        heirs = {id(n): o.name for o, n in replaced.items() if id(o) in erased and id(n) in made}
        taken = {v.name for v in self.match.function.values() if id(v) not in made}
        for value in (r for op in self.ops for r in op.results):
            name = heirs.get(id(value)) or self._stem(value.name)
            value.name = _free(name, taken)
            taken.add(value.name)

    def _stem(self, name: str) -> str:
        return layer_prefix(self.match.root.result.name) + name


def layer_prefix(name: str) -> str:
    """``l3.`` of a value named after its traced layer (``%l3.q_proj``), else nothing."""
    found = _PREFIX.match(name)
    return found.group() if found else ""


def _consumes(op: Op) -> bool:
    is_end = not op.results and op.name == "return"
    return is_end or any(isinstance(r.type, StateType) for r in op.results)


def _position(block: Block, user: Op, at: Mapping[int, int]) -> int:
    """Place in `block` of a user, or of the op around it; the block's end comes last."""
    while user.block is not block:
        parent = user.block.parent if user.block is not None else None
        if parent is None:
            return len(at)
        user = parent
    return at.get(id(user), len(at))


def _ready(block: Block, value: Value, at: Mapping[int, int]) -> int:
    """The first place in `block` where `value` can be read."""
    producer = value.producer
    return at[id(producer)] + 1 if producer is not None and producer.block is block else 0


def _free(stem: str, taken: Iterable[str]) -> str:
    known = set(taken)
    if stem not in known:
        return stem
    number = 1
    while f"{stem}.{number}" in known:
        number += 1
    return f"{stem}.{number}"


__all__ = ["RulePass", "apply_match", "apply_together", "find_match", "layer_prefix", "rewrite"]
