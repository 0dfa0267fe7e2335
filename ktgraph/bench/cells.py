"""Measured cells, and the JSON-lines file that a run resumes from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, cast

from ktgraph.errors import UnsupportedInputError


@dataclass(frozen=True)
class Key:
    """What was measured."""

    shape: str
    tokens: int
    format: str
    subject: str
    threads: int

    def __str__(self) -> str:
        return f"{self.shape} T={self.tokens} {self.format} {self.subject} x{self.threads}"


@dataclass(frozen=True)
class Cell:
    """One measurement, or why there is none (`refused`). Seconds, bytes, operations."""

    key: Key
    refused: str = ""
    seconds: float = 0.0  # median, of one layer
    runs: int = 0
    bytes: float = 0.0  # of the weights one layer's run touches, on average
    flops: float = 0.0  # of one layer
    bandwidth: tuple[float, float] = (0.0, 0.0)  # DRAM read before and after, bytes/s
    steady: bool = True  # whether the two readings agree
    unit: str = ""  # the fastest arithmetic unit for the format
    peak: float = 0.0  # of that unit in registers, operations/s
    loaded: float = 0.0  # of tiles that are loaded for every product; 0 without tiles
    error_f32: float = 0.0
    error_dequantized: float | None = None
    layers: int = 0
    footprint: int = 0  # bytes of all the weights in rotation
    cache: int = 0  # bytes of the last-level cache
    date: str = ""
    load: float = 0.0  # processes that wanted to run in the minute before

    @property
    def is_ours(self) -> bool:
        """Whether ktgraph ran it, on any ISA."""
        return self.key.subject.split()[0] == "ktgraph"

    @property
    def speed(self) -> float:
        """Bytes/s of weights touched."""
        return self.bytes / self.seconds

    @property
    def of_bandwidth(self) -> float:
        """Share of the DRAM bandwidth: of the better of the two readings."""
        return self.speed / max(self.bandwidth)

    @property
    def rate(self) -> float:
        """Operations/s."""
        return self.flops / self.seconds

    @property
    def of_peak(self) -> float:
        return self.rate / self.peak

    @property
    def of_loaded(self) -> float | None:
        """Share of what tiles reach whose operands are loaded; None without tiles."""
        return self.rate / self.loaded if self.loaded else None

    @property
    def bound(self) -> str:
        """The limit that binds: whichever would take longer at its best."""
        memory, compute = self.bytes / max(self.bandwidth), self.flops / self.peak
        return "memory" if memory >= compute else "compute"

    @property
    def of_bound(self) -> float:
        return max(self.of_bandwidth, self.of_peak)


@dataclass
class Store:
    """Cells in a JSON-lines file; each is written as soon as it is measured."""

    path: Path | None
    cells: dict[Key, Cell] = field(default_factory=dict[Key, Cell])
    notes: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    @staticmethod
    def open(path: Path | None, *, fresh: bool = False) -> Store:
        """Reads what is there; `fresh` begins anew."""
        store = Store(path)
        if path is None:
            return store
        path.parent.mkdir(parents=True, exist_ok=True)
        if fresh or not path.exists():
            path.write_text("")
        text = path.read_text()
        whole = text[: text.rfind("\n") + 1]  # what a killed run wrote last may be half a line
        if whole != text:
            path.write_text(whole)
        for number, line in enumerate(whole.splitlines(), 1):
            store._take(line, f"{path}:{number}")
        return store

    def add(self, cell: Cell) -> None:
        """Keeps a cell."""
        self.cells[cell.key] = cell
        self._write(asdict(cell))

    def note(self, **values: Any) -> None:
        """Keeps facts about a call: machine, limits, command."""
        self.notes.append(values)
        self._write({"note": values})

    def measured(self) -> Iterator[Cell]:
        """Cells that have figures."""
        return (c for c in self.cells.values() if not c.refused)

    def refused(self) -> Iterator[Cell]:
        """Cells that have none, with the reason."""
        return (c for c in self.cells.values() if c.refused)

    def _write(self, record: dict[str, Any]) -> None:
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def _take(self, line: str, where: str) -> None:
        try:
            record = json.loads(line)
            if "note" in record:
                self.notes.append(record["note"])
                return
            cell = _cell(record)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UnsupportedInputError(
                f"{where}: not a line of a bench file ({error}); give another file, or --fresh"
            ) from None
        self.cells[cell.key] = cell


def _cell(record: dict[str, Any]) -> Cell:
    known = {f.name for f in fields(Cell)}
    values = {k: v for k, v in record.items() if k in known}
    values["key"] = Key(**record["key"])
    before, after = cast("list[float]", record["bandwidth"])
    values["bandwidth"] = (before, after)
    return Cell(**values)
