"""Whole-function clean-ups: equal ops merged, adjacent slices joined to splits, dead ops erased."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from ktgraph.ir.dims import Dim
from ktgraph.ir.graph import Block, Module, Op, Value, dce
from ktgraph.ir.printer import print_attrs
from ktgraph.ir.types import StateType, TensorType
from ktgraph.ops import build, is_op, op_def
from ktgraph.pass_api import PassContext


def erase_dead(module: Module) -> int:
    """Erase ops that nobody reads and that have no effect."""
    return dce(module, has_effect)


def has_effect(op: Op) -> bool:
    return is_op(op.name) and op_def(op.name).has_effect


# -- common subexpressions ------------------------------------------------------------------------
_Key = tuple[str, tuple[object, ...], str, str | None]


def merge_equal_ops(module: Module, ctx: PassContext) -> int:
    """Let the first of several equal pure ops stand for all; returns how many were erased."""
    return sum(_merge_in(f.body, {}, ctx) for f in module.functions.values())


def _merge_in(block: Block, seen: dict[_Key, Op], ctx: PassContext) -> int:
    merged = 0
    for op in list(block.ops):
        if op.body is not None:
            merged += _merge_in(op.body, dict(seen), ctx)
        if not _is_pure(op):
            continue
        first = seen.setdefault(_key(op), op)
        if first is op or not ctx.may_rewrite("merge-equal-ops", op):
            continue
        op.replace_by(first.results)
        merged += 1
    return merged


def _is_pure(op: Op) -> bool:
    is_append = any(isinstance(r.type, StateType) for r in op.results)
    return op.body is None and not is_append and not has_effect(op) and op.name[:5] != "xfer."


def _key(op: Op) -> _Key:
    operands = tuple(id(o) if isinstance(o, Value) else o for o in op.operands)
    return op.name, operands, print_attrs(op.attrs), op.results[0].type.device


# -- slices to splits -----------------------------------------------------------------------------
def slices_to_splits(module: Module, ctx: PassContext) -> int:
    """Slices that together cover an axis become one `tensor.split`; returns how many splits."""
    made = 0
    for function in module.functions.values():
        for value in list(function.values()):
            for slices in _covers(value):
                made += _split(module, value, slices, ctx)
    return made


def _covers(value: Value) -> Iterator[list[Op]]:
    """Groups of slices of `value` in one block that cover one axis without gap or overlap."""
    if not isinstance(value.type, TensorType):
        return
    groups: dict[tuple[int, int], list[Op]] = {}
    for user in value.users:
        if user.name == "tensor.slice":
            axis = user.int_attr("axis", -1) % value.type.rank
            groups.setdefault((axis, id(user.block)), []).append(user)
    for (axis, _), slices in groups.items():
        ordered = _in_order(slices)
        if len(slices) > 1 and ordered and _end(ordered[-1]) == value.type.dims[axis]:
            yield ordered


def _in_order(slices: list[Op]) -> list[Op]:
    """The slices from 0 on, each beginning where the one before ends; empty with a gap."""
    by_start = {_start(op): op for op in slices}
    ordered: list[Op] = []
    at = Dim.of(0)
    while at in by_start and len(ordered) < len(slices):
        ordered.append(by_start[at])
        at = _end(ordered[-1])
    is_chain = all(_end(a) == _start(b) for a, b in pairwise(ordered))
    return ordered if is_chain and len(ordered) == len(slices) else []


def _start(op: Op) -> Dim:
    found = op.attrs["start"]
    assert isinstance(found, Dim)
    return found


def _end(op: Op) -> Dim:
    size = op.attrs["size"]
    assert isinstance(size, Dim)
    return _start(op) + size


def _split(module: Module, value: Value, slices: list[Op], ctx: PassContext) -> int:
    block = slices[0].block
    assert block is not None
    first = min(slices, key=block.ops.index)
    if not ctx.may_rewrite("slices-to-split", first):
        return 0
    axis = first.int_attr("axis", -1)
    axis = axis if axis < 0 else axis - value.tensor.rank
    sizes = tuple(_end(op) - _start(op) for op in slices)
    names = [op.result.name for op in slices]
    device = first.result.type.device
    attrs = {"sizes": sizes, "axis": axis}
    op = build(module, "tensor.split", [value], names, attrs, loc=first.loc, device=device)
    block.insert_before(first, op)
    for old, new in zip(slices, op.results, strict=True):
        old.replace_by([new])
    return 1


# -- splits of splits -----------------------------------------------------------------------------
def merge_splits(module: Module, ctx: PassContext) -> int:
    """A piece that is only split further along the same axis goes: one split; returns how many."""
    merged = 0
    for outer in [op for op in module.walk() if op.name == "tensor.split"]:
        inner = _inner_split(outer)
        while inner is not None and ctx.may_rewrite("merge-splits", inner):
            outer = _merged_split(module, outer, inner)
            inner = _inner_split(outer)
            merged += 1
    return merged


def _inner_split(outer: Op) -> Op | None:
    if not outer.operands:  # erased: it was the inner one of another
        return None
    for piece in outer.results:
        user = piece.users[0] if len(piece.users) == 1 else None
        if user is None or user.name != "tensor.split" or user.block is not outer.block:
            continue
        if _split_axis(user) == _split_axis(outer):
            return user
    return None


def _split_axis(op: Op) -> int:
    return op.int_attr("axis", -1) % op.result.tensor.rank


def _merged_split(module: Module, outer: Op, inner: Op) -> Op:
    piece = inner.value(0)
    pieces = [v for r in outer.results for v in (inner.results if r is piece else [r])]
    names = [v.name for v in pieces]
    sizes = tuple(v.tensor.dims[_split_axis(outer)] for v in pieces)
    attrs = {**outer.attrs, "sizes": sizes}
    device = outer.result.type.device
    one = build(module, "tensor.split", outer.operands, names, attrs, loc=outer.loc, device=device)
    assert outer.block is not None
    outer.block.insert_before(outer, one)
    for old, new in zip(pieces, one.results, strict=True):
        old.replace_by(new)
    inner.erase()
    outer.erase()
    return one


__all__ = ["erase_dead", "has_effect", "merge_equal_ops", "merge_splits", "slices_to_splits"]
