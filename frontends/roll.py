"""Equal consecutive layers become one `repeat` over weight families.

Two layers are equal when they hold the same ops in the same order, with the same types and the same
attributes up to the layer number, read the same weights up to the index, and connect to the layer
before them in the same way.  Values that change from layer to layer are carried; all others must be
defined before the first layer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ktgraph.frontends.errors import UnsupportedModelError
from ktgraph.frontends.naming import family, place_of
from ktgraph.ir.dims import Dim
from ktgraph.ir.graph import Block, Function, Module, Op, Operand, Value, Weight, WeightRef
from ktgraph.ir.types import TensorType

INDEX = "i"
_Source = tuple[int, int]  # (position of an op in its layer, number of its result)


@dataclass
class Layer:
    """The ops of one layer, and what they read from outside, in order of first use."""

    number: int
    ops: list[Op]
    outside: list[Value]
    shape: str  # equal for layers of equal content

    def source(self, value: Value) -> _Source | None:
        for position, op in enumerate(self.ops):
            if value.owner is op:
                return position, op.results.index(value)
        return None

    def value(self, source: _Source) -> Value:
        return self.ops[source[0]].results[source[1]]


def roll_layers(module: Module) -> int:
    """Roll every run of two or more equal layers of ``@main``, in place; returns how many runs."""
    func = module.functions["main"]
    runs = _with_families(module, _runs(_layers(module, func), func))
    for run in reversed(runs):  # from the end, so that a run still reads what it was found to read
        # values of the last run lose their layer prefix, others keep that of their first layer
        _roll(module, func, run, bare=run is runs[-1])
    _make_families(module, [(run[0].number, run[-1].number) for run in runs])
    return len(runs)


# ---------------------------------------------------------------- finding runs


def _layers(module: Module, func: Function) -> list[Layer]:
    """Stretches of ops of one layer; a layer in two pieces is left out."""
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
    return [_layer(module, n, ops) for n, ops in stretches if n >= 0 and numbers.count(n) == 1]


def _layer(module: Module, number: int, ops: list[Op]) -> Layer:
    inside = {r: (i, j) for i, op in enumerate(ops) for j, r in enumerate(op.results)}
    outside: list[Value] = []
    lines = []
    for op in ops:
        tokens = [_token(module, o, number, inside, outside) for o in op.operands]
        attrs = {k: _relative(k, v, number) for k, v in op.attrs.items()}
        types = [str(r.type) for r in op.results]
        lines.append(f"{op.name} {tokens} {attrs} {types}")
    outside_types = [str(v.type) for v in outside]
    return Layer(number, ops, outside, "\n".join([*lines, str(outside_types)]))


def _token(
    module: Module,
    operand: Operand,
    number: int,
    inside: dict[Value, _Source],
    outside: list[Value],
) -> str:
    if operand is None:
        return "_"
    if isinstance(operand, WeightRef):
        member = family(operand.name)
        name = member[0] if member and member[1] == number else operand.name
        return f"{name} {module.weights[operand.name].type}"
    if operand in inside:
        return f"%{inside[operand]}"
    if operand not in outside:
        outside.append(operand)
    return f"outside {outside.index(operand)}"


def _relative(key: str, value: object, number: int) -> str:
    return INDEX if key == "layer" and value == Dim.of(number) else str(value)


def _runs(layers: Sequence[Layer], func: Function) -> list[list[Layer]]:
    """Maximal runs of equal layers that connect alike, each of two or more."""
    runs: list[list[Layer]] = []
    run: list[Layer] = []
    for layer in layers:
        if run and _continues(run, layer):
            run.append(layer)
            continue
        runs.append(run)
        run = [layer]
    runs.append(run)
    return [_closed(r, func) for r in runs if len(_closed(r, func)) > 1]


def _continues(run: list[Layer], layer: Layer) -> bool:
    last = run[-1]
    if layer.shape != last.shape or layer.number != last.number + 1:
        return False
    link = _link(last, layer)
    return link is not None and (len(run) == 1 or link == _link(run[-2], last))


def _link(before: Layer, after: Layer) -> list[_Source | None] | None:
    """Where each outside value of `after` comes from: a result of `before`, or unchanged (None)."""
    sources: list[_Source | None] = []
    for old, new in zip(before.outside, after.outside, strict=True):
        source = before.source(new)
        if source is None and new is not old:
            return None
        sources.append(source)
    return sources


def _closed(run: list[Layer], func: Function) -> list[Layer]:
    """The longest head of a run whose values leave it only as carried results of its last layer."""
    while len(run) > 1:
        carried = {run[-1].value(s) for s in _link(run[-2], run[-1]) or [] if s is not None}
        ops = {id(op) for layer in run for op in layer.ops}
        leaving = {
            r
            for layer in run
            for op in layer.ops
            for r in op.results
            if any(id(user) not in ops for user in r.users)
        }
        if leaving <= carried:
            return run
        run = run[:-1]
    return run


def _with_families(module: Module, runs: list[list[Layer]]) -> list[list[Layer]]:
    """Runs whose weights can be families, the longest first: a name is one family of one type.

    Layers that differ in how weights are stored (GGUF mixes formats) are runs apart.
    """
    kept: list[list[Layer]] = []
    for run in sorted(runs, key=len, reverse=True):
        if all(_share_families(module, run, other) for other in kept):
            kept.append(run)
    return [run for run in runs if run in kept]


def _share_families(module: Module, run: list[Layer], other: list[Layer]) -> bool:
    """Whether weights of one name have one type in two runs, which then must be neighbours."""
    mine, others = _weights_of(module, run[0]), _weights_of(module, other[0])
    shared = mine.keys() & others.keys()
    neighbours = 1 in (run[0].number - other[-1].number, other[0].number - run[-1].number)
    return not shared or (neighbours and all(mine[n] == others[n] for n in shared))


def _weights_of(module: Module, layer: Layer) -> dict[str, TensorType]:
    """Types of a layer's own weights, by the name of their family."""
    found: dict[str, TensorType] = {}
    for name, weight in module.weights.items():
        member = family(name)
        if member is not None and member[1] == layer.number:
            found[member[0]] = weight.type
    return found


# ---------------------------------------------------------------- rolling


def _roll(module: Module, func: Function, run: list[Layer], bare: bool) -> None:
    """Replace a run by one `repeat` whose body is the first layer's ops."""
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
    attrs = {"index": INDEX, "lo": first.number, "hi": last.number}
    repeat = Op("repeat", initial, results, attrs, body=body)
    for old, new in zip(finals, repeat.results, strict=True):
        _replace_outside(old, new, last)
    for op in reversed([op for layer in run[1:] for op in layer.ops]):
        op.erase()
    for op in first.ops:
        func.body.ops.remove(op)
        body.append(op)
        for old, new in zip(initial, args, strict=True):
            op.replace_operand(old, new)
        _make_member(op, first.number)
        for result in op.results:
            result.name = names.of(result)
    body.set_returns(yields)
    func.body.insert(position, repeat)


class _BodyNames:
    """Names inside a rolled body: those of the first layer, without its prefix if `bare`."""

    def __init__(self, func: Function, run: list[Layer], bare: bool) -> None:
        rolled = {r for layer in run for op in layer.ops for r in op.results}
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


def _replace_outside(old: Value, new: Value, layer: Layer) -> None:
    inside = {id(op) for op in layer.ops}
    for user in list(old.users):
        if id(user) not in inside:
            user.replace_operand(old, new)


def _make_member(op: Op, number: int) -> None:
    """Rewrite one op of layer `number` to speak of layer i."""
    if op.attrs.get("layer") == Dim.of(number):
        op.attrs["layer"] = Dim.of(INDEX)
    op.set_operands([_member_ref(o, number) for o in op.operands])
    if op.loc:
        op.loc = _indexed(op.loc, number)


def _indexed(path: str, number: int) -> str:
    """``model.layers.3.mlp`` as ``model.layers.{i}.mlp``."""
    return re.sub(rf"\.{number}(\.|$)", rf".{{{INDEX}}}\1", path, count=1)


def _member_ref(operand: Operand, number: int) -> Operand:
    if not isinstance(operand, WeightRef):
        return operand
    member = family(operand.name)
    if member is None or member[1] != number:
        return operand
    return WeightRef(member[0], Dim.of(INDEX))


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
    if before is not None and (before.hi + 1 != lo or before.type != weight.type):
        raise UnsupportedModelError(
            f"@{name}: two runs of layers ({before.lo}..{before.hi} and {lo}..{hi}) hold this "
            "weight with different types or with a gap between them"
        )
    if before is not None:
        before.hi = hi
        return
    source = weight.source and _indexed(weight.source, lo)
    recipe = weight.recipe
    if recipe is not None:
        args = [_member_ref(a, lo) for a in recipe.args]
        recipe = replace(recipe, args=tuple(a for a in args if isinstance(a, WeightRef)))
    module.add_weight(
        replace(weight, name=name, source=source, recipe=recipe, var=INDEX, lo=lo, hi=hi)
    )
