"""A roofline picture of measured cells. Needs matplotlib (`pip install matplotlib`)."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ktgraph.bench.cells import Cell
from ktgraph.errors import KtgraphError


class NoPictureError(KtgraphError):
    """matplotlib is missing, or there is nothing to draw."""


def draw(cells: Sequence[Cell], path: Path) -> None:
    """Writes one panel a shape: operations per byte against operations per second.

    Roofs are the best bandwidth and the peaks of the cells shown.  Raises NoPictureError.
    """
    if not cells:
        raise NoPictureError("no roofline: no cell was measured")
    plt = _matplotlib()
    shapes = list(dict.fromkeys(c.key.shape for c in cells))
    columns = min(2, len(shapes))
    rows = -(-len(shapes) // columns)
    size = (7 * columns, 5 * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    flat = [ax for line in axes for ax in line]
    for ax in flat[len(shapes) :]:
        ax.set_visible(False)
    for ax, shape in zip(flat, shapes, strict=False):
        _panel(ax, shape, [c for c in cells if c.key.shape == shape])
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _matplotlib() -> Any:
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
        matplotlib.use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError:
        raise NoPictureError(
            "no roofline: matplotlib is not installed; pip install matplotlib"
        ) from None


def _panel(ax: Any, shape: str, cells: list[Cell]) -> None:
    ours = {(c.key.subject, c.key.format) for c in cells if c.is_ours}
    theirs = {(c.key.subject, c.key.format) for c in cells if not c.is_ours}
    names = [*sorted(ours), *sorted(theirs)]
    for number, (subject, fmt) in enumerate(names):
        line = sorted(
            (c for c in cells if (c.key.subject, c.key.format) == (subject, fmt)),
            key=lambda c: c.key.tokens,
        )
        style = {"marker": "o", "lw": 1.8} if (subject, fmt) in ours else {"marker": "x", "lw": 0.8}
        x, y = [c.flops / c.bytes for c in line], [c.rate / 1e9 for c in line]
        ax.plot(x, y, label=f"{subject} {fmt}", color=f"C{number % 10}", **style)
    _roofs(ax, cells)
    ax.set(xscale="log", yscale="log", title=shape)
    ax.set(xlabel="operations per byte of weights", ylabel="G operations/s")
    ax.grid(True, which="major", alpha=0.3)
    ax.legend(fontsize=6, loc="lower right")


def _roofs(ax: Any, cells: list[Cell]) -> None:
    bandwidth = max(max(c.bandwidth) for c in cells)
    peaks = {c.unit: c.peak for c in cells}
    left = min(c.flops / c.bytes for c in cells) / 2
    furthest = max(c.flops / c.bytes for c in cells)
    right = 2 * max(furthest, max(peaks.values()) / bandwidth)  # every ridge is shown
    for unit, peak in peaks.items():
        ridge = max(left, peak / bandwidth)
        x = [left, min(ridge, right), right]
        y = [min(peak, bandwidth * at) / 1e9 for at in x]
        ax.plot(x, y, color="black", lw=1)
        ax.annotate(unit, (right, y[-1]), fontsize=7, ha="right", va="bottom")
    read = f"DRAM {bandwidth / 1e9:.0f} GB/s"
    ax.annotate(read, (left, bandwidth * left / 1e9), fontsize=7, va="bottom")
