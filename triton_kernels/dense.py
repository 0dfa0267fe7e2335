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
    """Whether any has rows that do not begin on 16 bytes: such rows load element by element."""
    return any(m.data_ptr() % 16 or any(b % 16 for b in _row_bytes(m)) for m in matrices)


def _row_bytes(matrix: torch.Tensor) -> list[int]:
    steps = zip(matrix.shape[:-1], matrix.stride()[:-1], strict=True)
    return [step * matrix.element_size() for size, step in steps if size > 1]


__all__ = ["dense_weights", "in_kind", "unaligned"]
