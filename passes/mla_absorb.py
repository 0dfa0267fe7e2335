"""mla-absorb: attend in latent space where that is cheaper (DeepSeek-V2, arXiv 2405.04434, 2.1).

The expanded form rebuilds every cached row's keys and values by kv_b: cheap per new token, dear per
cached row.  The absorbed form moves the query through the key half of kv_b and attends to the rows
themselves: decode reads each row once.  Chosen per phase, by the op table's costs at a typical
call.  kv_b is read as stored; both halves are exact recipes of it.

Before:  %o = mla.attend_expanded %q_nope, %q_pe, %kv, %batch, @kv_b
After:   %q_lat = nn.batched_linear %q_nope, @w_uk
         %o_lat = mla.attend %q_lat, %q_pe, %kv, %batch
         %o = nn.batched_linear %o_lat, @w_uv
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from ktgraph.cost import Call, OpCost, op_cost
from ktgraph.ir.dims import Dim
from ktgraph.ir.graph import Function, Module, Op, Recipe, Weight, WeightRef
from ktgraph.ops import Refusal, build, no
from ktgraph.pass_api import Numerics, Pass, PassContext, register_pass, reorder
from ktgraph.rewrite import Match, Rule, derived_weight, reference, rewrite
from ktgraph.weights.recipes import recipe_type

# Without a target: FLOP/s and bytes/s of a plain machine; only their ratio decides.
_NOMINAL = (1e12, 1e11)
_HALVES = ("mla_key_half", "mla_value_half")  # in the order of mla_join's arguments


@register_pass
@dataclass(frozen=True)
class MlaAbsorb(Pass):
    """Absorb kv_b into the query and the result, per phase, where the op table says it pays."""

    name: ClassVar[str] = "mla-absorb"
    numerics: ClassVar[Numerics] = reorder()
    requires: ClassVar[Sequence[str]] = ("flat", "phased")

    form: Literal["auto", "absorbed", "expanded"] = "auto"  # auto: the cheaper one per phase

    def run(self, module: Module, ctx: PassContext) -> None:
        rewrite(module, ctx, [_Absorb(self.form, ctx)])
        _take_stored_halves(module)


class _Absorb(Rule):
    name = "mla-absorb"
    match = "%o = mla.attend_expanded %q_nope, %q_pe, %kv, %batch, @kv_b {layer = $l, scale = $s}"
    emit = """
      %q_lat = nn.batched_linear %q_nope, @w_uk
      %o_lat = mla.attend %q_lat, %q_pe, %kv, %batch {layer = $l, scale = $s}
      %o = nn.batched_linear %o_lat, @w_uv"""

    def __init__(self, form: str, ctx: PassContext) -> None:
        super().__init__()
        self.form = form
        self.ctx = ctx

    def check(self, m: Match) -> bool | Refusal:
        if self.form != "auto":
            return self.form == "absorbed" or no("form = expanded was asked for")
        choice = _choose(m, self.weights(m), self.ctx)
        if choice.line not in self.ctx.notes:
            self.ctx.note(choice.line)
        return choice.is_absorbed or no(choice.line)

    def weights(self, m: Match) -> Mapping[str, Weight]:
        heads, nope, value = m.dims("%q_nope")[-2], m.dims("%q_nope")[-1], m.dims("%o")[-1]
        sizes = {"H": heads, "N": nope, "V": value}
        return {
            "@w_uk": _half(m, "w_uk", "mla_key_half", sizes),
            "@w_uv": _half(m, "w_uv", "mla_value_half", sizes),
        }


def _half(m: Match, leaf: str, kind: str, sizes: Mapping[str, Dim]) -> Weight:
    """A half of kv_b, e.g. @layers[i].w_uk, with the type that its recipe gives."""
    refs = [m.ref("@kv_b")]
    trial = derived_weight(m.module, refs, leaf, kind, m.weight("@kv_b").type, sizes)
    return derived_weight(m.module, refs, leaf, kind, recipe_type(m.module, trial), sizes)


def _take_stored_halves(module: Module) -> None:
    """A half of a kv_b that was joined from stored halves (GGUF) is the stored half itself."""
    for weight in module.weights.values():
        made = weight.recipe
        if made is None or made.kind not in _HALVES:
            continue
        (whole,) = made.args
        joined = module.weight_of(whole).recipe
        if joined is not None and joined.kind == "mla_join":
            half = joined.args[_HALVES.index(made.kind)]
            half = WeightRef(half.name, whole.index if half.index is not None else None)
            weight.recipe = Recipe("identity", (half,))
            weight.type = module.weight_of(half).type


@dataclass(frozen=True)
class _Choice:
    is_absorbed: bool
    line: str  # for the report: the decision with both costs


def _choose(m: Match, halves: Mapping[str, Weight], ctx: PassContext) -> _Choice:
    phase, call = _typical_call(m.function, ctx)
    expanded = [_cost(m.module, m.root, call)]
    absorbed = _absorbed_costs(m, halves, call)
    times = [_seconds(costs, ctx) for costs in (absorbed, expanded)]
    is_absorbed = times[0] < times[1]
    shown = "absorbed" if is_absorbed else "expanded"
    at = f"{call.tokens} new of {call.rows} rows"
    machine = ctx.target.name if ctx.target is not None else "a nominal 10 FLOP/byte machine"
    line = (
        f"@{m.function.name} ({phase}, {at}, on {machine}): {shown}; per layer absorbed "
        f"{_totals(absorbed, times[0])}, expanded {_totals(expanded, times[1])}"
    )
    return _Choice(is_absorbed, line)


def _typical_call(func: Function, ctx: PassContext) -> tuple[str, Call]:
    """Decode: one token at half the context.  Prefill: one full chunk from the start."""
    phase = str(func.attrs.get("phase", "any"))
    if phase == "decode":
        return phase, Call.decode(max(ctx.options.context // 2 - 1, 0))
    return phase, Call.prefill(min(ctx.options.max_tokens, ctx.options.context))


def _absorbed_costs(m: Match, halves: Mapping[str, Weight], call: Call) -> list[OpCost]:
    """Costs of the three ops, built apart from any block on weights declared for the moment."""
    module, root = m.module, m.root
    new = [w for w in halves.values() if w.name not in module.weights]
    for weight in new:
        module.add_weight(weight)
    key, value = (reference(w, [m.ref("@kv_b")]) for w in halves.values())
    attrs = {"layer": m.attr("$l"), "scale": m.attr("$s")}
    q_lat = build(module, "nn.batched_linear", [m.value("%q_nope"), key], ["q_lat"])
    middle = [q_lat.result, m.value("%q_pe"), m.value("%kv"), m.value("%batch")]
    attend = build(module, "mla.attend", middle, ["o_lat"], attrs, device=root.result.type.device)
    back = build(module, "nn.batched_linear", [attend.result, value], ["o"])
    costs = [_cost(module, op, call) for op in (q_lat, attend, back)]
    for op in (back, attend, q_lat):
        op.erase()
    for weight in new:
        del module.weights[weight.name]
    return costs


def _cost(module: Module, op: Op, call: Call) -> OpCost:
    return op_cost(module, op, call, call.bindings(module))


def _seconds(costs: Sequence[OpCost], ctx: PassContext) -> float:
    """Roofline time; without a target by the nominal machine."""
    if ctx.target is not None:
        home = ctx.target.home
        return sum(c.seconds(ctx.target, home) for c in costs)
    return sum(max(c.flops / _NOMINAL[0], (c.read + c.written) / _NOMINAL[1]) for c in costs)


def _totals(costs: Sequence[OpCost], seconds: float) -> str:
    flops, moved = sum(c.flops for c in costs), sum(c.read + c.written for c in costs)
    return f"{flops / 1e6:.4g} MFLOP and {moved / 1e6:.4g} MB ({seconds * 1e6:.4g} µs)"


__all__ = ["MlaAbsorb"]
