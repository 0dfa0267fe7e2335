"""The paged cache: pages of rows that sequences take as they grow and give back when they end.

Row r of a sequence lies in page `table[r // page_size]`; every layer and part of every state uses
the same table.  Nothing is cleared: a row is read only after its sequence wrote it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
import numpy.typing as npt
import torch

from ktgraph.errors import ContextLimitError
from ktgraph.ir.types import DTYPES, StateType
from ktgraph.ops.tensor import torch_dtype
from ktgraph.runtime.state import State

Ints = npt.NDArray[np.int32]


class CacheFullError(ContextLimitError):
    """Not enough free pages for the rows asked for; nothing was changed."""


class UnknownSequenceError(KeyError):
    """A sequence id that is not open."""

    def __str__(self) -> str:
        return str(self.args[0])


class PagePool:
    """Free pages; the lowest numbers are given out first."""

    def __init__(self, pages: int, used: Container[int] = ()) -> None:
        self.pages = pages
        self._free = [p for p in range(pages - 1, -1, -1) if p not in used]

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` pages; the caller has checked that they are there."""
        return [self._free.pop() for _ in range(count)]

    def give(self, pages: Iterable[int]) -> None:
        """Take pages back; the one given last is used first."""
        self._free.extend(pages)


@dataclass
class OpenSequence:
    """One open sequence: rows written, and its pages (`table` is the same, for the engine)."""

    table: Ints
    length: int = 0
    pages: list[int] = field(default_factory=list[int])


@dataclass(frozen=True)
class CacheShape:
    """How many rows there are, and how many one sequence may have."""

    page_size: int
    pages: int
    context: int

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
        self._open: dict[int, OpenSequence] = {}
        self._next = 0

    def open(self) -> int:
        """A new, empty sequence; it takes no page before it has a row."""
        width = self.shape.pages_for(self.shape.sequence_rows)
        number, self._next = self._next, self._next + 1
        self._open[number] = OpenSequence(np.zeros(width, np.int32))
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
        used = {page for sequence in self._open.values() for page in sequence.pages}
        self.pool = PagePool(self.shape.pages, used)

    def _shrink(self, sequence: OpenSequence, rows: int) -> None:
        keep = self.shape.pages_for(rows)
        extra = sequence.pages[keep:]
        del sequence.pages[keep:]
        sequence.table[keep:] = 0
        self.pool.give(reversed(extra))


# -- memory of the states -------------------------------------------------------------------------
class InPlaceState(State):
    """A `State` whose append writes into its own tensors: linear states allow it."""

    def append(self, layer: int, slots: torch.Tensor, rows: tuple[torch.Tensor, ...]) -> State:
        for part, new in zip(self.parts, rows, strict=True):
            part[layer, slots] = new.to(part.dtype)
        return self


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
    rows: int,
    places: Mapping[str, torch.device] | None = None,
    home: str = "cpu",
) -> list[InPlaceState]:
    """Uninitialised memory of every state; parts are [layers, rows, *row].

    places: torch's device of each device name; by default everything lies on the CPU.
    """
    found: list[InPlaceState] = []
    for type in types:
        count = type.layers.at(layers)
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
]
