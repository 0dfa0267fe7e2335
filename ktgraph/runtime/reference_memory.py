"""What an op on its torch reference allocates while it runs: bounds, from types alone.

References compute in float32 and keep nothing between calls.  Most hold their operands and results
a few times; attention holds a sequence's scores and its keys and values by head, experts a row for
every choice.  `tests/runtime/test_reference_memory.py` measures every op that has cases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ktgraph.ir.types import StateType, TensorType, Type
from ktgraph.placement.graph import EXPERTS
from ktgraph.runtime.arena import slot_nbytes
from ktgraph.runtime.flat import FlatWeight
from ktgraph.runtime.operands import Instruction
from ktgraph.runtime.plan import PhasePlan, Plan

_F32 = 4
_OPERANDS, _RESULTS = 2, 3  # times that a reference holds them, in float32
_BETWEEN = {"nn.swiglu": 1, "moe.route": 1}  # op -> the weight whose rows are in between


def fallback_nbytes(plan: Plan, rows: int) -> int:
    """Most bytes that one fallback of any phase takes; `rows` is the longest sequence's."""
    found = [_instruction(plan, p, i, rows) for p in plan.phases for i in p.fallbacks]
    return max(found, default=0)


def _instruction(plan: Plan, phase: PhasePlan, item: Instruction, rows: int) -> int:
    step = phase.step(item)
    sizes = {**phase.arena.sizes.bindings(plan.module), "S": rows}
    given: list[Type | None] = []
    copied = 0  # to the host and back, of an op of the GPU; its cache as a whole
    for operand in step.operands:
        if operand is None or isinstance(operand, FlatWeight):
            given.append(None if operand is None else plan.module.weight_of(operand.ref).type)
            continue
        given.append(operand.type)
        if item.on_gpu and isinstance(operand.type, TensorType):
            copied += slot_nbytes(operand, sizes)
    results = [r.type for r in step.results]
    weights = [isinstance(o, FlatWeight) for o in step.operands]
    return copied + reference_nbytes(step.op.name, given, weights, results, sizes)


def reference_nbytes(
    name: str,
    operands: Sequence[Type | None],
    weights: Sequence[bool],
    results: Sequence[Type],
    sizes: Mapping[str, int],
) -> int:
    """Bytes that a call of an op's reference allocates at the sizes; S: rows of one sequence.

    weights: which operands are weights, that it only reads.
    """
    values = [t for t, is_weight in zip(operands, weights, strict=True) if not is_weight]
    total = _OPERANDS * sum(_count(t, sizes) for t in values)
    total += _RESULTS * sum(_count(t, sizes) for t in results)
    if name in _BETWEEN:
        total += 4 * _tokens(operands[0], sizes) * _rows(operands[_BETWEEN[name]], sizes)
    if name in EXPERTS:
        total += _experts(operands, sizes)
    elif any(isinstance(t, StateType) for t in values) and results:
        total += _attention(values, results, sizes)
    return _F32 * total


def _count(type: Type | None, sizes: Mapping[str, int]) -> int:
    if not isinstance(type, TensorType):
        return 0
    count = 1
    for dim in type.dims:
        count *= dim.at(sizes)
    return count


def _tokens(x: Type | None, sizes: Mapping[str, int]) -> int:
    assert isinstance(x, TensorType)
    return max(_count(x, sizes) // x.dims[-1].at(sizes), 1)


def _rows(matrix: Type | None, sizes: Mapping[str, int]) -> int:
    return matrix.dims[-2].at(sizes) if isinstance(matrix, TensorType) else 0


def _experts(operands: Sequence[Type | None], sizes: Mapping[str, int]) -> int:
    """A result for every choice; of one expert, which all tokens may choose, its hidden rows."""
    x, ids, hidden = operands[0], operands[1], _rows(operands[3], sizes)
    tokens = _tokens(x, sizes)
    width = _count(x, sizes) // tokens
    return _count(ids, sizes) * width * 2 + tokens * (3 * width + 4 * hidden)


def _attention(
    values: Sequence[Type | None], results: Sequence[Type], sizes: Mapping[str, int]
) -> int:
    """Scores [H, T, S] as they are made, masked, in float32 and as weights; rows by head."""
    q = next((t for t in values if isinstance(t, TensorType) and t.rank > 2), None)
    out = next((t for t in results if isinstance(t, TensorType) and t.rank > 2), None)
    if q is None or out is None:
        return 0
    heads, rows = q.dims[-2].at(sizes), sizes["S"]
    tokens = _count(q, sizes) // (heads * q.dims[-1].at(sizes))
    columns = sum(
        t.dims[-1].at(sizes) for t in (*values, out) if isinstance(t, TensorType) and t.rank > 2
    )
    return 4 * heads * tokens * rows + 4 * heads * rows * columns


__all__ = ["fallback_nbytes", "reference_nbytes"]
