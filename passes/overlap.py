"""overlap: order ops so that devices work at the same time, and give copies streams.

Each block is list-scheduled with a lane for every device and direction of a link: of the ops that
are ready, the one with the longest chain behind it goes first, so the host's experts start before
the shared expert.  An order is kept unless the new one is predicted to be faster.  Copies that run
beside other work get a stream of their own: 1 for streamed weights, 2 for values.

Before:  %shared = nn.swiglu %h, @w13, @w2            After:  %h.cpu, … = xfer.post %h, …
         %h.cpu, … = xfer.post %h, …                          %routed = moe.grouped_mlp %h.cpu, …
         %routed = moe.grouped_mlp %h.cpu, …                  %shared = nn.swiglu %h, @w13, @w2
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from ktgraph.ir.graph import Block, Function, Module, Op, Value, attr
from ktgraph.ir.types import StateType
from ktgraph.pass_api import Numerics, Pass, PassContext, exact, register_pass
from ktgraph.placement.decide import phase_call
from ktgraph.placement.decision import Settings
from ktgraph.placement.lanes import CROSSING, OpTimes, op_lane
from ktgraph.placement.report import aligned
from ktgraph.placement.schedule import Schedule, Task, in_order, list_schedule

VALUE_STREAM = 2  # the stream of `xfer.copy` on which values cross beside other work
_RULE = "overlap"
_GAIN = 1e-3  # share of a block's time that a new order must save


@register_pass
@dataclass(frozen=True)
class Overlap(Pass):
    """Start what other devices wait for first."""

    name: ClassVar[str] = "overlap"
    numerics: ClassVar[Numerics] = exact()
    requires: ClassVar[Sequence[str]] = ("copied",)

    def run(self, module: Module, ctx: PassContext) -> None:
        if ctx.target is None or not module.devices:
            return
        lines: list[str] = []
        for func in module.functions.values():
            call = phase_call(func, Settings(ctx.options, context=ctx.options.context))
            times = OpTimes(module, ctx.target, call)
            for place, block in _blocks(func):
                for ops in _chunks(block):
                    lines += _overlap(module, ctx, times, f"@{func.name} {place}", block, ops)
        if lines:
            ctx.artifacts["overlap.txt"] = "\n".join(lines) + "\n"
        _write_predictions(module, ctx)


def _blocks(func: Function) -> Iterator[tuple[str, Block]]:
    yield "outside repeats", func.body
    for op in func.walk():
        if op.body is not None:
            yield f"layers {op.attrs['lo']}..{op.attrs['hi']}", op.body


def _chunks(block: Block) -> Iterator[list[Op]]:
    """Ops between repeats: nothing moves across one."""
    chunk: list[Op] = []
    for op in [*block.ops, None]:
        if op is not None and op.body is None:
            chunk.append(op)
            continue
        if len(chunk) > 1:
            yield chunk
        chunk = []


@dataclass
class _Order:
    """The tasks of a chunk, in its present order."""

    tasks: list[Task] = field(default_factory=list[Task])
    made: dict[Value, int] = field(default_factory=dict[Value, int])
    readers: dict[Value, list[int]] = field(default_factory=dict[Value, "list[int]"])

    def add(self, op: Op, lane: str, seconds: float) -> None:
        """An op waits for its operands, and for earlier readers of a state that it takes over."""
        number = len(self.tasks)
        after = [self.made[v] for v in op.values if v in self.made]
        takes = any(isinstance(r.type, StateType) for r in op.results)
        for value in op.values:
            if isinstance(value.type, StateType):
                after += self.readers.get(value, []) if takes else []
                self.readers.setdefault(value, []).append(number)
        self.made.update({r: number for r in op.results})
        name = f"%{op.results[0].name}" if op.results else op.name
        self.tasks.append(Task(name, lane, seconds, tuple(dict.fromkeys(after))))


def _overlap(
    module: Module, ctx: PassContext, times: OpTimes, where: str, block: Block, ops: list[Op]
) -> list[str]:
    """Reorder a chunk where that helps; returns the lines of the report."""
    order = _Order()
    for op in ops:
        order.add(op, op_lane(module, op), times.seconds(op))
    now = in_order(order.tasks)
    if len(now.lanes) < 2:
        return []
    new = list_schedule(order.tasks)
    before = now.makespan
    if new.makespan < before * (1 - _GAIN) and ctx.may_rewrite(_RULE, ops[0]):
        places = [new.order.index(n) for n in range(len(ops))]
        _reorder(block, ops, new.order)
        now = _again(order.tasks, new.order, places)
        ops = [ops[n] for n in new.order]
    _set_streams(ops, now)
    return _lines(ctx, where, now, before)


def _reorder(block: Block, ops: Sequence[Op], order: Sequence[int]) -> None:
    first = block.ops.index(ops[0])
    block.ops[first : first + len(ops)] = [ops[n] for n in order]


def _again(tasks: Sequence[Task], order: Sequence[int], places: Sequence[int]) -> Schedule:
    """The schedule of the ops in their new order."""
    moved = [
        Task(t.name, t.lane, t.seconds, tuple(places[n] for n in t.after))
        for t in (tasks[n] for n in order)
    ]
    return in_order(moved)


def _set_streams(ops: Sequence[Op], schedule: Schedule) -> None:
    """Copies of values beside which something else runs leave the main stream."""
    for number, op in enumerate(ops):
        if op.name != "xfer.copy" or not op.values:
            continue
        start, end = schedule.starts[number], schedule.end(number)
        beside = any(
            task.seconds > 0 and schedule.starts[n] < end and schedule.end(n) > start
            for n, task in enumerate(schedule.tasks)
            if n != number and ops[n].name not in CROSSING
        )
        op.attrs.pop("stream", None)
        if beside:
            op.attrs["stream"] = attr(VALUE_STREAM)


def _lines(ctx: PassContext, where: str, schedule: Schedule, before: float) -> list[str]:
    total = sum(t.seconds for t in schedule.tasks)
    busy = ", ".join(f"{lane} {schedule.busy(lane) * 1e6:.4g}" for lane in schedule.lanes)
    saved = total - schedule.makespan
    head = (
        f"{where}: {schedule.makespan * 1e6:.4g} µs ({before * 1e6:.4g} in the order before); "
        f"busy {busy}; overlap saves {saved * 1e6:.4g}"
    )
    ctx.note(head)
    rows = [("start µs", "end µs", "lane", "value")]
    rows += [
        (f"{schedule.starts[n] * 1e6:.4g}", f"{schedule.end(n) * 1e6:.4g}", t.lane, t.name)
        for n, t in enumerate(schedule.tasks)
        if t.seconds > 0
    ]
    return [head, *aligned(rows, (0, 1), "  "), ""]


def _write_predictions(module: Module, ctx: PassContext) -> None:
    """Costs and the predicted timeline of the module as it now is."""
    from ktgraph.analysis import CallCost
    from ktgraph.timeline import lanes_html, predicted_events

    assert ctx.target is not None
    settings = Settings(ctx.options, context=ctx.options.context)
    costs = [
        CallCost(module, func, ctx.target, phase_call(func, settings))
        for func in module.functions.values()
    ]
    ctx.artifacts["cost.txt"] = "\n\n".join(c.table() for c in costs) + "\n"
    events = [e for c in costs for e in predicted_events(c.func.name, c.predicted)]
    ctx.artifacts["timeline.html"] = lanes_html(f"{module.name} on {ctx.target.name}", events)


__all__ = ["VALUE_STREAM", "Overlap"]
