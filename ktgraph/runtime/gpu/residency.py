"""Which experts of a layer have slots on the GPU, and how that is changed between two steps.

A change copies experts' bytes into slots and writes the layer's table, both at addresses that
captured graphs have, so nothing is captured again.  The GPU masks the ids that it hands over by the
same table, so an expert is computed on one side.  Host memory holds every expert in the CPU's
tiles; packed experts are copied as they are, dense ones are unpacked for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import cast

import torch

from ktgraph.cpu_kernels import load_native
from ktgraph.errors import UnsupportedInputError, is_whole
from ktgraph.placement.popularity import SAME_EXPERTS, original, router_name
from ktgraph.runtime.gpu.device import GpuDevice, Step
from ktgraph.runtime.operands import WeightUse
from ktgraph.runtime.packed import LoadedWeights
from ktgraph.runtime.plan import Plan

Stack = tuple[str, "int | None"]  # a weight by name, and which member of a family


@dataclass
class HotStack:
    """The slots of one stack of experts, and the stack on the host that they are filled from."""

    slots: WeightUse
    source: WeightUse


@dataclass
class HotLayer:
    """A layer's table, and the stacks that it speaks of.  `experts[slot]` is an expert or -1.

    router: the gate that chooses among them, as profiles name it.
    """

    table: WeightUse
    router: str
    stacks: list[HotStack] = field(default_factory=list[HotStack])
    experts: list[int] = field(default_factory=list[int])

    @property
    def of(self) -> int:
        """Experts of the layer."""
        return self.table.type.dims[0].const()


def hot_layers(plan: Plan) -> dict[int, HotLayer]:
    """The layers of a plan that have slots, by number; `experts` are not known yet."""
    module = plan.module
    uses = plan.loaded()
    names = {u.key: original(module, u.ref, u.index, SAME_EXPERTS) for u in uses}
    sources: dict[Stack, list[WeightUse]] = {}
    for use in (u for u in uses if u.device == "cpu"):
        ref, index = names[use.key]
        sources.setdefault((ref.name, index), []).append(use)
    tables = {(u.ref.name, u.index): u for u in uses}
    routers = dict(_routers(plan))
    found: dict[int, HotLayer] = {}
    for use in uses:
        ref, index = names[use.key]
        weight = module.weights[ref.name]
        if weight.recipe is None or weight.recipe.kind != "resident":
            continue
        at = {} if index is None else {weight.var: index}
        stack, table = (
            (a, None if a.index is None else a.index.at(at)) for a in weight.recipe.args
        )
        below, member = original(module, *stack, SAME_EXPERTS)
        # where the host holds a stack twice, the form that needs no unpacking
        source = max(sources[below.name, member], key=lambda s: _same_bytes(use, s))
        held = tables[table[0].name, table[1]]
        layer = found.setdefault(_number(held, found), HotLayer(held, routers[held.key]))
        layer.stacks.append(HotStack(use, source))
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


class Residency:
    """The hot experts of an executor's plan."""

    def __init__(self, plan: Plan, device: GpuDevice, weights: LoadedWeights) -> None:
        self.device = device
        self.weights = weights
        self.layers = hot_layers(plan)
        for layer in self.layers.values():
            held = weights.tensors[layer.table.key].cpu().tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
            table = cast("list[int]", held)
            slots = layer.stacks[0].slots.type.dims[0].const()
            layer.experts = [table.index(s) if s in table else -1 for s in range(slots)]

    def resident(self) -> dict[int, list[int]]:
        """The hot experts of each layer, in order of their slots."""
        return {n: [e for e in x.experts if e >= 0] for n, x in self.layers.items()}

    def change(self, number: int, experts: Sequence[int]) -> list[Step]:
        """Steps that give a layer's slots to these experts; those that have one keep it.

        They run when no step is under way.  Raises UnsupportedInputError.
        """
        layer = self._checked(number, experts)
        wanted = list(dict.fromkeys(experts))
        after = [e if e in wanted else -1 for e in layer.experts]
        moved: list[tuple[int, int]] = []
        for expert in (e for e in wanted if e not in after):
            slot = after.index(-1)
            after[slot] = expert
            moved.append((expert, slot))
        kept = [e if e == old else -1 for e, old in zip(after, layer.experts, strict=True)]
        copies = [self._copy(s, *move) for s in layer.stacks for move in moved]
        # until its bytes are there, a slot has no expert: a copy that fails leaves a whole table
        return [self._write(layer, kept), *copies, self._write(layer, after)]

    def stack_of(self, use: WeightUse) -> ResidentStack | None:
        """The slots that hold the very bytes of some experts of a streamed weight."""
        for layer in self.layers.values():
            for stack in layer.stacks:
                if stack.source.key == use.key and _same_bytes(stack.slots, use):
                    slots = self.weights.tensors[stack.slots.key]
                    return ResidentStack(layer, slots, use.type.dims[0].const())
        return None

    def _checked(self, number: int, experts: Sequence[int]) -> HotLayer:
        if number not in self.layers:
            known = ", ".join(map(str, self.layers)) or "none"
            raise UnsupportedInputError(
                f"layer {number!r} has no slots for hot experts (layers that have: {known}). "
                "Placement rules give them: device: hot"
            )
        layer = self.layers[number]
        for expert in experts:
            if not is_whole(expert) or not 0 <= expert < layer.of:
                raise UnsupportedInputError(
                    f"layer {number}: {expert!r} is no expert: expected 0..{layer.of - 1}"
                )
        if len(set(experts)) != len(experts):
            twice = next(e for e in experts if list(experts).count(e) > 1)
            raise UnsupportedInputError(f"layer {number}: expert {twice} is given twice")
        if len(experts) > len(layer.experts):
            raise UnsupportedInputError(
                f"layer {number}: {len(experts)} experts for {len(layer.experts)} slots"
            )
        return layer

    def _write(self, layer: HotLayer, experts: Sequence[int]) -> Step:
        table = torch.full((layer.of,), -1, dtype=torch.int32)
        for slot, expert in enumerate(experts):
            if expert >= 0:
                table[expert] = slot
        write = self.device.copy(table, self.weights.tensors[layer.table.key])

        def step() -> None:
            write()
            layer.experts = list(experts)

        return step

    def _copy(self, stack: HotStack, expert: int, slot: int) -> Step:
        target, source = stack.slots, stack.source
        slots = self.weights.tensors[target.key]
        whole = self.weights.tensors[source.key]
        if target.form == "tile":
            _check_same_tiles(target, source)
            rows = slots.view(target.type.dims[0].const(), -1)
            return self.device.copy(whole.view(source.type.dims[0].const(), -1)[expert], rows[slot])
        found = _unpacked(whole, source, expert) if source.form == "tile" else whole[expert]
        return self.device.copy(found.to(slots.dtype), slots[slot])


@dataclass(frozen=True)
class ResidentStack:
    """Experts of a layer that lie in slots, for copies of the whole stack to the GPU."""

    layer: HotLayer
    slots: torch.Tensor
    experts: int

    def parts(
        self, source: torch.Tensor, target: torch.Tensor
    ) -> Callable[[], list[tuple[torch.Tensor, torch.Tensor]]]:
        """Pairs that fill the target with the source: resident experts from their slots."""
        here, there = source.view(self.experts, -1), target.view(self.experts, -1)
        slots = self.slots.view(len(self.layer.experts), -1)

        def pairs() -> list[tuple[torch.Tensor, torch.Tensor]]:
            slot_of = {e: s for s, e in enumerate(self.layer.experts) if e >= 0}
            found = [(slots[s], there[e]) for e, s in slot_of.items()]
            for start, end in _gaps(sorted(slot_of), self.experts):
                found.append((here[start:end], there[start:end]))
            return found

        return pairs


def _gaps(taken: Sequence[int], count: int) -> Iterator[tuple[int, int]]:
    """The runs of 0..count-1 between the numbers taken, which ascend."""
    for before, after in pairwise([-1, *taken, count]):
        if after > before + 1:
            yield before + 1, after


def _check_same_tiles(target: WeightUse, source: WeightUse) -> None:
    if not _same_bytes(target, source):
        raise UnsupportedInputError(
            f"@{target.ref.name} and @{source.ref.name} are stored differently, so experts cannot "
            "move between them: let one rule give both the same encoding"
        )


def _same_bytes(slots: WeightUse, stack: WeightUse) -> bool:
    """Whether an expert has the same bytes in both."""
    if slots.form != stack.form:
        return False
    if slots.form != "tile":
        return slots.form == "stored" and slots.type.encoding == stack.type.encoding
    a, b = slots.tile, stack.tile
    return (a.format, a.group, a.gate_up) == (b.format, b.group, b.gate_up)


def _unpacked(packed: torch.Tensor, use: WeightUse, expert: int) -> torch.Tensor:
    tile, shape = use.tile, [d.const() for d in use.type.dims]
    return torch.as_tensor(
        load_native().unpack(
            packed.data_ptr(), expert, tile.format, shape[-2], shape[-1], tile.group,
            prod(shape[:-2]), tile.gate_up,
        )
    )  # fmt: skip


__all__ = ["HotLayer", "HotStack", "Residency", "hot_layers"]
