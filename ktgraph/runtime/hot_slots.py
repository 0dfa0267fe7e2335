"""Slots of hot experts in a plan: which layers have some, and what they are filled from.

The host holds every expert of such a layer.  Where a slot has the same numbers, its bytes are
copied from there and are neither read from the checkpoint nor kept in files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ktgraph.ir.graph import Module
from ktgraph.placement.popularity import SAME_EXPERTS, original, router_name
from ktgraph.runtime.native import dense_dtype
from ktgraph.runtime.operands import WeightUse
from ktgraph.runtime.weight_forms import TILE_FORMATS

if TYPE_CHECKING:
    from ktgraph.runtime.plan import Plan

Member = tuple[str, "int | None"]  # a weight by name, and which member of a family


@dataclass(frozen=True)
class HotStack:
    """The slots of one stack of experts, and the stack on the host that they are filled from.

    table: the layer's table, by name and member.
    is_filled: whether experts can be copied without a loss, so that only the source is loaded.
    """

    slots: WeightUse
    source: WeightUse
    table: Member
    is_filled: bool


@dataclass
class HotLayer:
    """A layer's table, and the stacks that it speaks of.  `experts[slot]` is an expert or -1.

    router: the gate that chooses among them, as profiles name it.
    experts: as the table has them once what was started on the GPU has run.
    """

    table: WeightUse
    router: str
    stacks: list[HotStack] = field(default_factory=list[HotStack])
    experts: list[int] = field(default_factory=list[int])

    @property
    def of(self) -> int:
        """Experts of the layer."""
        return self.table.type.dims[0].const()


def hot_stacks(module: Module, uses: Sequence[WeightUse]) -> list[HotStack]:
    """Every use that is slots of a stack, in order."""
    resident = [u for u in uses if _recipe_kind(module, u) == "resident"]
    if not resident:
        return []
    sources: dict[Member, list[WeightUse]] = {}
    for use in (u for u in uses if u.device == "cpu"):
        ref, index = original(module, use.ref, use.index, SAME_EXPERTS)
        sources.setdefault((ref.name, index), []).append(use)
    return [_stack(module, use, sources) for use in resident]


def _recipe_kind(module: Module, use: WeightUse) -> str:
    """The recipe of a weight below those that keep a stack's experts."""
    made = module.weights[original(module, use.ref, use.index, SAME_EXPERTS)[0].name].recipe
    return "" if made is None else made.kind


def _stack(module: Module, use: WeightUse, sources: dict[Member, list[WeightUse]]) -> HotStack:
    ref, index = original(module, use.ref, use.index, SAME_EXPERTS)
    weight = module.weights[ref.name]
    assert weight.recipe is not None
    at = {} if index is None else {weight.var: index}
    whole, table = ((a, None if a.index is None else a.index.at(at)) for a in weight.recipe.args)
    below, member = original(module, *whole, SAME_EXPERTS)
    # where the host holds a stack twice, the form that is nearest to the slots'
    held = sources[below.name, member]
    source = max(held, key=lambda s: (has_same_bytes(use, s), _has_same_numbers(module, use, s)))
    is_filled = _has_same_numbers(module, use, source)
    return HotStack(use, source, (table[0].name, table[1]), is_filled)


def hot_layers(plan: Plan) -> dict[int, HotLayer]:
    """The layers of a plan that have slots, by number; `experts` are not known yet."""
    uses = plan.held()
    tables = {(u.ref.name, u.index): u for u in uses}
    routers = dict(_routers(plan))
    found: dict[int, HotLayer] = {}
    for stack in hot_stacks(plan.module, uses):
        table = tables[stack.table]
        layer = found.setdefault(_number(table, found), HotLayer(table, routers[table.key]))
        layer.stacks.append(stack)
    return dict(sorted(found.items()))


def _routers(plan: Plan) -> Iterator[tuple[str, str]]:
    """By key of a table: the gate whose choices are told apart by it."""
    for phase in plan.phases:
        for item in phase.instructions:
            step = phase.step(item)
            route = step.op.value(0).producer if step.op.name == "moe.split_ids" else None
            if route is not None:
                (table,) = (o for o in item.operands if isinstance(o, WeightUse))
                yield table.key, router_name(plan.module, route, step.bindings)


def _number(table: WeightUse, found: dict[int, HotLayer]) -> int:
    """The layer in the table's name; without one, the number of layers before it."""
    named = re.search(r"\[(\d+)\]", table.key)
    if named is not None:
        return int(named[1])
    known = [n for n, layer in found.items() if layer.table.key == table.key]
    return known[0] if known else len(found)


def has_same_bytes(slots: WeightUse, stack: WeightUse) -> bool:
    """Whether an expert has the same bytes in both."""
    if slots.form != stack.form:
        return False
    if slots.form != "tile":
        return slots.form == "stored" and slots.type.encoding == stack.type.encoding
    a, b = slots.tile, stack.tile
    return (a.format, a.group, a.gate_up) == (b.format, b.group, b.gate_up)


def _has_same_numbers(module: Module, slots: WeightUse, stack: WeightUse) -> bool:
    """Whether dense slots hold what the stack unpacks to, or both have the same bytes."""
    if has_same_bytes(slots, stack):
        return True
    if slots.form == "tile":
        return False
    if stack.form != "tile":
        return dense_dtype(stack) in ("f32", dense_dtype(slots))
    made = module.weight_of(slots.ref).recipe
    if made is None or made.kind != "dequantize":
        return stack.tile.format == dense_dtype(slots)
    stored = module.weight_of(made.args[0]).type.encoding
    assert stored is not None
    held = stack.tile.format, stack.tile.group
    return held == (TILE_FORMATS.get(stored.name), stored.get("group"))


__all__ = ["HotLayer", "HotStack", "has_same_bytes", "hot_layers", "hot_stacks"]
