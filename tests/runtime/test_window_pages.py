"""Caches of a window: pages given back once out of sight, never one that is still seen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ktgraph.ir.dims import Dim
from ktgraph.ir.parser import parse_type
from ktgraph.ir.types import BatchType, StateType, TensorType
from ktgraph.ops import SignatureError, op_def
from ktgraph.runtime.cache import CacheFullError, CacheShape, SequenceTable
from ktgraph.runtime.window_pages import most_pages

PAGE, WINDOW, CHUNK = 4, 6, 8


def table(pages: int, sequences: int = 2) -> SequenceTable:
    most = most_pages(WINDOW, PAGE, sequences, CHUNK)
    return SequenceTable(CacheShape(PAGE, 100, 200, ((WINDOW, min(pages, most)),)))


def run(given: SequenceTable, calls: dict[int, int]) -> None:
    """One call: `calls[seq]` new tokens each."""
    spans = {q: (given[q].length, given[q].length + n) for q, n in calls.items()}
    given.reserve(calls)
    given.advance(spans)
    check(given, spans)
    for seq, count in calls.items():
        given[seq].length += count


def check(given: SequenceTable, spans: dict[int, tuple[int, int]]) -> None:
    """Every row that the new tokens see has a page, in the table too; no page has two owners."""
    pages = given.windows[WINDOW]
    for seq, (start, stop) in spans.items():
        rows = given[seq].windows[WINDOW]
        for row in range(max(0, start - WINDOW + 1), stop):
            assert rows.table[row // PAGE] == rows.pages[row // PAGE]
    owned = [p for seq in given for p in given[seq].windows[WINDOW].pages.values()]
    assert len(set(owned)) == len(owned)
    assert pages.pool.free == pages.pool.pages - len(owned)


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(1, CHUNK)), min_size=1, max_size=30))
def test_what_is_seen_is_there(calls: list[tuple[int, int]]) -> None:
    found = table(100)
    seqs = [found.open(), found.open()]
    for which, count in calls:
        if found[seqs[which]].length + count <= 200:
            run(found, {seqs[which]: count})
    for seq in seqs:
        held = found[seq].windows[WINDOW].pages
        assert len(held) <= -(-(2 * WINDOW + CHUNK) // PAGE) + 2
        found.close(seq)
    assert found.windows[WINDOW].pool.free == found.windows[WINDOW].pool.pages


def test_a_long_text_holds_a_window() -> None:
    found = table(100)
    seq = found.open()
    for _ in range(150):
        run(found, {seq: 1})
    assert set(found[seq].windows[WINDOW].pages) == {36, 37}  # rows 144 to 149
    assert len(found[seq].pages) == 38


def test_a_failed_call_leaves_what_was_seen_before() -> None:
    """Two pieces of one request ran: the rows behind which it began are still there."""
    found = table(100)
    seq = found.open()
    run(found, {seq: 10})
    before = dict(found[seq].windows[WINDOW].pages)
    found.reserve({seq: 40})
    found.advance({seq: (10, 18)})
    found.advance({seq: (18, 26)})
    found.restore({seq: 10})
    kept = found[seq].windows[WINDOW].pages
    assert set(kept) == {1, 2}
    assert kept.items() <= before.items()
    run(found, {seq: 3})


def test_full_is_an_error_that_changes_no_length() -> None:
    found = table(3)
    first, second = found.open(), found.open()
    run(found, {first: 8})
    with pytest.raises(CacheFullError, match=r"look back 6 rows is full: 2 more pages.*1 of 3"):
        found.advance({second: (0, 8)})
    found.close(first)
    run(found, {second: 8})


def test_truncate_reaches_as_far_as_the_window() -> None:
    found = table(100)
    seq = found.open()
    for _ in range(30):
        run(found, {seq: 1})
    with pytest.raises(ValueError, match="look back 6 rows no longer have those before row 20"):
        found.truncate(seq, 20)
    found.truncate(seq, 29)
    run(found, {seq: 4})
    found.truncate(seq, 0)
    assert found[seq].windows[WINDOW].pages == {}
    run(found, {seq: 5})


# ---------------------------------------------------------------- types


def test_types_round_trip() -> None:
    for text in ("batch(window = W)", "kv(12 x f32[C, G, A], 12 x f32[C, G, A], window = W)@cpu"):
        assert str(parse_type(text)) == text
    assert parse_type("batch(window = W)").subst({"W": 8}) == parse_type("batch(window = 8)")


def test_a_cache_takes_the_batch_of_its_window() -> None:
    row = TensorType.of("f32", "T", "H", "A")
    state, batch = parse_type("kv(1 x f32[C, G, A], 1 x f32[C, G, A], window = W)"), BatchType()
    assert isinstance(state, StateType)
    signature = op_def("attn.sdpa").signature
    attrs = {"layer": Dim.of(0), "scale": 0.5, "window": Dim.of("W")}
    with pytest.raises(SignatureError, match="batch of its own window, got batch"):
        signature.result_types([row, state, batch], signature.full_attrs(attrs))
    own, whole = parse_type("batch(window = W)"), {"layer": Dim.of(0), "scale": 0.5}
    with pytest.raises(SignatureError, match=r"keeps the last W rows.*looks back 0"):
        signature.result_types([row, state, own], signature.full_attrs(whole))
    (found,) = signature.result_types([row, state, own], signature.full_attrs(attrs))
    assert str(found) == "f32[T, H, A]"
