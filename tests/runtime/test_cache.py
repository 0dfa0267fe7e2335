"""Pages: taken as sequences grow, given back, never shared; errors change nothing."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ktgraph.errors import ContextLimitError
from ktgraph.runtime.cache import (
    CacheFullError,
    CacheShape,
    SequenceTable,
    UnknownSequenceError,
)

SHAPE = CacheShape(page_size=4, pages=6, context=16)


def grow(table: SequenceTable, seq: int, rows: int) -> None:
    table.reserve({seq: rows})
    table[seq].length += rows


def check(table: SequenceTable, open_: list[int]) -> None:
    """Every page has one owner; a sequence has just the pages its rows need."""
    used = [page for seq in open_ for page in table[seq].pages]
    assert len(set(used)) == len(used)
    assert table.pool.free == table.shape.pages - len(used)
    for seq in open_:
        found = table[seq]
        assert len(found.pages) == table.shape.pages_for(found.length)
        assert found.table[: len(found.pages)].tolist() == found.pages


def test_rows_of_a_sequence_survive_others() -> None:
    table = SequenceTable(SHAPE)
    a, b = table.open(), table.open()
    grow(table, a, 5)
    before = list(table[a].pages)
    grow(table, b, 4)
    grow(table, a, 4)
    assert table[a].pages[:2] == before
    table.close(b)
    check(table, [a])


def test_all_or_none() -> None:
    table = SequenceTable(SHAPE)
    a, b = table.open(), table.open()
    grow(table, a, 12)
    with pytest.raises(CacheFullError, match=r"16 new rows need 4 more pages of 4.*3 of 6"):
        table.reserve({a: 4, b: 12})
    check(table, [a, b])
    grow(table, b, 12)
    check(table, [a, b])


def test_restore_gives_pages_back() -> None:
    table = SequenceTable(SHAPE)
    a, b = table.open(), table.open()
    grow(table, a, 3)
    table.reserve({a: 9, b: 2})
    table.restore({a: 3, b: 0})
    check(table, [a, b])
    grow(table, b, 16)
    check(table, [a, b])


def test_restore_finds_lost_pages() -> None:
    """Interrupted between taking pages and writing them down."""
    table = SequenceTable(SHAPE)
    a = table.open()
    grow(table, a, 2)
    table.pool.take(3)
    table.restore({a: 2})
    check(table, [a])


def test_unknown_and_closed() -> None:
    table = SequenceTable(SHAPE)
    seq = table.open()
    table.close(seq)
    with pytest.raises(UnknownSequenceError, match="0 are"):
        table.close(seq)
    assert table.open() != seq
    with pytest.raises(ValueError, match="0 to that"):
        table.truncate(table.open(), 1)


@given(st.lists(st.tuples(st.sampled_from("ogtc"), st.integers(0, 3), st.integers(0, 17))))
def test_any_history_keeps_pages_apart(history: list[tuple[str, int, int]]) -> None:
    table, seqs = SequenceTable(SHAPE), list[int]()
    for what, which, rows in history:
        if what == "o" and len(seqs) < 4:
            seqs.append(table.open())
        if not seqs:
            continue
        seq = seqs[which % len(seqs)]
        if what == "g" and rows:
            with contextlib.suppress(CacheFullError, ContextLimitError):
                grow(table, seq, rows)
        elif what == "t":
            table.truncate(seq, min(rows, table[seq].length))
        elif what == "c":
            table.close(seq)
            seqs.remove(seq)
        check(table, seqs)
