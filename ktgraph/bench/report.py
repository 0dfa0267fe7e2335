"""Cells as tables for a terminal, CSV, and Markdown."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.table import Table

from ktgraph.bench.cells import Cell, Store
from ktgraph.bench.limits import Limits
from ktgraph.bench.shapes import bits_of

COLUMNS = (
    "shape", "tokens", "format", "subject", "threads", "ms", "GB/s", "% DRAM", "GFLOP/s", "% peak",
    "% loaded", "bound", "error f32", "error deq.",
)  # fmt: skip
LEFT = ("shape", "format", "subject", "bound")


def row_of(cell: Cell) -> tuple[str, ...]:
    """A measured cell's columns."""
    k = cell.key
    exact = "" if cell.error_dequantized is None else f"{cell.error_dequantized:.4f}"
    unsteady = "" if cell.steady else " ?"
    loaded = "" if cell.of_loaded is None else f"{cell.of_loaded:.0%}"
    return (
        k.shape, str(k.tokens), k.format, k.subject, str(k.threads), f"{cell.seconds * 1e3:.3f}",
        f"{cell.speed / 1e9:.1f}", f"{cell.of_bandwidth:.0%}{unsteady}", f"{cell.rate / 1e9:.0f}",
        f"{cell.of_peak:.1%}", loaded, cell.bound, f"{cell.error_f32:.4f}", exact,
    )  # fmt: skip


def ordered(cells: Iterable[Cell]) -> list[Cell]:
    """By shape as first measured, then tokens, bits and time."""
    listed = list(cells)
    shapes = list(dict.fromkeys(c.key.shape for c in listed))

    def rank(c: Cell) -> tuple[int, int, int, float]:
        return shapes.index(c.key.shape), c.key.tokens, -bits_of(c.key.format), c.seconds

    return sorted(listed, key=rank)


def cell_table(cells: Iterable[Cell]) -> Table:
    """All measured cells."""
    rows = [row_of(c) for c in ordered(cells)]
    return _rich("routed experts on the CPU, one layer", COLUMNS, rows, LEFT)


def limit_tables(limits: Limits) -> list[Table]:
    """Bandwidth by threads, and peaks."""
    curve = [
        (str(n), f"{s / 1e9:.1f}", "best" if n == limits.best_threads else "")
        for n, s in limits.curve
    ]
    peaks = [(u, f"{p / 1e12:.3g}", f"{p / limits.bandwidth:.3g}") for u, p in limits.peaks.items()]
    size = f"{limits.buffer / 1e9:.1f} GB buffer"
    ridge = "operations per byte at the ridge"
    return [
        _rich(f"DRAM reads, measured now ({size})", ("threads", "GB/s", ""), curve, ("",)),
        _rich(f"arithmetic, measured now ({limits.threads} threads)", ("unit", "T op/s", ridge),
              peaks, ("unit",)),
    ]  # fmt: skip


VERSUS = ("shape", "tokens", "bits", "ktgraph", "ms", "best peer", "ms", "times faster")


def versus_rows(cells: Iterable[Cell]) -> list[tuple[str, ...]]:
    """ktgraph's best format and thread count of so many bits beside the best peer's."""
    groups: dict[tuple[str, int, int], list[Cell]] = {}
    for c in ordered(cells):
        at = (c.key.shape, c.key.tokens, bits_of(c.key.format))
        groups.setdefault(at, []).append(c)
    rows: list[tuple[str, ...]] = []
    for (shape, tokens, bits), members in groups.items():
        ours = [c for c in members if c.is_ours]
        peers = [c for c in members if not c.is_ours]
        if not ours or not peers:
            continue
        a, b = min(ours, key=lambda c: c.seconds), min(peers, key=lambda c: c.seconds)
        rows.append(
            (shape, str(tokens), str(bits), a.key.format, f"{a.seconds * 1e3:.3f}",
             f"{b.key.subject} {b.key.format}", f"{b.seconds * 1e3:.3f}",
             f"{b.seconds / a.seconds:.2f}")
        )  # fmt: skip
    return rows


def versus_table(cells: Iterable[Cell]) -> Table | None:
    """The comparison with peers; None where no cell has one."""
    rows = versus_rows(cells)
    left = ("shape", "ktgraph", "best peer")
    return _rich("beside the best peer of as many bits", VERSUS, rows, left) if rows else None


def csv_text(store: Store) -> str:
    """All cells, refused ones too, with plain numbers."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        ("shape", "tokens", "format", "subject", "threads", "seconds", "runs", "bytes", "flops",
         "bandwidth_before", "bandwidth_after", "of_bandwidth", "unit", "peak", "of_peak", "loaded",
         "bound",
         "error_f32", "error_dequantized", "layers", "footprint", "cache", "steady", "load", "date",
         "refused")
    )  # fmt: skip
    for c in [*ordered(store.measured()), *store.refused()]:
        writer.writerow(_csv_row(c))
    return out.getvalue()


def _csv_row(c: Cell) -> tuple[Any, ...]:
    k = c.key
    shares = (0.0, 0.0, "") if c.refused else (c.of_bandwidth, c.of_peak, c.bound)
    return (
        k.shape, k.tokens, k.format, k.subject, k.threads, c.seconds, c.runs, c.bytes, c.flops,
        *c.bandwidth, shares[0], c.unit, c.peak, shares[1], c.loaded, shares[2], c.error_f32,
        c.error_dequantized, c.layers, c.footprint, c.cache, c.steady, c.load, c.date, c.refused,
    )  # fmt: skip


LEGEND = (
    "Weights are physical copies of several layers in rotation. ms: median of one layer's runs. "
    "% DRAM: bytes of the experts in use over the better of the bandwidth readings before and "
    "after (? where they differ by more than 10 %). % peak: of the fastest unit this CPU has for "
    "the format, in registers; % loaded: of the same with its tiles loaded from the first-level "
    "cache. Errors: norm of the difference over the norm of the output, against float32 and "
    "against the dequantized weights."
)


def markdown(store: Store) -> str:
    """A file for bench/results/: machines, commands, limits, cells, comparison, refusals."""
    lines = ["# Routed experts on the CPU", ""]
    for note in store.notes:
        lines += [*_note_lines(note), ""]
    cells = list(store.measured())
    lines += [
        LEGEND,
        "",
        *_markdown_table(COLUMNS, [row_of(c) for c in ordered(cells)]),
    ]
    rows = versus_rows(cells)
    if rows:
        heading = "## Beside the best peer of as many bits"
        lines += ["", heading, "", *_markdown_table(VERSUS, rows)]
    refused = sorted({(c.key.shape, c.key.subject, c.key.format, c.refused)
                      for c in store.refused()})  # fmt: skip
    if refused:
        lines += ["", "## No figures", ""]
        lines += [f"- {shape}, {subject} {fmt}: {why}" for shape, subject, fmt, why in refused]
    return "\n".join(lines) + "\n"


def _note_lines(note: dict[str, Any]) -> list[str]:
    curve = ", ".join(f"{n}: {s / 1e9:.1f}" for n, s in note.get("curve", ()))
    peaks = ", ".join(f"{u} {p / 1e12:.3g}" for u, p in note.get("peaks", {}).items())
    return [
        f"- {note.get('date', '')}: {note.get('machine', '')}",
        f"  - command: `{note.get('command', '')}`",
        f"  - DRAM read, GB/s by threads: {curve}; T op/s: {peaks}",
        f"  - weights in rotation: {note.get('weights', '')}",
    ]


def _markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    left = {*LEFT, "ktgraph", "best peer"}
    rule = ["---" if c in left else "---:" for c in columns]
    return [f"| {' | '.join(cells)} |" for cells in (columns, rule, *rows)]


def _rich(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[str]
) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.min_width = len(title) + 1
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
