"""Equal layers become one `repeat` over weight families; layers that alternate, a repeat of groups.

Two groups of layers are equal when they hold the same ops in the same order, with the same types
and the same attributes up to the layer number, read the same weights up to the index, and connect
to the group before them in the same way.  Values that change from group to group are carried; all
others must be defined before the first layer.  A group is one layer where all are alike; gpt-oss,
whose layers alternate between a window and the whole text, has groups of two: `@layers[2*i].q_proj`
and `@layers[2*i+1].q_proj`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ktgraph.frontends.naming import family, place_of
from ktgraph.ir.dims import Dim
from ktgraph.ir.graph import Block, Function, Module, Op, Operand, Value, Weight, WeightRef

INDEX = "i"
LONGEST = 8  # most layers of a group
_Source = tuple[int, int]  # (position of an op in its group, number of its result)


@dataclass
class Group:
    """The ops of consecutive layers, and what they read from outside, in order of first use."""

    number: int  # of the first layer
    size: int  # layers
    ops: list[Op]
    outside: list[Value]
    shape: str  # equal for groups of equal content

    @property
    def last(self) -> int:
        return self.number + self.size - 1

    def source(self, value: Value) -> _Source | None:
        for position, op in enumerate(self.ops):
            if value.owner is op:
                return position, op.results.index(value)
        return None

    def value(self, source: _Source) -> Value:
        return self.ops[source[0]].results[source[1]]


Run = list[Group]


def roll_layers(module: Module) -> int:
    """Roll every run of two or more equal groups of ``@main``, in place; returns how many runs."""
    func = module.functions["main"]
    runs = _in_families(module, _runs(module, func))
    for run in reversed(runs):  # from the end, so that a run still reads what it was found to read
        # values of the last run lose their layer prefix, others keep that of their first layer
        _roll(module, func, run, bare=run is runs[-1] and run[0].size == 1)
    _make_families(module, [(run[0].number, run[-1].last) for run in runs])
    return len(runs)


def group_size(repeat: Op) -> int:
    """Layers that one turn of a rolled `repeat` stands for: the step of its weights' members."""
    assert repeat.body is not None
    indices = [r.index for op in repeat.body.ops for r in op.weights if r.index is not None]
    return max((i.subst({INDEX: 1}) - i.subst({INDEX: 0})).const() for i in indices)


# ---------------------------------------------------------------- finding runs


def _layers(func: Function) -> list[tuple[int, list[Op]]]:
    """Stretches of ops of one layer, by its number; a layer in two pieces is left out."""
    stretches: list[tuple[int, list[Op]]] = []
    for op in func.body.ops:
        number = place_of(op.loc or "").layer
        if number is None:
            stretches.append((-1, []))
        elif stretches and stretches[-1][0] == number:
            stretches[-1][1].append(op)
        else:
            stretches.append((number, [op]))
    numbers = [n for n, _ in stretches]
    return [(n, ops) for n, ops in stretches if n >= 0 and numbers.count(n) == 1]


def _runs(module: Module, func: Function) -> Iterator[Run]:
    """From each layer on, the run that covers most layers, of the smallest groups that do."""
    layers = _layers(func)
    while layers:
        run: Run = []
        for size in range(1, min(LONGEST, len(layers) // 2) + 1):
            found = _run_of(module, func, layers, size)
            run = max(run, found, key=_covered)
            if _covered(run) == len(layers):
                break
        if run:
            yield run
        layers = layers[_covered(run) or 1 :]


def _in_families(module: Module, runs: Iterator[Run]) -> list[Run]:
    """The runs whose weights extend those of earlier runs: a family has no gap and one type."""
    ends: dict[str, tuple[int, str]] = {}  # family -> its last member, and its type
    kept: list[Run] = []
    for run in runs:
        first, last = run[0].number, run[-1].last
        members = _members(module, first, run[0].ops)
        if any(name in ends and ends[name] != (first - 1, t) for name, t in members.items()):
            continue
        ends |= {name: (last, kind) for name, kind in members.items()}
        kept.append(run)
    return kept


def _covered(run: Run) -> int:
    return sum(group.size for group in run)


def _run_of(
    module: Module, func: Function, layers: Sequence[tuple[int, list[Op]]], size: int
) -> Run:
    """The run of groups of `size` layers that begins with the first one; empty: there is none."""
    run: Run = []
    for at in range(0, len(layers) - size + 1, size):
        group = _group(module, layers[at : at + size])
        if group is None or (run and not _continues(run, group)):
            break
        run.append(group)
    run = _closed(run)
    return run if len(run) > 1 else []


def _group(module: Module, layers: Sequence[tuple[int, list[Op]]]) -> Group | None:
    """None where the layers' numbers have a gap, or a weight is not the same kind in each.

    Families are one range of members: a weight that only every other layer has fits in none.
    """
    first, ops = layers[0][0], [op for _, ops in layers for op in ops]
    members = [_members(module, number, ops) for number, ops in layers]
    numbers = [number for number, _ in layers]
    if numbers != list(range(first, first + len(layers))) or members != members[:1] * len(members):
        return None
    inside = {r: (i, j) for i, op in enumerate(ops) for j, r in enumerate(op.results)}
    outside: list[Value] = []
    lines: list[str] = []
    for op in ops:
        tokens = [_token(module, o, first, len(layers), inside, outside) for o in op.operands]
        attrs = {k: _relative(k, v, first) for k, v in op.attrs.items()}
        types = [str(r.type) for r in op.results]
        lines.append(f"{op.name} {tokens} {attrs} {types}")
    outside_types = [str(v.type) for v in outside]
    return Group(first, len(layers), ops, outside, "\n".join([*lines, str(outside_types)]))


def _members(module: Module, number: int, ops: Sequence[Op]) -> Mapping[str, str]:
    """Families that a layer reads a member of, and the members' types."""
    found: dict[str, str] = {}
    for ref in (ref for op in ops for ref in op.weights):
        member = family(ref.name)
        if member is not None and member[1] == number:
            found[member[0]] = str(module.weights[ref.name].type)
    return found


def _token(
    module: Module,
    operand: Operand,
    first: int,
    size: int,
    inside: dict[Value, _Source],
    outside: list[Value],
) -> str:
    if operand is None:
        return "_"
    if isinstance(operand, WeightRef):
        member = family(operand.name)
        at = member[1] - first if member is not None else -1
        own = member is not None and 0 <= at < size
        name = f"{member[0]} {at}" if member is not None and own else operand.name
        return f"{name} {module.weights[operand.name].type}"
    if operand in inside:
        return f"%{inside[operand]}"
    if operand not in outside:
        outside.append(operand)
    return f"outside {outside.index(operand)}"


def _relative(key: str, value: object, first: int) -> str:
    return str(value - first) if key == "layer" and isinstance(value, Dim) else str(value)


def _continues(run: Run, group: Group) -> bool:
    last = run[-1]
    if group.shape != last.shape or group.number != last.last + 1:
        return False
    link = _link(last, group)
    return link is not None and (len(run) == 1 or link == _link(run[-2], last))


def _link(before: Group, after: Group) -> list[_Source | None] | None:
    """Where each outside value of `after` comes from: a result of `before`, or unchanged (None)."""
    sources: list[_Source | None] = []
    for old, new in zip(before.outside, after.outside, strict=True):
        source = before.source(new)
        if source is None and new is not old:
            return None
        sources.append(source)
    return sources


def _closed(run: Run) -> Run:
    """The longest head of a run whose values leave it only as carried results of its last group."""
    while len(run) > 1:
        carried = {run[-1].value(s) for s in _link(run[-2], run[-1]) or [] if s is not None}
        ops = {id(op) for group in run for op in group.ops}
        leaving = {
            r
            for group in run
            for op in group.ops
            for r in op.results
            if any(id(user) not in ops for user in r.users)
        }
        if leaving <= carried:
            return run
        run = run[:-1]
    return run


# ---------------------------------------------------------------- rolling


def _roll(module: Module, func: Function, run: Run, bare: bool) -> None:
    """Replace a run by one `repeat` whose body is the first group's ops."""
    first, last = run[0], run[-1]
    slots = [(i, s) for i, s in enumerate(_link(run[0], run[1]) or []) if s is not None]
    initial = [first.outside[i] for i, _ in slots]
    yields = [first.value(source) for _, source in slots]
    finals = [last.value(source) for _, source in slots]
    position = func.body.ops.index(first.ops[0])
    names = _BodyNames(func, run, bare)
    body = Block()
    args = [body.add_arg(names.of(v, ".i"), v.type) for v in yields]
    results = [(names.of(v, ".n"), v.type) for v in yields]
    lo = first.number // first.size
    attrs = {"index": INDEX, "lo": lo, "hi": lo + len(run) - 1}
    repeat = Op("repeat", initial, results, attrs, body=body)
    for old, new in zip(finals, repeat.results, strict=True):
        _replace_outside(old, new, last)
    for op in reversed([op for group in run[1:] for op in group.ops]):
        op.erase()
    for op in first.ops:
        func.body.ops.remove(op)
        body.append(op)
        for old, new in zip(initial, args, strict=True):
            op.replace_operand(old, new)
        number = place_of(op.loc or "").layer
        assert number is not None
        _make_member(op, number, Dim.of(INDEX) * first.size + (number - lo * first.size))
        for result in op.results:
            result.name = names.of(result)
    body.set_returns(yields)
    func.body.insert(position, repeat)


class _BodyNames:
    """Names inside a rolled body: those of the first group, without the layer's if `bare`."""

    def __init__(self, func: Function, run: Run, bare: bool) -> None:
        rolled = {r for group in run for op in group.ops for r in op.results}
        self._taken = {v.name for v in func.values() if v not in rolled}
        self._prefix = re.compile(rf"^l{run[0].number}\." if bare else r"^\b\B")

    def of(self, value: Value, suffix: str = "") -> str:
        stem = self._prefix.sub("", value.name)
        name = (re.sub(r"\.\d+$", "", stem) if suffix else stem) + suffix
        wanted, n = name, 0
        while name in self._taken:
            n += 1
            name = f"{wanted}.{n}"
        self._taken.add(name)
        return name


def _replace_outside(old: Value, new: Value, group: Group) -> None:
    inside = {id(op) for op in group.ops}
    for user in list(old.users):
        if id(user) not in inside:
            user.replace_operand(old, new)


def _make_member(op: Op, number: int, index: Dim) -> None:
    """Rewrite one op of layer `number` to speak of layer `index`."""
    if op.attrs.get("layer") == Dim.of(number):
        op.attrs["layer"] = index
    op.set_operands([_member_ref(o, number, index) for o in op.operands])
    if op.loc:
        op.loc = _indexed(op.loc, number, index)


def _indexed(path: str, number: int, index: Dim) -> str:
    """``model.layers.3.mlp`` as ``model.layers.{i}.mlp``, or ``model.layers.{2*i+1}.mlp``."""
    return re.sub(rf"\.{number}(\.|$)", rf".{{{index}}}\1", path, count=1)


def _member_ref(operand: Operand, number: int, index: Dim) -> Operand:
    if not isinstance(operand, WeightRef):
        return operand
    member = family(operand.name)
    if member is None or member[1] != number:
        return operand
    return WeightRef(member[0], index)


def _make_families(module: Module, spans: Sequence[tuple[int, int]]) -> None:
    """Declare the weights of rolled layers as families, where the first member stood."""
    weights = list(module.weights.values())
    module.weights.clear()
    for weight in weights:
        member = family(weight.name)
        span = next((s for s in spans if member and s[0] <= member[1] <= s[1]), None)
        if member is None or span is None:
            module.add_weight(weight)
        elif member[1] == span[0]:
            _add_family(module, weight, member[0], *span)


def _add_family(module: Module, weight: Weight, name: str, lo: int, hi: int) -> None:
    """Add a family, or extend the one of an earlier run that ends where this begins."""
    before = module.weights.get(name)
    if before is not None:
        before.hi = hi
        return
    index = Dim.of(INDEX)
    source = weight.source and _indexed(weight.source, lo, index)
    recipe = weight.recipe
    if recipe is not None:
        args = [_member_ref(a, lo, index) for a in recipe.args]
        recipe = replace(recipe, args=tuple(a for a in args if isinstance(a, WeightRef)))
    module.add_weight(
        replace(weight, name=name, source=source, recipe=recipe, var=INDEX, lo=lo, hi=hi)
    )
