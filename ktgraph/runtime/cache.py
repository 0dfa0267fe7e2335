"""The paged cache: pages of rows that sequences take as they grow and give back when they end.

Row r of a sequence lies in page `table[r // page_size]`; every layer and part of every state of one
window uses the same table.  Nothing is cleared: a row is read only after its sequence wrote it.

Caches of a window have pages of their own (`ktgraph/runtime/window_pages.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
import torch

from ktgraph.errors import ContextLimitError
from ktgraph.ir.types import DTYPES, BatchType, StateType
from ktgraph.ops.tensor import torch_dtype
from ktgraph.pass_api import CompileOptions
from ktgraph.runtime.state import State
from ktgraph.runtime.window_pages import Ints, PagePool, WindowPages, WindowRows, most_pages


class CacheFullError(ContextLimitError):
    """Not enough free pages for the rows asked for; nothing was changed."""


class UnknownSequenceError(KeyError):
    """A sequence id that is not open."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass
class OpenSequence:
    """One open sequence: rows written, and its pages (`table` is the same, for the engine).

    windows: the same for the caches of each window.
    """

    table: Ints
    length: int = 0
    pages: list[int] = field(default_factory=list[int])
    windows: dict[int, WindowRows] = field(default_factory=dict[int, WindowRows])

    @property
    def tables(self) -> list[Ints]:
        """The table of the whole text, then those of the windows in order."""
        return [self.table, *(rows.table for rows in self.windows.values())]


@dataclass(frozen=True)
class CacheShape:
    """How many rows there are, and how many one sequence may have.

    windows: pages of the caches of each window, in order of the window.
    """

    page_size: int
    pages: int
    context: int
    windows: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of(
        types: Sequence[StateType], dims: Mapping[str, int], options: CompileOptions, pages: int
    ) -> CacheShape:
        """The shape with `pages` for every row, and what the windows of these states can need."""
        size, batch = options.page_size, options.max_batch
        tokens = max(options.max_tokens, batch)
        windows = {window_of(t, dims) for t in types} - {0}
        most = {w: min(pages, most_pages(w, size, batch, tokens)) for w in windows}
        return CacheShape(size, pages, options.context, tuple(sorted(most.items())))

    def pages_of(self, window: int) -> int:
        """Pages of the caches of a window, 0: of those that keep every row."""
        return dict(self.windows)[window] if window else self.pages

    def rows_of(self, type: StateType, dims: Mapping[str, int]) -> int:
        """Rows of a cache, in each of its layers."""
        return self.pages_of(window_of(type, dims)) * self.page_size

    @property
    def rows(self) -> int:
        return self.pages * self.page_size

    @property
    def sequence_rows(self) -> int:
        """Most rows of one sequence."""
        return min(self.context, self.rows)

    def pages_for(self, rows: int) -> int:
        return -(-rows // self.page_size)


class SequenceTable:
    """Open sequences, their pages and lengths."""

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        self.pool = PagePool(shape.pages)
        self.windows = {w: WindowPages(w, shape.page_size, n) for w, n in shape.windows}
        self._open: dict[int, OpenSequence] = {}
        self._next = 0

    def open(self) -> int:
        """A new, empty sequence; it takes no page before it has a row."""
        width = self.shape.pages_for(self.shape.sequence_rows)
        number, self._next = self._next, self._next + 1
        rows = {w: WindowRows(np.zeros(width, np.int32)) for w in self.windows}
        self._open[number] = OpenSequence(np.zeros(width, np.int32), windows=rows)
        return number

    def close(self, number: int) -> None:
        sequence = self[number]
        self._shrink(sequence, 0)
        del self._open[number]

    def __getitem__(self, number: int) -> OpenSequence:
        found = self._open.get(number)
        if found is None:
            raise UnknownSequenceError(
                f"sequence {number} is not open ({len(self._open)} are): open() gives a number, "
                "close() ends it"
            )
        return found

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[int]:
        """Numbers of the open sequences."""
        return iter(list(self._open))

    def truncate(self, number: int, rows: int) -> None:
        """Forget all but the first `rows` rows of a sequence."""
        sequence = self[number]
        if not 0 <= rows <= sequence.length:
            raise ValueError(
                f"truncate to {rows} rows: sequence {number} has {sequence.length} (0 to that)"
            )
        gone = [w for w, p in self.windows.items() if not p.has(sequence.windows[w], rows)]
        if gone:
            raise ValueError(
                f"truncate to {rows} rows: sequence {number} has {sequence.length}, and layers "
                f"that look back {gone[0]} rows no longer have those before row {rows}. Truncate "
                "less, to 0, or run the sequence again"
            )
        sequence.length = rows
        self._shrink(sequence, rows)

    def reserve(self, wanted: Mapping[int, int]) -> None:
        """Pages for `wanted[number]` more rows of each sequence, for all or for none.

        Raises ContextLimitError when one gets too long, CacheFullError when pages are missing.
        """
        missing = 0
        for number, more in wanted.items():
            sequence = self[number]
            self._check_length(number, sequence.length, more)
            missing += self.shape.pages_for(sequence.length + more) - len(sequence.pages)
        if missing > self.pool.free:
            raise CacheFullError(self._full(wanted, missing))
        for number, more in wanted.items():
            self._grow(self._open[number], more)

    def advance(self, calls: Mapping[int, tuple[int, int]]) -> None:
        """Pages of every window for rows start..stop-1 of each sequence, for all or for none.

        What neither these rows nor those that are to come see is given back, but for what the
        sequence sees from its present end: a call that fails leaves it there.
        Raises CacheFullError.
        """
        for window, pages in self.windows.items():
            wanted = {n: pages.sees(start, stop) for n, (start, stop) in calls.items()}
            missing = 0
            for number, blocks in wanted.items():
                sequence = self[number]
                rows = sequence.windows[window]
                here = pages.sees(sequence.length, sequence.length)
                pages.release(rows, {*blocks, *here})
                missing += pages.missing(rows, blocks)
            if missing > pages.pool.free:
                raise CacheFullError(self._window_full(window, missing))
            for number, blocks in wanted.items():
                pages.take(self._open[number].windows[window], blocks)

    def _window_full(self, window: int, missing: int) -> str:
        pool = self.windows[window].pool
        return (
            f"the cache of layers that look back {window} rows is full: {missing} more pages of "
            f"{self.shape.page_size} rows are needed, and {pool.free} of {pool.pages} are free "
            f"({len(self)} sequences are open). Close sequences, or compile with max_batch="
            f"{len(self)} or more"
        )

    def _check_length(self, number: int, length: int, more: int) -> None:
        limit = self.shape.sequence_rows
        if length + more <= limit:
            return
        option = "context" if self.shape.context <= self.shape.rows else "cache_rows"
        raise ContextLimitError(
            f"sequence {number} has {length} rows and {more} more tokens were given: that is "
            f"{length + more} rows, and the cache was made for {limit} a sequence. Give at most "
            f"{limit - length} tokens, or compile with {option}={length + more} or more"
        )

    def _full(self, wanted: Mapping[int, int], missing: int) -> str:
        size = self.shape.page_size
        return (
            f"the cache is full: {sum(wanted.values())} new rows need {missing} more pages of "
            f"{size} rows, and {self.pool.free} of {self.pool.pages} are free ({len(self)} "
            "sequences are open). Close or truncate sequences, or compile with cache_rows="
            f"{(self.pool.pages - self.pool.free + missing) * size} or more"
        )

    def _grow(self, sequence: OpenSequence, more: int) -> None:
        have = len(sequence.pages)
        need = self.shape.pages_for(sequence.length + more)
        if need <= have:
            return
        taken = self.pool.take(need - have)
        sequence.table[have:need] = taken
        sequence.pages += taken

    def restore(self, lengths: Mapping[int, int]) -> None:
        """Put sequences back to these lengths after a call that did not finish.

        Which pages are free is found anew, so that an interruption at any point loses none.
        """
        for number, length in lengths.items():
            found = self._open.get(number)
            if found is None:
                continue
            found.length = length
            keep = self.shape.pages_for(length)
            del found.pages[keep:]
            found.table[keep:] = 0
            self._shrink_windows(found, keep)
        used = {page for sequence in self._open.values() for page in sequence.pages}
        self.pool = PagePool(self.shape.pages, used)
        for window, pages in self.windows.items():
            pages.rebuild(s.windows[window] for s in self._open.values())

    def _shrink(self, sequence: OpenSequence, rows: int) -> None:
        keep = self.shape.pages_for(rows)
        extra = sequence.pages[keep:]
        del sequence.pages[keep:]
        sequence.table[keep:] = 0
        self.pool.give(reversed(extra))
        self._shrink_windows(sequence, keep)

    def _shrink_windows(self, sequence: OpenSequence, blocks: int) -> None:
        for window, pages in self.windows.items():
            pages.release(sequence.windows[window], range(blocks))


# -- memory of the states -------------------------------------------------------------------------
class InPlaceState(State):
    """A `State` whose append writes into its own tensors: linear states allow it."""

    def append(self, layer: int, slots: torch.Tensor, rows: tuple[torch.Tensor, ...]) -> State:
        for part, new in zip(self.parts, rows, strict=True):
            part[layer, slots] = new.to(part.dtype)
        return self


def window_of(type: StateType | BatchType, dims: Mapping[str, int]) -> int:
    """The window of a cache or of a batch, 0 where every row is kept."""
    return 0 if type.window is None else type.window.at(dims)


def row_nbytes(types: Sequence[StateType], layers: Mapping[str, int]) -> int:
    """Bytes that one cache row takes over all layers, parts and states."""
    return sum(
        t.layers.at(layers) * DTYPES[p.dtype] * prod(d.const() for d in p.dims[1:])
        for t in types
        for p in t.parts
    )


def allocate_states(
    types: Sequence[StateType],
    layers: Mapping[str, int],
    shape: CacheShape,
    places: Mapping[str, torch.device] | None = None,
    home: str = "cpu",
) -> list[InPlaceState]:
    """Uninitialised memory of every state; parts are [layers, rows, *row].

    places: torch's device of each device name; by default everything lies on the CPU.
    """
    found: list[InPlaceState] = []
    for type in types:
        count = type.layers.at(layers)
        rows = shape.rows_of(type, layers)
        place = (places or {}).get(type.device or home, torch.device("cpu"))
        parts = [
            torch.empty(
                [count, rows, *(d.const() for d in p.dims[1:])],
                dtype=torch_dtype(p.dtype),
                device=place,
            )
            for p in type.parts
        ]
        found.append(InPlaceState(tuple(parts)))
    return found


__all__ = [
    "CacheFullError",
    "CacheShape",
    "InPlaceState",
    "PagePool",
    "SequenceTable",
    "UnknownSequenceError",
    "allocate_states",
    "row_nbytes",
    "window_of",
]
