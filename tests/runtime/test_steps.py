"""Requests cut into calls: within limits, in order, nothing lost; arrays against `Batch.build`."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from ktgraph.runtime.batch import Batch
from ktgraph.runtime.steps import CallLimits, StepArrays, schedule

limits = st.builds(
    lambda tokens, batch, rows, q: CallLimits(tokens, batch, min(rows, tokens), min(q, tokens)),
    st.integers(1, 20),
    st.integers(1, 6),
    st.integers(1, 20),
    st.integers(1, 20),
)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), limits, st.booleans())
def test_every_token_runs_once_in_order(
    lengths: list[int], limit: CallLimits, all_rows: bool
) -> None:
    done = [0] * len(lengths)
    for pieces in schedule(lengths, limit, all_rows):
        assert 1 <= sum(p.tokens for p in pieces) <= limit.tokens
        assert len(pieces) <= limit.batch
        assert max(p.tokens for p in pieces) <= limit.max_q
        assert len({p.request for p in pieces}) == len(pieces)
        rows = sum(p.tokens if all_rows else p.is_last for p in pieces)
        assert rows <= limit.rows
        for piece in pieces:
            assert piece.start == done[piece.request]
            assert done[: piece.request] == lengths[: piece.request]  # rows come out in order
            done[piece.request] = piece.stop
            assert piece.is_last == (piece.stop == lengths[piece.request])
    assert done == lengths


def test_arrays_are_those_of_the_batch() -> None:
    past, new = [5, 0, 9], [1, 4, 2]
    tables = [[3, 1, 0], [2, 0, 0], [5, 6, 4]]
    arrays = StepArrays(16, 4, 8, 3)
    for _ in range(2):  # a second call writes over the first
        arrays.begin()
        for p, n, table in zip(past, new, tables, strict=True):
            arrays.add(p, n, np.array(table, np.int32))
            arrays.want(arrays.tokens - 1)
    got, want = arrays.as_batch(4), Batch.build(past, new, tables, 4)
    for name in ("tok_seq", "tok_pos", "seq_start", "kv_len", "block_table", "out_rows"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    arrays.want_all()
    assert arrays.as_batch(4).out_rows.tolist() == list(range(7))
