"""dequantize: dense values for weights in an encoding that no kernel of their device reads.

A quantized checkpoint keeps its own bits where a kernel computes from them.  Elsewhere (int4z or
mxfp4 on a GPU, an embedding in GGUF blocks, a GGUF format without tiles) the values are made dense
in the compute dtype, once, at load: a recipe in the text and a line in the report, never silently.

Before:  %y = nn.linear %x, @q_proj : bf16[T, H*A]@cuda:0          @q_proj : bf16[H*A, D]<int4z>
After:   %y = nn.linear %x, @q_proj.dq : bf16[T, H*A]@cuda:0
         weight @q_proj.dq : bf16[H*A, D] = dequantize(@q_proj)

A GPU's halves of a quantized kv_b are made from its dense twin, of which they are views
(`runtime/weight_views.py`): weight @w_uv : bf16[H, V, R] = mla_value_half(@kv_b_proj.dq).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from ktgraph.ir.graph import Module, Op, Value, Weight, WeightRef
from ktgraph.pass_api import Numerics, Pass, PassContext, exact, register_pass
from ktgraph.rewrite import derived_weight, reference
from ktgraph.runtime.weight_forms import device_of, is_cpu, kernel_reads
from ktgraph.runtime.weight_views import VIEWS
from ktgraph.weights.encodings import Encoding, nbytes
from ktgraph.weights.stored_rows import has_rows

_COPY = "xfer.copy"
_SHOWN = 4  # names in a line of the report; the rest is counted


@register_pass
@dataclass(frozen=True)
class Dequantize(Pass):
    """Give ops dense values of what their kernels cannot read."""

    name: ClassVar[str] = "dequantize"
    numerics: ClassVar[Numerics] = exact()
    required: ClassVar[bool] = True

    def run(self, module: Module, ctx: PassContext) -> None:
        made = _below_views(module)
        for op in module.walk():
            for position, operand in enumerate(op.operands):
                if not isinstance(operand, WeightRef):
                    continue
                reason = next(_reasons(module, op, position, operand), None)
                if reason is not None:
                    dense = _dequantize(module, op, position, operand)
                    made.setdefault(reason, {})[operand.name] = dense
        for reason, weights in made.items():
            ctx.note(_line(module, reason, weights))


@dataclass(frozen=True)
class _Reason:
    """Why weights are made dense: no kernel computes from the encoding there."""

    encoding: Encoding
    device: str


def _below_views(module: Module) -> dict[_Reason, dict[str, Weight]]:
    """Make halves on a GPU of what is dense; returns the dense twins by the names of the wholes."""
    made: dict[_Reason, dict[str, Weight]] = {}
    for op in module.walk():
        device = device_of(module, op)
        for ref in () if is_cpu(device) else op.weights:
            half = module.weight_of(ref)
            if half.recipe is None or half.recipe.kind not in VIEWS:
                continue
            (whole,) = half.recipe.args
            encoding = module.weight_of(whole).type.encoding
            if encoding is not None and has_rows(encoding):
                dense = _dense_twin(module, whole)
                half.recipe = replace(half.recipe, args=(WeightRef(dense.name, whole.index),))
                half.type = half.type.encoded(None)
                made.setdefault(_Reason(encoding, device), {})[whole.name] = dense
    return made


def _reasons(module: Module, op: Op, position: int, ref: WeightRef) -> Iterator[_Reason]:
    """Why the op, or one that reads its copy, cannot read the weight."""
    encoding = module.weight_of(ref).type.encoding
    if encoding is None:
        return
    users = _users(op, position) if op.name == _COPY else [(op, position)]
    for user, at in users:
        device = device_of(module, user)
        if not kernel_reads(user.name, at, encoding, on_cpu=is_cpu(device)):
            yield _Reason(encoding, device)


def _users(copy: Op, position: int) -> Iterator[tuple[Op, int]]:
    """Who reads a copied weight."""
    result: Value = copy.results[position]
    for user in dict.fromkeys(result.users):
        for at, operand in enumerate(user.operands):
            if operand is result:
                yield user, at


def _dequantize(module: Module, op: Op, position: int, ref: WeightRef) -> Weight:
    """Let the op read the dense twin."""
    made = _dense_twin(module, ref)
    op.set_operand(position, reference(made, [ref]))
    if op.name == _COPY:
        op.results[position].type = made.type.on(op.results[position].type.device)
    return made


def _dense_twin(module: Module, ref: WeightRef) -> Weight:
    leaf = ref.name.rpartition(".")[2] + ".dq"
    dense = module.weight_of(ref).type.encoded(None)
    made = derived_weight(module, [ref], leaf, "dequantize", dense)
    if made.name not in module.weights:
        module.add_weight(made)
    return module.weights[made.name]


def _line(module: Module, reason: _Reason, weights: Mapping[str, Weight]) -> str:
    before = sum(
        nbytes(module.weights[n].type, module.dims) * w.members for n, w in weights.items()
    )
    after = sum(nbytes(w.type, module.dims) * w.members for w in weights.values())
    dtypes = "/".join(dict.fromkeys(w.type.dtype for w in weights.values()))
    names = [f"@{name}" for name in weights]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (
        f"no kernel on {reason.device} computes from {reason.encoding} in {len(names)} weight(s): "
        f"made {dtypes}, {before / 1e6:.4g} MB -> {after / 1e6:.4g} MB: "
        f"{', '.join(names[:_SHOWN])}{more}"
    )


__all__ = ["Dequantize"]
