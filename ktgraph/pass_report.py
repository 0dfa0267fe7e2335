"""What a pass manager reports: one record per pass, and questions one can ask afterwards."""

from __future__ import annotations

import difflib
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.table import Table

from ktgraph.ir.dims import Dim
from ktgraph.ir.graph import Module
from ktgraph.ir.parser import parse_dim, parse_module
from ktgraph.pass_api import Numerics, RuleEvent

COLUMNS = (
    "#", "pass", "changed", "matched/refused", "ops", "ms", "verify ms", "max error", "numerics",
)  # fmt: skip


class UnknownStepError(KeyError):
    """No pass of that name ran; the message lists those that did."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class PassRecord:
    """One pass that ran.  Times are in milliseconds; `error` is the NMSE on the miniature."""

    number: int  # place in the whole pipeline, from 1
    name: str
    step: str  # name{options}
    changed: bool  # by structural hash
    ops_before: int
    ops_after: int
    ms: float
    verify_ms: float
    numerics: Numerics
    events: tuple[RuleEvent, ...] = ()
    notes: tuple[str, ...] = ()
    text: str | None = None  # the module after a pass that changed it
    error: float | None = None  # None: not validated, `how` says why
    how: str = ""
    validate_ms: float = 0.0

    def count(self, outcome: str) -> int:
        """Events with that outcome: matched, refused, partial."""
        return sum(e.outcome == outcome for e in self.events)

    def cells(self) -> tuple[str, ...]:
        """The row of the table, in the order of COLUMNS."""
        ops = str(self.ops_after)
        if self.ops_before != self.ops_after:
            ops = f"{self.ops_before} → {self.ops_after}"
        error = "" if self.error is None else f"{self.error:.1e}" if self.error else "0"
        return (
            str(self.number), self.step, "yes" if self.changed else "",
            f"{self.count('matched')}/{self.count('refused')}", ops,
            f"{self.ms:.1f}", f"{self.verify_ms:.1f}", error, str(self.numerics),
        )  # fmt: skip


@dataclass
class PassReport:
    """All records of a run; `print(report)` is the table."""

    module: Module  # as the last pass left it
    before: str  # text of the module that the first pass got
    records: list[PassRecord] = field(default_factory=list[PassRecord])
    folder: str | None = None  # the dump folder

    def text_after(self, name: str) -> str:
        """The module's text after a pass (the last one of that name)."""
        return self._texts()[self._place(name) + 1]

    def ir_after(self, name: str) -> Module:
        """The module after a pass; raises UnknownStepError."""
        return parse_module(self.text_after(name), f"<after {name}>")

    def diff(self, name: str, context: int = 2) -> str:
        """Unified diff of the module's text across a pass; empty when nothing changed."""
        place, texts = self._place(name), self._texts()
        return text_diff(texts[place], texts[place + 1], f"before {name}", f"after {name}", context)

    def why_not(self, rule: str, layer: int | None = None) -> str:
        """What a pass or a rule did at a layer, and why not more: refusals, partial matches."""
        found = [e for e in self._events(rule) if layer is None or is_at_layer(e, layer)]
        if not found:
            at = "" if layer is None else f" at layer {layer}"
            return f"{rule}: nothing matched, not even in part{at}"
        return "\n".join(map(event_text, found))

    def _events(self, rule: str) -> Iterator[RuleEvent]:
        names = {r.name for r in self.records} | {e.rule for r in self.records for e in r.events}
        if rule not in names:
            close = difflib.get_close_matches(rule, names, n=2)
            hint = f" (did you mean {', '.join(close)}?)" if close else ""
            raise UnknownStepError(
                f"no pass or rule {rule!r} ran{hint}; {', '.join(sorted(names))}"
            )
        for record in self.records:
            yield from (e for e in record.events if rule in (record.name, e.rule))

    def _place(self, name: str) -> int:
        places = [i for i, r in enumerate(self.records) if name in (r.name, r.step)]
        if not places:
            ran = ", ".join(r.name for r in self.records) or "none"
            raise UnknownStepError(f"no pass {name!r} ran; those that did: {ran}")
        return places[-1]

    def _texts(self) -> list[str]:
        """The module's text before every pass, and after the last."""
        texts = [self.before]
        for record in self.records:
            texts.append(texts[-1] if record.text is None else record.text)
        return texts

    def __str__(self) -> str:
        lines = [table_text(self.records)]
        for record in self.records:
            lines += [f"{record.name}: {note}" for note in record.notes]
            if record.how.startswith("not run"):
                lines.append(f"{record.name}: validation {record.how}")
        return "\n".join(lines)


def is_at_layer(event: RuleEvent, layer: int) -> bool:
    """Whether an event's op line belongs to a layer; one inside a `repeat` to each of its turns'.

    The line names its layer in weights, in its place in the model, in a value's prefix, or in an
    attribute; ``layers[2*i+1]`` stands for the odd ones.
    """
    found = _INDEX.findall(event.where)
    indices = [parse_dim(next(filter(None, groups))) for groups in found]
    if any(_takes(index, layer) for index in indices):
        return True
    prefix = "" if any(i.names for i in indices) else rf"|%l{layer}\."
    return re.search(rf"layers\.{layer}\b{prefix}", event.where) is not None


_INDEX = re.compile(r"layers\[([^\]\s]+)\]|layers\.\{([^}\s]+)\}|\blayer = ([^,}\s]+)")


def _takes(index: Dim, layer: int) -> bool:
    """Whether an index, linear in the turn of a repeat, takes this value at some turn."""
    start = index.at(dict.fromkeys(index.names, 0))
    step = index.at(dict.fromkeys(index.names, 1)) - start
    return layer == start if step == 0 else (layer - start) % step == 0 and layer >= start


def event_text(event: RuleEvent) -> str:
    """One line of `rules.txt`."""
    reason = f"({event.reason})" if event.reason else ""
    return f"{event.rule}: {event.outcome}{reason} at {event.where or 'no op'}"


def text_diff(before: str, after: str, old: str, new: str, context: int = 2) -> str:
    """Unified diff of two texts with a header line each; empty when they are equal."""
    a, b = before.splitlines(), after.splitlines()
    found = difflib.unified_diff(a, b, old, new, n=context, lineterm="")
    return "\n".join([*found, ""]) if before != after else ""


def table_text(records: Sequence[PassRecord], width: int = 140) -> str:
    """The table of records as plain text."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in COLUMNS:
        numeric = column in ("#", "matched/refused", "ops", "ms", "verify ms", "max error")
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for record in records:
        table.add_row(*record.cells())
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, highlight=False, markup=False).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().split("\n"))


__all__ = [
    "PassRecord",
    "PassReport",
    "UnknownStepError",
    "event_text",
    "is_at_layer",
    "table_text",
    "text_diff",
]
