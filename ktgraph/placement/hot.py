"""Hot experts: some experts of a layer in slots on the GPU, the others on the host beside it.

How many is what a rule says, or what the budget leaves; which, a popularity profile, or without one
the first.  The split is in the text, and which experts have slots is data that may change later:

Before:  %routed = moe.grouped_mlp %h, %ids, %wts, @w13, @w2 : f32[T, D]@cpu
After:   %ids.hot, %ids.cold = moe.split_ids %ids, @slots
         %routed.hot = moe.grouped_mlp %h, %ids.hot, %wts, @w13.hot, @w2.hot {share = 0.4}
         %routed.cold = moe.grouped_mlp %h, %ids.cold, %wts, @w13, @w2 {share = 0.6} : f32[T, D]@cpu
         %routed = tensor.add %routed.hot, %routed.cold
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ktgraph.errors import MemoryBudgetError
from ktgraph.ir.dims import SLOTS, Dim
from ktgraph.ir.graph import Function, Module, Op, Recipe, Value, Weight, WeightRef, attr
from ktgraph.ir.types import TensorType
from ktgraph.ops import build
from ktgraph.placement.graph import HOT, Region, Site
from ktgraph.placement.popularity import (
    Popularity,
    PopularityError,
    original,
    router_name,
    weight_name,
)
from ktgraph.placement.rules import Rule, RuleError
from ktgraph.rewrite import derived_weight, reference
from ktgraph.target.description import round_size

_STACKS = (3, 4, 5, 6)  # operands of moe.grouped_mlp with a matrix or a vector for every expert
Held = Mapping[tuple[int, int, int | None], Rule]  # rules by region, site and layer


@dataclass(frozen=True)
class HotLayer:
    """The slots of one layer.

    share: of the layer's choices that its hot experts get; of: experts of the layer;
    experts: in order of slots, empty for the first ones.
    """

    slots: int
    of: int
    share: float
    experts: tuple[int, ...]
    nbytes: float  # of all slots


@dataclass(frozen=True)
class Wish:
    """A layer whose experts may get slots; count None: as many as fit."""

    router: str
    experts: int
    nbytes: float  # of one expert
    count: int | None
    rule: Rule


def stack_key(module: Module, region: Region, site: Site, layer: int | None) -> str:
    """The layer's stack of experts by name, the same in every phase."""
    ref = site.op.weight(3)
    index = None if ref.index is None else ref.index.at({region.index: layer or 0})
    return weight_name(*original(module, ref, index))


def wishes(module: Module, regions: Sequence[Region], held: Held) -> dict[str, Wish]:
    """What rules ask for, by stack; raises RuleError where they cannot have it."""
    found: dict[str, Wish] = {}
    for (number, place, layer), rule in held.items():
        if rule.device != HOT:
            continue
        region = regions[number]
        site = region.sites[place]
        if site.op.name != "moe.grouped_mlp":
            raise RuleError(f"{rule}: only routed experts can be hot, and this is\n  {site.op}")
        wish = _wish(module, region, site, layer, rule)
        before = found.setdefault(stack_key(module, region, site, layer), wish)
        if before.count != wish.count:
            raise RuleError(
                f"{rule}: {rule.experts} hot experts, and {before.rule} asks for "
                f"{before.rule.experts} of the same layer: its slots serve every phase"
            )
    return found


def check_popularity(
    module: Module, regions: Sequence[Region], popularity: Popularity | None
) -> None:
    """Raises PopularityError where a profile lacks one of the module's routers."""
    if popularity is None:
        return
    if not any(s.op.name == "moe.route" for r in regions for s in r.sites):
        raise PopularityError(
            f"popularity={popularity.path}: @{module.name} has no routed experts; leave it out"
        )
    for region in regions:
        for site in (s for s in region.sites if s.op.name == "moe.route"):
            experts = module.weight_of(site.op.weight(1)).type.dims[0].at(region.sizes)
            for layer in region.layers:
                router = router_name(module, site.op, {region.index: layer or 0})
                popularity.of(router, experts)


def _wish(module: Module, region: Region, site: Site, layer: int | None, rule: Rule) -> Wish:
    stack = module.weight_of(site.op.weight(3)).type
    experts = stack.dims[0].at(region.sizes)
    if rule.experts is not None and rule.experts > experts:
        raise RuleError(
            f"{rule}: experts: {rule.experts}, but a layer has {experts}: expected 1..{experts}"
        )
    route = site.op.value(1).producer
    if route is None or route.name != "moe.route":
        raise RuleError(f"{rule}: its experts are chosen by no moe.route\n  {site.op}")
    router = router_name(module, route, {region.index: layer or 0})
    nbytes = sum(n for ref, n in site.weights if _has_experts(module, ref, stack.dims[0])) / experts
    return Wish(router, experts, nbytes, rule.experts, rule)


def _has_experts(module: Module, ref: WeightRef, experts: Dim) -> bool:
    type = module.weight_of(ref).type
    return type.rank > 0 and type.dims[0] == experts


def asked_nbytes(wanted: Mapping[str, Wish]) -> float:
    """Bytes of the slots whose number rules give."""
    return sum(w.nbytes * (w.count or 0) for w in wanted.values())


def choose_hot(
    wanted: Mapping[str, Wish], spare: float, popularity: Popularity | None
) -> dict[str, HotLayer]:
    """The slots of every layer; the same number in all layers where rules give none.

    spare: bytes that are left on the GPU.  Raises MemoryBudgetError when they hold no expert.
    """
    open_ones = [w for w in wanted.values() if w.count is None]
    each = sum(w.nbytes for w in open_ones)
    fits = min([int(spare // each), *(w.experts for w in open_ones)]) if open_ones else 0
    if open_ones and fits < 1:
        raise MemoryBudgetError(
            f"{open_ones[0].rule}: one hot expert in each of {len(open_ones)} layers takes "
            f"{round_size(each)} of the GPU, and {round_size(max(spare, 0))} are left. Give it "
            "more gpu_memory, name fewer layers, or say device: cpu"
        )
    return {
        key: _layer(wish, fits if wish.count is None else wish.count, popularity)
        for key, wish in wanted.items()
    }


def _layer(wish: Wish, slots: int, popularity: Popularity | None) -> HotLayer:
    of, nbytes = wish.experts, slots * wish.nbytes
    if popularity is None:
        return HotLayer(slots, of, slots / of, (), nbytes)
    hot = popularity.hottest(wish.router, of, slots)
    return HotLayer(slots, of, popularity.share(wish.router, of, hot), tuple(hot), nbytes)


# -- the split ---------------------------------------------------------------------------------
class Splitting:
    """Writes the split into a placed module; devices of values are set, copies are not."""

    def __init__(self, module: Module, layers: Mapping[str, HotLayer]) -> None:
        self.module = module
        self.layers = layers
        self._tables: dict[tuple[str, int], Weight] = {}  # by stack and number of slots

    def split(self, func: Function, op: Op, keys: Sequence[str]) -> None:
        """Split an op on the host that stands for the layers of these stacks, in order."""
        held = [self.layers[k] for k in keys]
        share = round(sum(layer.share for layer in held) / len(held), 4)
        table = self._table(op, keys[0])
        where = reference(table, [op.weight(3)])
        ids = op.value(1)
        names = [func.fresh_name(f"{ids.name}.{part}") for part in ("hot", "cold")]
        parted = build(self.module, "moe.split_ids", [ids, where], names, {}, loc=op.loc)
        stacks = [self._stack(op, position, where) for position in _STACKS]
        hot = build(
            self.module,
            "moe.grouped_mlp",
            [op.value(0), parted.results[0], op.value(2), *stacks],
            [func.fresh_name(f"{op.result.name}.hot")],
            {**op.attrs, "share": share},
            loc=op.loc,
        )
        assert op.block is not None
        for made in (parted, hot):
            op.block.insert_before(op, made)
        op.set_operand(1, parted.results[1])
        op.attrs["share"] = attr(round(1.0 - share, 4))
        self._add(func, op, hot.result)

    def _add(self, func: Function, op: Op, hot: Value) -> None:
        """The sum takes the name and the uses of the op's result."""
        cold = op.result
        users = list(cold.users)
        name, cold.name = cold.name, func.fresh_name(f"{cold.name}.cold")
        total = build(self.module, "tensor.add", [hot, cold], [name], {}, loc=op.loc)
        assert op.block is not None
        op.block.insert(op.block.ops.index(op) + 1, total)
        for user in users:
            user.replace_operand(cold, total.result)

    def _stack(self, op: Op, position: int, table: WeightRef) -> WeightRef | None:
        ref = op.operand(position)
        if not isinstance(ref, WeightRef):
            return None
        weight = self.module.weight_of(ref)
        slots = self._slots_of(table)
        type = replace(weight.type, dims=(slots, *weight.type.dims[1:])).on(None)
        leaf = f"{ref.name.rpartition('.')[2].removesuffix('.cpu')}.hot"
        attrs = {"slots": slots}
        made = derived_weight(self.module, [ref, table], leaf, "resident", type, attrs)
        if made.name not in self.module.weights:
            self.module.add_weight(made)
        return reference(self.module.weights[made.name], [ref, table])

    def _slots_of(self, table: WeightRef) -> Dim:
        made = self.module.weight_of(table).recipe
        found = made.get("slots") if made is not None else None
        assert isinstance(found, Dim)
        return found

    # -- tables ----------------------------------------------------------------------------------
    def _table(self, op: Op, key: str) -> Weight:
        """The table of the op's layers: one weight for all layers with as many slots."""
        ref, slots = op.weight(3), self.layers[key].slots
        if (ref.name, slots) not in self._tables:
            self._tables[ref.name, slots] = self._made_table(ref, slots)
        return self._tables[ref.name, slots]

    def _made_table(self, ref: WeightRef, slots: int) -> Weight:
        stack = self.module.weight_of(ref)
        head, dot, _ = ref.name.rpartition(".")
        weight = Weight(f"{head}{dot}slots", stack.type, var=stack.var)
        count = 1
        while weight.name in self.module.weights:
            count += 1
            weight.name = f"{head}{dot}slots{count}"
        members = self._members(ref, slots)
        attrs: dict[str, object] = {"experts": stack.type.dims[0], "slots": self._dim(slots)}
        if stack.is_family:
            weight.lo, weight.hi = min(members), max(members)
        if any(members.values()):
            attrs["hot"] = [" ".join(map(str, members.get(i, ()))) for i in _span(members)]
            attrs["row"] = Dim.of(stack.var) - weight.lo if stack.is_family else 0
        pairs = tuple((k, attr(v)) for k, v in attrs.items())
        weight.recipe = Recipe("expert_slots", (), pairs)
        weight.type = TensorType("i32", (stack.type.dims[0],))
        self.module.add_weight(weight)
        return weight

    def _members(self, ref: WeightRef, slots: int) -> dict[int, tuple[int, ...]]:
        """Hot experts by member of the family; of a single weight as member 0."""
        weight = self.module.weight_of(ref)
        indices = range(weight.lo, weight.hi + 1) if weight.is_family else [None]
        found: dict[int, tuple[int, ...]] = {}
        for index in indices:
            layer = self.layers.get(weight_name(*original(self.module, ref, index)))
            if layer is not None and layer.slots == slots:
                found[index or 0] = layer.experts
        return found

    def _dim(self, slots: int) -> Dim:
        names = [n for n in self.module.dims if n.startswith(SLOTS)]
        for name in names:
            if self.module.dims[name] == slots:
                return Dim.of(name)
        name = SLOTS if not names else f"{SLOTS}{len(names) + 1}"
        self.module.dims[name] = slots
        return Dim.of(name)


def _span(members: Mapping[int, object]) -> range:
    return range(min(members), max(members) + 1)


__all__ = [
    "Held",
    "HotLayer",
    "Splitting",
    "Wish",
    "asked_nbytes",
    "check_popularity",
    "choose_hot",
    "stack_key",
    "wishes",
]
