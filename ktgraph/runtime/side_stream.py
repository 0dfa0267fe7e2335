"""Which ops of a GPU run beside the routed experts: dense MLPs that read what the experts read.

A shared expert and the routed experts of a layer need nothing of each other.  On one stream the
second waits for the first, though neither fills the memory system alone; so the dense MLP goes to a
stream of its own, from behind the op that makes its input to before the op that takes its result.
The arena keeps every value of that span alive to its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ktgraph.ir.types import TensorType
from ktgraph.runtime.flat import FlatFunction, FlatOp, Layouts

_BESIDE, _EXPERTS = "nn.swiglu", "moe.grouped_mlp"


@dataclass(frozen=True)
class Side:
    """The op at flat position `step` may run from behind `after` to before `before`."""

    step: int
    after: int
    before: int


def side_steps(flat: FlatFunction, layouts: Layouts, home: str) -> list[Side]:
    """Ops that leave the main stream; none without a GPU at home."""
    if home == "cpu":
        return []
    return list(_sides(flat, layouts, home))


def _sides(flat: FlatFunction, layouts: Layouts, home: str) -> Iterator[Side]:
    made, read = _uses(flat, layouts)
    end = -1
    for number, step in enumerate(flat.ops):
        if step.op.name != _BESIDE or _device(step, home) != home:
            continue
        if any(s.name in layouts.streamed for s in step.slots):
            continue  # the main stream waits for their copy, and says when it may be written over
        after = max((made.get(r, -1) for r in _roots(step, layouts, inputs=True)), default=-1)
        (result,) = _roots(step, layouts, inputs=False)
        before = min((n for n in read.get(result, []) if n > number), default=number)
        beside = range(max(after, 0), before)
        experts = [n for n in beside if flat.ops[n].op.name == _EXPERTS]
        if after >= end and any(_device(flat.ops[n], home) == home for n in experts):
            yield Side(number, after, before)
            end = before


def _uses(flat: FlatFunction, layouts: Layouts) -> tuple[dict[str, int], dict[str, list[int]]]:
    """By storage: the op that last wrote it so far, and the ops that read it."""
    made: dict[str, int] = {}
    read: dict[str, list[int]] = {}
    for number, step in enumerate(flat.ops):
        if number in layouts.aliases:
            continue
        for root in _roots(step, layouts, inputs=True):
            read.setdefault(root, []).append(number)
        made.update(dict.fromkeys(_roots(step, layouts, inputs=False), number))
    return made, read


def _roots(step: FlatOp, layouts: Layouts, *, inputs: bool) -> list[str]:
    slots = step.slots if inputs else step.results
    return [layouts.view(s).root.name for s in slots if isinstance(s.type, TensorType)]


def _device(step: FlatOp, home: str) -> str:
    return next((r.type.device for r in step.results), None) or home


__all__ = ["Side", "side_steps"]
