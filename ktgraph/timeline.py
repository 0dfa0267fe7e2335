"""Timelines, predicted and measured, in one form: Chrome's trace format, and a page with lanes.

write_chrome_trace(path, predicted_events("decode", cost.predicted))
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from ktgraph.ir.printer import print_op
from ktgraph.placement.lanes import CROSSING, FlatSchedule


@dataclass(frozen=True)
class Event:
    """Something that ran, or will run, on a lane: seconds from the start of its phase."""

    name: str  # the kernel, or the op where none was chosen
    category: str  # op, copy, native or reference
    phase: str  # the function
    lane: str  # a device, a stream of it, or a direction of a link
    start: float
    seconds: float
    op: str = ""  # the op's line in the IR
    value: str = ""  # its first result, with the layer: h[3]

    @property
    def end(self) -> float:
        return self.start + self.seconds


def predicted_events(phase: str, predicted: FlatSchedule) -> list[Event]:
    """An event for every op of a predicted run that takes time."""
    found: list[Event] = []
    for number, (step, task) in enumerate(
        zip(predicted.steps, predicted.schedule.tasks, strict=True)
    ):
        if task.seconds <= 0:
            continue
        name = step.op.via or step.op.name
        category = "copy" if step.op.name in CROSSING else "op"
        line = print_op(step.op).split("\n")[0]
        start = predicted.schedule.starts[number]
        found.append(
            Event(name, category, phase, task.lane, start, task.seconds, line, task.name[1:])
        )
    return found


def chrome_trace(events: Sequence[Event]) -> dict[str, Any]:
    """A process for each phase, a thread for each lane; times in microseconds."""
    phases = list(dict.fromkeys(e.phase for e in events))
    lanes = list(dict.fromkeys(e.lane for e in events))
    rows: list[dict[str, Any]] = []
    for pid, phase in enumerate(phases):
        rows.append(_name("process_name", pid, 0, phase))
        rows += [_name("thread_name", pid, tid, lane) for tid, lane in enumerate(lanes)]
    for event in events:
        rows.append(
            {
                "name": event.name,
                "cat": event.category,
                "ph": "X",
                "ts": event.start * 1e6,
                "dur": event.seconds * 1e6,
                "pid": phases.index(event.phase),
                "tid": lanes.index(event.lane),
                "args": {"op": event.op, "value": event.value},
            }
        )
    return {"displayTimeUnit": "ms", "traceEvents": rows}


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def write_chrome_trace(path: str | Path, events: Sequence[Event]) -> None:
    """Write a file that chrome://tracing and Perfetto open."""
    Path(path).write_text(json.dumps(chrome_trace(events)) + "\n", encoding="utf-8")


# -- shares ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Shares:
    """Seconds that the lanes of one phase work; `together`: at least two of them at once."""

    span: float  # from the first start to the last end
    busy: Mapping[str, float]
    together: float

    def idle(self, lane: str) -> float:
        """The share of the span in which a lane does nothing."""
        return 1.0 - self.busy[lane] / self.span if self.span else 0.0

    @property
    def overlap(self) -> float:
        """The share of the span in which at least two lanes work at once."""
        return self.together / self.span if self.span else 0.0

    def text(self) -> str:
        lanes = [
            f"{lane} works {seconds * 1e3:.4g} ms, idle {self.idle(lane):.0%}"
            for lane, seconds in self.busy.items()
        ]
        at_once = f"two or more at once {self.together * 1e3:.4g} ms, {self.overlap:.0%}"
        return "; ".join([*lanes, *([at_once] if len(lanes) > 1 else [])])


def lane_shares(events: Sequence[Event]) -> Shares:
    """Shares of one phase's lanes, in order of first use; what overlaps on a lane counts once."""
    by_lane: dict[str, list[Event]] = {}
    for event in events:
        by_lane.setdefault(event.lane, []).append(event)
    covered = {
        lane: _at_least([(e.start, e.end) for e in found], 1) for lane, found in by_lane.items()
    }
    busy = {lane: sum(end - start for start, end in c) for lane, c in covered.items()}
    stretches = [s for found in covered.values() for s in found]
    together = sum(end - start for start, end in _at_least(stretches, 2))
    begin = min((e.start for e in events), default=0.0)
    return Shares(max((e.end for e in events), default=0.0) - begin, busy, together)


def _at_least(stretches: Sequence[tuple[float, float]], count: int) -> list[tuple[float, float]]:
    """Where at least `count` stretches lie over each other."""
    edges = sorted([(s, 1) for s, _ in stretches] + [(e, -1) for _, e in stretches])
    found: list[tuple[float, float]] = []
    depth, since = 0, 0.0
    for at, change in edges:
        if depth < count <= depth + change:
            since = at
        elif depth + change < count <= depth:
            found.append((since, at))
        depth += change
    return found


# -- a page ----------------------------------------------------------------------------------------
_ROW, _LEFT, _WIDTH = 26, 130, 1200
_COLORS = {"cpu": "#d97706", "copy": "#9333ea", "gpu": "#2563eb"}
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 13px system-ui, sans-serif; margin: 16px; color: #111; background: #fff }}
.lanes {{ overflow-x: auto; border: 1px solid #ddd; margin-bottom: 20px }}
text {{ font-size: 11px }} rect:hover {{ stroke: #000; stroke-width: 1 }}
</style></head><body><h1>{title}</h1>
<p>Predicted or measured start and length of every op by lane; point at a bar for its line.
<label>Zoom <input id="zoom" type="range" min="1" max="40" value="1"></label></p>
{parts}
<script>
document.getElementById("zoom").oninput = function () {{
  for (const s of document.querySelectorAll("svg")) s.style.width = {width} * this.value + "px";
}};
</script></body></html>
"""


def lanes_html(title: str, events: Sequence[Event]) -> str:
    """A page that needs nothing else: one picture for each phase, a row for each lane."""
    phases = dict.fromkeys(e.phase for e in events)
    parts = [_phase_svg(p, [e for e in events if e.phase == p]) for p in phases]
    return _PAGE.format(title=escape(title), parts="\n".join(parts), width=_WIDTH)


def _phase_svg(phase: str, events: Sequence[Event]) -> str:
    lanes = list(dict.fromkeys(e.lane for e in events))
    shares = lane_shares(events)
    end = max(e.end for e in events)
    height = _ROW * len(lanes) + 4
    bars = [_bar(e, lanes.index(e.lane), end) for e in events]
    names = [
        f'<div style="height:{_ROW}px;line-height:{_ROW}px">{escape(lane)} '
        f"({1 - shares.idle(lane):.0%})</div>"
        for lane in lanes
    ]
    svg = (
        f'<svg viewBox="0 0 {_WIDTH} {height}" preserveAspectRatio="none" '
        f'style="width:{_WIDTH}px;height:{height}px">{"".join(bars)}</svg>'
    )
    return (
        f"<h2>@{escape(phase)}: {end * 1e3:.4g} ms</h2><p>{escape(shares.text())}</p>"
        f'<div style="display:flex"><div style="flex:0 0 {_LEFT}px">{"".join(names)}</div>'
        f'<div class="lanes" style="flex:1">{svg}</div></div>'
    )


def _shown(event: Event) -> str:
    """The event's first value: given, or read from the op's line."""
    return escape(f"%{event.value}" if event.value else event.op.split(" = ")[0].strip())


def _bar(event: Event, row: int, end: float) -> str:
    x, width = event.start / end * _WIDTH, max(event.seconds / end * _WIDTH, 0.02)
    kind = "copy" if event.category == "copy" else "cpu" if event.lane == "cpu" else "gpu"
    about = f"{event.seconds * 1e6:.4g} µs from {event.start * 1e6:.4g}\n{event.op}"
    return (
        f'<rect x="{x:.3f}" y="{row * _ROW + 3}" width="{width:.3f}" height="{_ROW - 6}" '
        f'fill="{_COLORS[kind]}" fill-opacity="0.8"><title>{_shown(event)}: '
        f"{escape(about)}</title></rect>"
    )


__all__ = [
    "Event",
    "Shares",
    "chrome_trace",
    "lane_shares",
    "lanes_html",
    "predicted_events",
    "write_chrome_trace",
]
