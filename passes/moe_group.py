"""moe-group: a framework's experts call becomes `moe.grouped_mlp` on weights in one order.

The stacked weights of all experts stay one tensor per projection, [E, 2*F, D] with the gate rows
first and [E, D, F]; alternating rows (gpt-oss) are brought into order by an exact recipe.

Before:  %y = moe.experts %x, %ids, %wts, @gate_up, @down {interleaved = true}
After:   %y = moe.grouped_mlp %x, %ids, %wts, @w13, @down     @w13 = deinterleave(@gate_up)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ktgraph.ir.dims import Dim
from ktgraph.ir.graph import Module, Op, Operand, WeightRef
from ktgraph.ops import SignatureError, build
from ktgraph.pass_api import Numerics, Pass, PassContext, register_pass, reorder
from ktgraph.rewrite import derived_weight, reference

_RULE = "moe-group"
_ACTS = ("silu", "gelu", "gelu_tanh", "relu", "swiglu_clamped")


@register_pass
@dataclass(frozen=True)
class MoeGroup(Pass):
    """Turn experts calls into grouped MLPs, gate rows first."""

    name: ClassVar[str] = "moe-group"
    numerics: ClassVar[Numerics] = reorder()

    def run(self, module: Module, ctx: PassContext) -> None:
        for op in list(module.walk()):
            if op.name != "moe.experts":
                continue
            reason = _refusal(op)
            if reason:
                ctx.refused(_RULE, op, reason)
            elif ctx.may_rewrite(_RULE, op):
                _group(module, op)


def _refusal(op: Op) -> str:
    """Why the call must stay, or an empty string."""
    values = [n for n in range(3, 7) if op.operand(n) is not None and not _is_weight(op, n)]
    if values:
        return "the experts' weights are computed, not stored: only weights can be regrouped"
    if op.attrs.get("transposed"):
        return (
            "the weights are stored transposed: the frontend must undo it by a `transpose` recipe"
        )
    act = op.attrs.get("act", "silu")
    if act not in _ACTS:
        return f"no grouped kernel knows the activation {act!r} (known: {', '.join(_ACTS)})"
    return ""


def _is_weight(op: Op, position: int) -> bool:
    return isinstance(op.operand(position), WeightRef)


def _group(module: Module, op: Op) -> None:
    stored = [op.operand(n) for n in range(3, 7)]
    if op.attrs.get("interleaved"):
        stored[0] = _deinterleaved(module, stored[0], "w13", -2)
        stored[2] = _deinterleaved(module, stored[2], "b13", -1)
    kept = {k: v for k, v in op.attrs.items() if k != "interleaved"}
    operands = [*op.operands[:3], *stored]
    names = [r.name for r in op.results]
    device = op.result.type.device
    try:
        new = build(module, "moe.grouped_mlp", operands, names, kept, loc=op.loc, device=device)
    except SignatureError as error:
        raise SignatureError(f"{error}\n  in: {op}") from None
    assert op.block is not None
    op.block.insert_before(op, new)
    op.replace_by(new.results)


def _deinterleaved(module: Module, operand: Operand, leaf: str, axis: int) -> Operand:
    """The weight with gate entries before up entries along `axis`; None stays None."""
    if not isinstance(operand, WeightRef):
        return None
    attrs, type = {"axis": Dim.of(axis)}, module.weight_of(operand).type
    made = derived_weight(module, [operand], leaf, "deinterleave", type, attrs)
    if made.name not in module.weights:
        module.add_weight(made)
    return reference(made, [operand])


__all__ = ["MoeGroup"]
