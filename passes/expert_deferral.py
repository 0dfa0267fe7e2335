"""expert-deferral: let the CPU finish a layer's lightest experts while the GPU runs the next layer.

Of a token's routed experts on the CPU, the n with the lowest router weights are not waited for:
what they make is added to the residual stream one layer of experts later, so the CPU works on them
behind that layer's attention.  The other experts are as before, and the last layer hands nothing
on.  Lossy (a layer reads a residual stream that lacks a part), so it is off unless asked for, named
in the function's attribute `lossy`, and refused under exact=True.  Prefill stays exact.

Source: KTransformers (SOSP 2025), "expert deferral".

Before:  repeat i in 1..26 (%x = …) {
           %routed = moe.grouped_mlp %h, %ids, %wts, @layers[i].w13, @layers[i].w2 : …@cpu
           %y = tensor.add3 %x.1, %routed, %shared
           yield %y }
After:   … layer 1, which takes nothing …
         repeat i in 2..25 (%x = …, %before = %late.1) {
           %now, %later = tensor.split %ids {sizes = [K-n, n]}
           %routed = moe.grouped_mlp %h, %now, %wts.now, @layers[i].w13, @layers[i].w2 : …@cpu
           %late = moe.grouped_mlp %h, %later, %wts.later, @layers[i].w13, @layers[i].w2 : …@cpu
           %shared.with_late = tensor.add %shared, %before
           %y = tensor.add3 %x.1, %routed, %shared.with_late
           yield %y, %late }
         … layer 26, which hands nothing on …
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ktgraph.errors import UnsupportedInputError
from ktgraph.ir.graph import Attr, Block, Function, Module, Op, Value
from ktgraph.ir.repeats import inline_repeat, split_repeat
from ktgraph.ops import build
from ktgraph.pass_api import Numerics, Pass, PassContext, exact, lossy, register_pass
from ktgraph.passes.specialize_phases import Phase
from ktgraph.placement.graph import CPU
from ktgraph.placement.lanes import CROSSING, op_device

_RULE = "expert-deferral"
_EXPERTS = "moe.grouped_mlp"
_SUMS = ("tensor.add", "tensor.add3")
_NOT_ON_CPU = "its experts are not on the CPU"
LOSSY = "lossy"  # function attribute: the passes that changed what the function computes


@register_pass
@dataclass(frozen=True)
class ExpertDeferral(Pass):
    """Add a token's n lightest experts of the CPU one layer later, in decode."""

    name: ClassVar[str] = "expert-deferral"
    # Loose: up to 0.09 on miniatures, where a layer is a large part of the result.  Tests compare
    # the graph with a plain model of deferral.
    numerics: ClassVar[Numerics] = lossy(0.3)
    requires: ClassVar[Sequence[str]] = ("phased", "placed")

    n: int | None = None  # experts of a token that come later; none: the compile option `defer`
    phases: tuple[Phase, ...] = ("decode",)  # prefill too only to measure what it costs

    def numerics_for(self, module: Module) -> Numerics:
        """Exact when no function is deferred after the run."""
        return self.numerics if any(map(is_deferred, module.functions.values())) else exact()

    def run(self, module: Module, ctx: PassContext) -> None:
        count = ctx.options.defer if self.n is None else self.n
        if count < 0:
            raise UnsupportedInputError(f"expert-deferral: n={count}: expected 0 or more experts")
        if count == 0:
            return
        if ctx.options.exact:
            raise UnsupportedInputError(
                f"expert-deferral{{n={count}}}: the option exact=True refuses lossy steps; "
                "leave one out"
            )
        reasons: list[str] = []
        for func in module.functions.values():
            if func.attrs.get("phase") in self.phases and not is_deferred(func):
                _check_order(func)
                deferring = _Deferring(module, func, count, ctx)
                layers = deferring.run()
                what = f"{count} experts of a token come late in {layers} layers"
                ctx.note(f"@{func.name}: {what if layers else 'no layer has experts to defer'}")
                reasons += deferring.reasons
        if not any(map(is_deferred, module.functions.values())) and ctx.limit is None:
            warnings.warn(_nothing_deferred(count, reasons), DeferralWarning, stacklevel=2)


class DeferralWarning(UserWarning):
    """Deferral was asked for, and there is nothing to defer; the message says why."""


def _nothing_deferred(count: int, reasons: Sequence[str]) -> str:
    found = "; ".join(dict.fromkeys(reasons)) or "no layer that decodes has routed experts"
    advice = ""
    if _NOT_ON_CPU in reasons:
        advice = ". Less gpu_memory or a placement rule (device: cpu) puts experts there"
    return f"defer={count} changes nothing: {found}{advice}"


def is_deferred(func: Function) -> bool:
    """Whether the pass has changed the function."""
    return any(str(name).startswith(_RULE) for name in _lossy(func))


def _check_order(func: Function) -> None:
    if any(op.name in CROSSING for op in func.walk()):
        raise UnsupportedInputError(
            f"expert-deferral comes before insert-copies, and @{func.name} has its copies already: "
            "write default,expert-deferral{n=…}"
        )


# The groups of experts of one layer: ops that read the same rows, more than one where hot experts
# lie apart from the others.
_Layer = Sequence[Op]


@dataclass(frozen=True)
class _Site:
    """A repeat that holds layers of experts; without one, a single layer outside of repeats."""

    repeat: Op | None
    layers: Sequence[_Layer]

    @property
    def runs(self) -> int:
        """How often layers of it run."""
        return len(self.layers) * (_count(self.repeat) if self.repeat else 1)


class _Deferring:
    """One function.  `late` is always what the layer before hands on, where it does."""

    def __init__(self, module: Module, func: Function, count: int, ctx: PassContext) -> None:
        self.module = module
        self.func = func
        self.count = count
        self.ctx = ctx
        self.layers = 0  # that hand something on
        self.reasons: list[str] = []  # why layers hand nothing on

    def run(self) -> int:
        """Returns the number of layers whose experts are deferred."""
        late: Value | None = None
        sites = _sites(self.func.body)
        for number, site in enumerate(sites):
            hands_on = number + 1 < len(sites)
            defers = self._defers(site, hands_on)
            if site.repeat is None:
                late = self._chain(site.layers, late, hands_on and defers)
            else:
                late = self._repeat(site.repeat, late, hands_on, defers)
        if self.layers:
            self.func.attrs[LOSSY] = (*_lossy(self.func), f"{_RULE}{{n={self.count}}}")
        return self.layers

    def _defers(self, site: _Site, hands_on: bool) -> bool:
        """Whether a site has experts to defer, and a bisection lets it."""
        ends = site.runs == 1 and not hands_on
        reasons = ["no experts come behind it" if ends else self._refusal(x) for x in site.layers]
        for layer, reason in zip(site.layers, reasons, strict=True):
            if reason:
                self.reasons.append(reason)
                self.ctx.refused(_RULE, layer[0], reason)
        if all(reasons):
            return False
        return self.ctx.may_rewrite(_RULE, site.layers[reasons.index("")][0])

    def _refusal(self, layer: _Layer) -> str:
        """Why a layer's experts cannot be deferred; an empty string when they can."""
        found = self._on_cpu(layer)
        if not found:
            return _NOT_ON_CPU
        if len(found) > 1:
            return "it has several groups of experts on the CPU"
        top_k = _top_k(self.module, found[0])
        if self.count > top_k:
            raise UnsupportedInputError(
                f"expert-deferral: n={self.count}, but a token has {top_k} experts: "
                f"expected 0..{top_k}"
            )
        if self.count == top_k and _beside(found[0].result) is None:
            return "its result is not one term of a sum"
        return ""

    def _on_cpu(self, layer: _Layer) -> list[Op]:
        return [op for op in layer if op_device(self.module, op) == CPU]

    def _host(self, layer: _Layer) -> Op | None:
        """The layer's experts on the CPU; None where they cannot be deferred."""
        return None if self._refusal(layer) else self._on_cpu(layer)[0]

    # -- where layers stand -----------------------------------------------------------------------
    def _repeat(self, op: Op, late: Value | None, hands_on: bool, defers: bool) -> Value | None:
        several = _count(op) > 1
        if not (defers and self._host(_body_layers(op)[-1])):
            if late is not None and several:  # the first layer alone takes it
                first, op = split_repeat(self.func, op, op.int_attr("lo") + 1)
                late = self._body(first, late, False, defers)
            return self._body(op, late, False, defers)
        if hands_on:
            return self._carry(op, late)
        if several:
            op, last = split_repeat(self.func, op, op.int_attr("hi"))
            late, op = self._carry(op, late), last
        return self._body(op, late, False, defers)

    def _carry(self, op: Op, late: Value | None) -> Value:
        """Every layer of a repeat hands on to the next one, and the last to what comes behind.

        The first stands alone where nothing comes in: there is no value to begin with.
        """
        if late is None:
            several = _count(op) > 1
            first, rest = (
                split_repeat(self.func, op, op.int_attr("lo") + 1) if several else (op, None)
            )
            late = self._chain(_layers(inline_repeat(first)), None, True)
            assert late is not None
            if rest is None:
                return late
            op = rest
        assert op.body is not None
        before = op.body.add_arg(self.func.fresh_name(f"{late.name}.i"), late.type)
        op.set_operands([*op.operands, late])
        made = self._body(op, before, True, True)
        assert made is not None
        op.body.set_returns([*op.body.returns, made])
        op.results.append(Value(self.func.fresh_name(f"{made.name}.n"), made.type, op))
        return op.results[-1]

    def _body(self, op: Op, late: Value | None, hands_on: bool, defers: bool) -> Value | None:
        before = self.layers
        made = self._chain(_body_layers(op), late, hands_on, defers)
        self.layers += (self.layers - before) * (_count(op) - 1)
        return made

    def _chain(
        self, layers: Sequence[_Layer], late: Value | None, hands_on: bool, defers: bool = True
    ) -> Value | None:
        """Layers one after the other; the last hands something on only if `hands_on`."""
        for number, layer in enumerate(layers):
            late = self._layer(layer, late, defers and (hands_on or number + 1 < len(layers)))
        return late

    # -- one layer --------------------------------------------------------------------------------
    def _layer(self, layer: _Layer, late: Value | None, hands_on: bool) -> Value | None:
        host = self._host(layer) if hands_on else None
        routed = (host or layer[0]).result
        if host is None:
            if late is not None:
                self._add(routed, late)
            return None
        self.layers += 1
        if self.count == _top_k(self.module, host):
            self._replace(routed, late)
            return routed
        made = self._split(host)
        if late is not None:
            self._add(routed, late)
        return made

    def _split(self, host: Op) -> Value:
        """Leave the op its first experts, and give the last `count` to one of their own."""
        now: list[Value] = []
        later: list[Value] = []
        for value in self._by_weight(host):
            names = [self.func.fresh_name(f"{value.name}.{part}") for part in ("now", "later")]
            sizes = (value.tensor.dims[-1] - self.count, self.count)
            attrs, at = {"sizes": sizes}, value.type.device
            parts = build(self.module, "tensor.split", [value], names, attrs, device=at)
            self._insert(host, parts)
            now.append(parts.results[0])
            later.append(parts.results[1])
        rows, _, _, *weights = host.operands
        name = [self.func.fresh_name(f"{host.result.name}.late")]
        at = host.result.type.device
        made = build(self.module, _EXPERTS, [rows, *later, *weights], name, host.attrs, device=at)
        self._insert(host, made)
        host.set_operands([rows, *now, *weights])
        assert host.block is not None
        host.block.ops.remove(host)  # what is waited for is asked for first
        host.block.insert_before(made, host)
        return made.result

    def _by_weight(self, host: Op) -> Sequence[Value]:
        """Ids and weights by descending weight; a router that chooses with no bias has them so."""
        ids, weights = host.value(1), host.value(2)
        route = ids.producer
        if route is not None and route.name == "moe.split_ids":  # every choice keeps its place
            route = route.value(0).producer
        if route is not None and route.name == "moe.route" and route.operand(2) is None:
            return ids, weights
        names = [self.func.fresh_name(f"{v.name}.sorted") for v in (ids, weights)]
        at = ids.type.device
        found = build(self.module, "moe.by_weight", [ids, weights], names, device=at)
        self._insert(host, found)
        return found.results

    def _add(self, routed: Value, late: Value) -> None:
        """Add to what the layer's experts are added to: that sum need not wait for them."""
        users, beside = list(routed.users), _beside(routed)
        term = beside or routed
        names = [self.func.fresh_name(f"{term.name}.with_late")]
        total = build(self.module, "tensor.add", [term, late], names)
        maker = routed.producer
        assert maker is not None
        assert maker.block is not None
        ops, total.loc = maker.block.ops, maker.loc
        at = ops.index(maker) + 1 if beside is None else ops.index(users[0])
        maker.block.insert(at, total)
        for user in users:
            user.replace_operand(term, total.result)

    def _replace(self, routed: Value, late: Value | None) -> None:
        """Nothing of the layer's own is added; `_refusal` has looked at the user."""
        user = routed.users[0]
        if late is not None:
            user.replace_operand(routed, late)
            return
        rest = [v for v in user.values if v is not routed]
        if len(rest) > 1:
            names = [self.func.fresh_name(user.result.name)]
            total = build(self.module, "tensor.add", rest, names)
            self._insert(user, total)
            rest = total.results
        user.replace_by(rest)

    def _insert(self, anchor: Op, op: Op) -> None:
        op.loc = anchor.loc
        assert anchor.block is not None
        anchor.block.insert_before(anchor, op)


def _sites(body: Block) -> list[_Site]:
    """In order."""
    found: list[tuple[int, _Site]] = []
    place = {op: n for n, op in enumerate(body.ops)}
    found += [(place[layer[0]], _Site(None, [layer])) for layer in _layers(body.ops)]
    for op in (o for o in body.ops if o.body is not None):
        if layers := _body_layers(op):
            found.append((place[op], _Site(op, layers)))
    return [site for _, site in sorted(found, key=lambda item: item[0])]


def _body_layers(op: Op) -> list[_Layer]:
    assert op.body is not None
    return _layers(op.body.ops)


def _layers(ops: Sequence[Op]) -> list[_Layer]:
    """Groups of experts by the rows that they read, in order."""
    found: dict[Value, list[Op]] = {}
    for op in ops:
        if op.name == _EXPERTS:
            found.setdefault(op.value(0), []).append(op)
    return list(found.values())


def _count(repeat: Op) -> int:
    return repeat.int_attr("hi") - repeat.int_attr("lo") + 1


def _top_k(module: Module, host: Op) -> int:
    return host.value(1).tensor.dims[-1].at(module.dims)


def _beside(routed: Value) -> Value | None:
    """Another term of the sum that is the one user of the routed experts' result."""
    if len(routed.users) != 1 or routed.users[0].name not in _SUMS:
        return None
    terms = [v for v in routed.users[0].values if v is not routed]
    same = [v for v in terms if v.tensor.dims == routed.tensor.dims]
    return same[-1] if same else None


def _lossy(func: Function) -> tuple[Attr, ...]:
    found = func.attrs.get(LOSSY, ())
    assert isinstance(found, tuple)
    return found


__all__ = ["LOSSY", "DeferralWarning", "ExpertDeferral", "is_deferred"]
