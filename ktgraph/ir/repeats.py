"""Splitting a `repeat` where layers are no longer equal, and writing one layer out."""

from __future__ import annotations

from collections.abc import Sequence

from ktgraph.ir.copying import clone_block
from ktgraph.ir.dims import Dim
from ktgraph.ir.graph import Attr, Block, Function, Op, Operand, Value, WeightRef, attr


def split_repeat(func: Function, op: Op, at: int) -> tuple[Op, Op]:
    """Split ``repeat i in lo..hi`` into ``lo..at-1`` and ``at..hi``; returns both in order.

    The first part keeps the names of the body, the second the names of the results; what is new is
    named after the layer it begins at (``%attn.10``).  Weight families stay whole.
    Raises ValueError when `at` does not lie inside the range.
    """
    lo, hi = op.int_attr("lo"), op.int_attr("hi")
    if op.body is None or op.block is None:
        raise ValueError(f"{op.name} is no repeat that lies in a block")
    if not lo < at <= hi:
        raise ValueError(f"repeat {lo}..{hi} cannot be split at {at}: expected {lo + 1}..{hi}")
    block, first = op.block, op.body
    rest = Block()
    clone_block(first, rest, {})
    taken = {v.name for v in func.values()}
    _rename(_values(rest), at, taken)
    results = [(_free(f"{r.name}.{at}", taken), r.type) for r in op.results]
    head = Op("repeat", op.operands, results, {**op.attrs, "hi": at - 1}, loc=op.loc, body=first)
    block.insert_before(op, head)
    op.body, rest.parent = rest, op
    op.attrs = {**head.attrs, "lo": attr(at), "hi": attr(hi)}
    op.set_operands(list(head.results))
    return head, op


def split_repeat_at(func: Function, op: Op, starts: Sequence[int]) -> list[Op]:
    """Split so that a part begins at each of `starts`; returns the parts in order."""
    parts: list[Op] = []
    for at in sorted(starts):
        head, op = split_repeat(func, op, at)
        parts.append(head)
    return [*parts, op]


def inline_repeat(op: Op) -> list[Op]:
    """Replace a repeat of one layer by the ops of its body; returns them.  Names stay.

    Raises ValueError for a repeat of more layers, or with a repeat inside.
    """
    lo, hi = op.int_attr("lo"), op.int_attr("hi")
    if op.body is None or op.block is None or lo != hi:
        raise ValueError(f"{op.name} {lo}..{hi} is no repeat of one layer")
    body, block = op.body, op.block
    moved = list(body.ops)
    if any(inner.body is not None for inner in moved):
        raise ValueError(f"repeat {lo}..{hi} has a repeat inside")
    index = {str(op.attrs["index"]): lo}
    for inner in moved:
        inner.attrs = {k: _at(v, index) for k, v in inner.attrs.items()}
        inner.loc = inner.loc and inner.loc.replace(f"{{{op.attrs['index']}}}", str(lo))
        inner.set_operands([_ref_at(o, index) for o in inner.operands])
        block.insert_before(op, inner)
    body.ops = []
    for arg, given in zip(body.args, op.values, strict=True):
        for user in list(arg.users):
            user.replace_operand(arg, given)
    results = body.returns
    body.set_returns([])
    op.replace_by(results)
    return moved


def _at(value: Attr, index: dict[str, int]) -> Attr:
    if isinstance(value, tuple):
        return tuple(_at(v, index) for v in value)
    return value.subst({**index}) if isinstance(value, Dim) else value


def _ref_at(operand: Operand, index: dict[str, int]) -> Operand:
    if not isinstance(operand, WeightRef) or operand.index is None:
        return operand
    return WeightRef(operand.name, operand.index.subst({**index}))


def _values(block: Block) -> list[Value]:
    found = list(block.args)
    for op in block.ops:
        found += op.results
        if op.body is not None:
            found += _values(op.body)
    return found


def _rename(values: Sequence[Value], at: int, taken: set[str]) -> None:
    for value in values:
        value.name = _free(f"{value.name}.{at}", taken)


def _free(stem: str, taken: set[str]) -> str:
    """`stem`, or with a number behind it; the name counts as taken from then on."""
    name, count = stem, 0
    while name in taken:
        count += 1
        name = f"{stem}.{count}"
    taken.add(name)
    return name


__all__ = ["inline_repeat", "split_repeat", "split_repeat_at"]
