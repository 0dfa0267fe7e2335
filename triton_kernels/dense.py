# pyright: basic, reportCallIssue=false, reportOperatorIssue=false
"""Dense weights, plain rows of bf16, f16 or f32: what the dense kernels take, and how they load."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ktgraph.ir.graph import Module, Op
from ktgraph.ir.types import TensorType
from ktgraph.ops.registry import Refusal, no, operand_type
from ktgraph.triton_kernels.registry import Supports
from ktgraph.triton_kernels.rounding import rounded

_DENSE = ("bf16", "f16", "f32")


def dense_weights(*positions: int) -> Supports:
    """A `supports` that refuses an op whose operand at one of the positions is not dense."""

    def supports(op: Op, module: Module) -> bool | Refusal:
        for position in positions:
            found = op.operand(position)
            if found is None:
                continue
            type = operand_type(module, found)
            assert isinstance(type, TensorType)
            kind = type.encoding.name if type.encoding else type.dtype
            if kind not in _DENSE:
                return no(f"{found} is {type}; this kernel takes {', '.join(_DENSE)} rows", op)
        return True

    return supports


@triton.jit
def in_kind(weight, kind: tl.constexpr):
    """A loaded weight in the activations' dtype, as the references cast it."""
    if weight.dtype == kind:
        return weight
    else:
        return rounded(weight.to(tl.float32), kind)


def unaligned(*matrices: torch.Tensor) -> bool:
    """Whether a matrix has rows that do not all begin on 16 bytes: these load element by element."""
    return any(
        m.data_ptr() % 16 or any(s * m.element_size() % 16 for s in m.stride()[:-1])
        for m in matrices
    )


__all__ = ["dense_weights", "in_kind", "unaligned"]
