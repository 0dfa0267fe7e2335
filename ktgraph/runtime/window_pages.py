"""Pages of caches that keep a window: taken as a sequence grows, given back once out of sight.

A token at position p looks back to p - window + 1.  A page all of whose rows lie before that is
given back; its number stays in the table, where kernels that read whole tiles find old numbers and
mask them.  Of a call that fails, the rows before it are still there.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]


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


def most_pages(window: int, page_size: int, sequences: int, tokens: int) -> int:
    """Pages with which `sequences` never run out, in calls of at most `tokens` new tokens.

    Twice a window each: of a long request the rows before it are kept until it has ended.
    """
    kept = -(-(window - 1) // page_size) + 1
    return sequences * (2 * kept + 1) + -(-tokens // page_size)


@dataclass
class WindowRows:
    """One sequence in one window: its pages by block, and the table that the engine reads."""

    table: Ints
    pages: dict[int, int] = field(default_factory=dict[int, int])


class WindowPages:
    """The pages of one window, shared by all sequences."""

    def __init__(self, window: int, page_size: int, pages: int) -> None:
        self.window = window
        self.page_size = page_size
        self.pool = PagePool(pages)

    def sees(self, start: int, stop: int) -> range:
        """Blocks of the rows that tokens start..stop-1 read or write."""
        first = max(0, start - self.window + 1)
        return range(first // self.page_size, -(-stop // self.page_size))

    def missing(self, rows: WindowRows, blocks: Iterable[int]) -> int:
        return sum(block not in rows.pages for block in blocks)

    def release(self, rows: WindowRows, keep: Container[int]) -> None:
        """Give back the pages of all other blocks."""
        gone = [block for block in rows.pages if block not in keep]
        self.pool.give([rows.pages.pop(block) for block in reversed(gone)])

    def take(self, rows: WindowRows, blocks: Iterable[int]) -> None:
        """Pages for these blocks; the caller has checked that they are there."""
        for block in blocks:
            if block not in rows.pages:
                (rows.pages[block],) = self.pool.take(1)
                rows.table[block] = rows.pages[block]

    def has(self, rows: WindowRows, length: int) -> bool:
        """Whether a sequence can go on behind its first `length` rows."""
        return self.missing(rows, self.sees(length, length)) == 0

    def rebuild(self, open_rows: Iterable[WindowRows]) -> None:
        """Find anew which pages are free, after a call that was broken off at any point."""
        used = {page for rows in open_rows for page in rows.pages.values()}
        self.pool = PagePool(self.pool.pages, used)


__all__ = ["Ints", "PagePool", "WindowPages", "WindowRows", "most_pages"]
