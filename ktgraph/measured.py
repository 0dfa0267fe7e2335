"""A measured run of a compiled model, beside what the cost model predicted for the same calls."""

from __future__ import annotations

from collections.abc import Sequence

from ktgraph.analysis import CostAnalysis
from ktgraph.runtime.executor import TraceEvent
from ktgraph.runtime.runner import Runner
from ktgraph.timeline import Event, predicted_events

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


def _measured(phase: str, events: Sequence[TraceEvent]) -> list[Event]:
    return [
        Event(e.kernel, "op", f"{phase}, measured", "cpu", e.start, e.seconds, e.op) for e in events
    ]
