"""A measured run of a compiled model, beside what the cost model predicted for the same calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ktgraph.analysis import CostAnalysis
from ktgraph.cost import Call
from ktgraph.ir.graph import Module
from ktgraph.placement.graph import CPU
from ktgraph.placement.lanes import OpTimes, flat_tasks
from ktgraph.placement.schedule import in_order
from ktgraph.runtime.executor import TraceEvent
from ktgraph.runtime.flat import flatten
from ktgraph.runtime.gpu.device import Model, Span
from ktgraph.runtime.kernels_gpu import CROSSINGS, STREAM_WEIGHTS
from ktgraph.runtime.runner import Runner
from ktgraph.target import Target
from ktgraph.timeline import Event, predicted_events

_CROSSINGS = frozenset({*CROSSINGS.values(), STREAM_WEIGHTS})
_WARM_UP = 3  # decode steps before the one that counts


def timeline_events(runner: Runner, cost: CostAnalysis, tokens: int) -> list[Event]:
    """A prefill of `tokens` tokens, then a decode step: measured, and predicted.

    Prefill runs twice and the second counts, so that neither page faults nor cold caches show.
    """
    seq = runner.open()
    try:
        prompt = [n % runner.vocabulary for n in range(tokens)]
        runner.forward([(seq, prompt)])
        runner.truncate(seq, 0)
        prefill = runner.measure([(seq, prompt)])
        for _ in range(_WARM_UP):
            runner.forward([(seq, [0])])
        decode = runner.measure([(seq, [0])])
        rows = runner.length(seq)
    finally:
        runner.close(seq)
    return [
        *_measured("prefill", prefill),
        *predicted_events("prefill, predicted", cost.at(T=tokens).predicted),
        *_measured("decode", decode),
        *predicted_events("decode, predicted", cost.at(T=1, S=rows).predicted),
    ]


def cost_model(module: Module, target: Target) -> Model:
    """Times of a simulated GPU: the cost model's, with the CPU's ops as long as they took."""

    def spans(
        phase: str, new: Sequence[int], past: Sequence[int], measured: Mapping[int, float]
    ) -> list[Span]:
        flat = flatten(module, module.functions[phase])
        times = OpTimes(module, target, Call(tuple(new), tuple(past)))
        tasks = [
            replace(t, seconds=measured.get(n, 0.0)) if t.lane == CPU or n in measured else t
            for n, t in enumerate(flat_tasks(module, flat, times))
        ]
        schedule = in_order(tasks)
        return [(begin, schedule.end(n)) for n, begin in enumerate(schedule.starts)]

    return spans


def _measured(phase: str, events: Sequence[TraceEvent]) -> list[Event]:
    return [
        Event(e.kernel, _category(e), f"{phase}, measured", e.lane, e.start, e.seconds, e.op)
        for e in events
    ]


def _category(event: TraceEvent) -> str:
    return "copy" if event.kernel in _CROSSINGS else "op"


__all__ = ["cost_model", "timeline_events"]
