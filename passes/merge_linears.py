"""merge-linears: linears that read the same value become one, dense gated MLPs one op.

What: gate, up, activation, product and down of a dense MLP (or of the shared experts) become
`nn.swiglu` on w13 = concat(gate, up); other linears of one value (q, k, v; q_a, kv_a) become one
linear on the concatenated weights and a `tensor.split`, which is a view.

Why: a decode step reads each input once, and one large product beats several small ones.

Before:  %q = nn.linear %h, @q_proj … %k = nn.linear %h, @k_proj
After:   %q_k = nn.linear %h, @q_k_proj … %q, %k = tensor.split %q_k
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ktgraph.ir.dims import Dim
from ktgraph.ir.graph import Block, Module, Op, Value, Weight, WeightRef, drop_unused_weights
from ktgraph.ir.types import TensorType
from ktgraph.ops import Refusal, build, no
from ktgraph.pass_api import Numerics, Pass, PassContext, register_pass, reorder
from ktgraph.rewrite import Match, Rule, derived_weight, layer_prefix, reference, rewrite
from ktgraph.rewrite.cleanup import merge_splits


class GatedMlp(Rule):
    """Separate gate and up weights."""

    name = "gated-mlp"
    match = """
      %g = nn.linear %x, @gate
      %a = nn.act %g {act = $act}
      %u = nn.linear %x, @up
      %m = tensor.mul %a, %u
      %y = nn.linear %m, @down"""
    emit = "%y = nn.swiglu %x, @w13, @down {act = $act}"

    def check(self, m: Match) -> bool | Refusal:
        reason = _differ(m.module, [m.ref("@gate"), m.ref("@up")])
        return no(reason, m.op("%u")) if reason else _fits(m)

    def weights(self, m: Match) -> Mapping[str, Weight]:
        refs = [m.ref("@gate"), m.ref("@up")]
        return {"@w13": _concatenated(m.module, refs, "w13")}


class GatedMlpOfOne(Rule):
    """Gate and up in one weight already (Phi-3, GLM)."""

    name = "gated-mlp-of-one"
    match = """
      %gu    = nn.linear %x, @w13
      %g, %u = tensor.split %gu {sizes = [$m, $m]}
      %a     = nn.act %g {act = $act}
      %p     = tensor.mul %a, %u
      %y     = nn.linear %p, @down"""
    emit = "%y = nn.swiglu %x, @w13, @down {act = $act}"

    def check(self, m: Match) -> bool | Refusal:
        return _fits(m)


def _fits(m: Match) -> bool | Refusal:
    """nn.swiglu returns to the width of its input."""
    if m.dims("%x")[-1] == m.dims("%y")[-1]:
        return True
    return no(f"the MLP maps {m.dims('%x')[-1]} to {m.dims('%y')[-1]}; nn.swiglu keeps the width")


@register_pass
@dataclass(frozen=True)
class MergeLinears(Pass):
    """`min_users`: fewest linears of one value that are merged."""

    min_users: int = 2

    name: ClassVar[str] = "merge-linears"
    numerics: ClassVar[Numerics] = reorder()

    def run(self, module: Module, ctx: PassContext) -> None:
        rewrite(module, ctx, [GatedMlp(), GatedMlpOfOne()])
        for function in module.functions.values():
            for value in list(function.values()):
                for linears in _readers(value):
                    if len(linears) >= max(self.min_users, 2):
                        _merge(module, value, linears, ctx)
        merge_splits(module, ctx)
        drop_unused_weights(module)


def _readers(value: Value) -> Iterator[list[Op]]:
    """Linears of `value` with a stored weight, by block, in order."""
    blocks: dict[int, tuple[Block, list[Op]]] = {}
    for op in value.users:
        if (
            op.name == "nn.linear"
            and op.block is not None
            and op.operand(0) is value
            and op.weights
        ):
            blocks.setdefault(id(op.block), (op.block, []))[1].append(op)
    for block, ops in blocks.values():
        yield sorted(ops, key=block.ops.index)


def _merge(module: Module, value: Value, linears: list[Op], ctx: PassContext) -> None:
    reason = _why_not(module, linears)
    if reason:
        ctx.refused("merge-linears", linears[0], reason)
        return
    first, block = linears[0], linears[0].block
    assert block is not None
    if not ctx.may_rewrite("merge-linears", first):
        return
    joined = _joined(module, linears)
    function, device = module.function_of(first), first.result.type.device
    stem = layer_prefix(first.result.name) + joined[0].name.rpartition(".")[2]
    name = function.fresh_name(stem)
    one = build(module, "nn.linear", [value, *joined], [name], loc=first.loc, device=device)
    block.insert_before(first, one)
    sizes = tuple(op.result.tensor.dims[-1] for op in linears)
    names = [op.result.name for op in linears]
    attrs = {"sizes": sizes}
    views = build(module, "tensor.split", [one.result], names, attrs, loc=first.loc, device=device)
    block.insert_before(first, views)
    for old, new in zip(linears, views.results, strict=True):
        old.replace_by([new])


def _joined(module: Module, linears: Sequence[Op]) -> list[WeightRef]:
    """References to the concatenated weights and, if there are, biases; declared when new."""
    joined: list[WeightRef] = []
    for position in (1, 2):
        refs = [op.weight(position) for op in linears if op.operand(position) is not None]
        if not refs:
            continue
        weight = _concatenated(module, refs, *_joined_leaf([r.name for r in refs]))
        module.weights.setdefault(weight.name, weight)
        joined.append(reference(weight, refs))
    return joined


def _why_not(module: Module, linears: Sequence[Op]) -> str:
    """What keeps linears apart; empty when they can be one."""
    biased = [op for op in linears if op.operand(2) is not None]
    if biased and len(biased) < len(linears):
        return f"only {len(biased)} of {len(linears)} linears of %{_input(linears)} have a bias"
    if len({op.result.type.device for op in linears}) > 1:
        return f"the linears of %{_input(linears)} run on different devices"
    positions = (1, 2) if biased else (1,)
    reasons = (_differ(module, [op.weight(p) for op in linears]) for p in positions)
    return next((r for r in reasons if r), "")


def _input(linears: Sequence[Op]) -> str:
    return linears[0].value(0).name


def _differ(module: Module, refs: Sequence[WeightRef]) -> str:
    """Why weights cannot be concatenated: dtype, encoding, families; empty when they can."""
    first = _type(module, refs[0])
    for ref in refs[1:]:
        other = _type(module, ref)
        if (other.dtype, other.encoding) != (first.dtype, first.encoding):
            return f"{refs[0]} is {first}, {ref} is {other}: dtype or encoding differ"
        if (ref.index is None) != (refs[0].index is None):
            return f"{refs[0]} and {ref} are not both members of families"
    return ""


def _type(module: Module, ref: WeightRef) -> TensorType:
    return module.weight_of(ref).type


def _concatenated(
    module: Module, refs: Sequence[WeightRef], leaf: str, replaced: int = 1
) -> Weight:
    """The weights one after another along their first axis."""
    first = _type(module, refs[0])
    rows = Dim.of(0)
    for ref in refs:
        rows = rows + _type(module, ref).dims[0]
    type = first.with_dims(rows, *first.dims[1:])
    return derived_weight(module, refs, leaf, "concat", type, {"axis": 0}, replaced)


def _joined_leaf(names: Sequence[str]) -> tuple[str, int]:
    """The last components of weights' names as one, and how many of each name that stands for.

    ….q_proj, ….k_proj become q_k_proj; ….q_proj.bias, ….k_proj.bias become q_k_proj.bias.
    """
    parts = [name.split(".") for name in names]
    same = 0  # components that the names end with alike
    while min(map(len, parts)) > same + 1 and len({p[-1 - same] for p in parts}) == 1:
        same += 1
    tail = parts[0][len(parts[0]) - same :]
    return ".".join([_joined_name([p[-1 - same] for p in parts]), *tail]), same + 1


def _joined_name(names: Sequence[str]) -> str:
    """q_proj, k_proj, v_proj become q_k_v_proj; q_a_proj, kv_a_proj become q_kv_a_proj."""
    words = [name.split("_") for name in names]
    tail: list[str] = []
    while all(len(w) > 1 for w in words) and len({w[-1] for w in words}) == 1:
        tail.insert(0, words[0][-1])
        words = [w[:-1] for w in words]
    return "_".join(word for w in [*words, tail] for word in w)
