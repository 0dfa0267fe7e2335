"""dequantize: dense values for weights in an encoding that no kernel of their device reads.

A quantized checkpoint keeps its own bits where a kernel computes from them.  Elsewhere (fp8 or
mxfp4 on a GPU, an embedding in GGUF blocks, a GGUF format without tiles) the values are made dense
in the compute dtype, once, at load: a recipe in the text and a line in the report, never silently.

Before:  %y = nn.linear %x, @q_proj : bf16[T, H*A]@cuda:0          @q_proj : bf16[H*A, D]<fp8>
After:   %y = nn.linear %x, @q_proj.dq : bf16[T, H*A]@cuda:0
         weight @q_proj.dq : bf16[H*A, D] = dequantize(@q_proj)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ktgraph.ir.graph import Module, Op, Value, Weight, WeightRef
from ktgraph.pass_api import Numerics, Pass, PassContext, exact, register_pass
from ktgraph.rewrite import derived_weight, reference
from ktgraph.runtime.weight_forms import device_of, is_cpu, kernel_reads
from ktgraph.weights.encodings import nbytes

_COPY = "xfer.copy"
_SHOWN = 6  # lines of the report; the rest is counted


@register_pass
@dataclass(frozen=True)
class Dequantize(Pass):
    """Give ops dense values of what their kernels cannot read."""

    name: ClassVar[str] = "dequantize"
    numerics: ClassVar[Numerics] = exact()
    required: ClassVar[bool] = True

    def run(self, module: Module, ctx: PassContext) -> None:
        lines: dict[str, str] = {}
        for op in module.walk():
            for position, operand in enumerate(op.operands):
                if isinstance(operand, WeightRef):
                    reader = next(_readers(module, op, position, operand), None)
                    if reader is not None:
                        lines[operand.name] = _dequantize(module, op, position, operand, reader)
        for line in list(lines.values())[:_SHOWN]:
            ctx.note(line)
        if len(lines) > _SHOWN:
            ctx.note(f"and {len(lines) - _SHOWN} more, see the weights called .dq in the text")


def _readers(module: Module, op: Op, position: int, ref: WeightRef) -> Iterator[str]:
    """Ops that must read the weight but cannot, as a phrase each."""
    encoding = module.weight_of(ref).type.encoding
    if encoding is None:
        return
    users = _users(op, position) if op.name == _COPY else [(op, position)]
    for user, at in users:
        device = device_of(module, user)
        if not kernel_reads(user.name, at, encoding, on_cpu=is_cpu(device)):
            yield f"{user.name} on {device} does not compute from {encoding.name}"


def _users(copy: Op, position: int) -> Iterator[tuple[Op, int]]:
    """Who reads a copied weight."""
    result: Value = copy.results[position]
    for user in dict.fromkeys(result.users):
        for at, operand in enumerate(user.operands):
            if operand is result:
                yield user, at


def _dequantize(module: Module, op: Op, position: int, ref: WeightRef, why: str) -> str:
    """Let the op read the dense twin; returns the line of the report."""
    before = module.weight_of(ref).type
    leaf = ref.name.rpartition(".")[2] + ".dq"
    made = derived_weight(module, [ref], leaf, "dequantize", before.encoded(None))
    if made.name not in module.weights:
        module.add_weight(made)
    op.set_operand(position, reference(made, [ref]))
    if op.name == _COPY:
        op.results[position].type = made.type.on(op.results[position].type.device)
    return _line(module, module.weights[made.name], ref, why)


def _line(module: Module, made: Weight, ref: WeightRef, why: str) -> str:
    members = made.members
    before = nbytes(module.weight_of(ref).type, module.dims) * members
    after = nbytes(made.type, module.dims) * members
    return (
        f"@{ref.name} becomes {made.type.dtype} ({before / 1e6:.4g} MB -> {after / 1e6:.4g} MB): "
        f"{why}"
    )


__all__ = ["Dequantize"]
