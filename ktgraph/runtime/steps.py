"""Cutting requests into calls, and the arrays that describe a call to the engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ktgraph.runtime.batch import Batch
from ktgraph.runtime.cache import Ints


@dataclass(frozen=True)
class CallLimits:
    """The largest call of a phase."""

    tokens: int
    batch: int  # sequences
    rows: int  # rows of logits
    max_q: int  # new tokens of one sequence


@dataclass(frozen=True)
class Piece:
    """Tokens start..stop of request number `request`."""

    request: int
    start: int
    stop: int
    is_last: bool  # the request ends here

    @property
    def tokens(self) -> int:
        return self.stop - self.start


def schedule(lengths: Sequence[int], limits: CallLimits, all_rows: bool) -> Iterator[list[Piece]]:
    """Requests in order, cut into calls; a request is in a call once, so its rows stay in order."""
    pieces: list[Piece] = []
    tokens = rows = 0
    for request, length in enumerate(lengths):
        start = 0
        while start < length:
            room = min(limits.tokens - tokens, limits.max_q)
            room = min(room, limits.rows - rows) if all_rows else room
            stop = min(length, start + room)
            ends = stop == length
            full = len(pieces) == limits.batch or room <= 0 or (ends and rows == limits.rows)
            if full or (pieces and pieces[-1].request == request):
                yield pieces
                pieces, tokens, rows = [], 0, 0
                continue
            pieces.append(Piece(request, start, stop, ends))
            tokens += stop - start
            rows += stop - start if all_rows else int(ends)
            start = stop
    yield pieces


class StepArrays:
    """Preallocated i32 arrays of a call; they are written anew for each one.

    windows: tables[0] is for caches of every row, the others for those of the windows in order.
    """

    def __init__(
        self,
        tokens: int,
        batch: int,
        rows: int,
        table_width: int,
        windows: Sequence[int] = (),
    ) -> None:
        self.windows = (0, *windows)
        self.tok_seq = np.zeros(tokens, np.int32)
        self.tok_pos = np.zeros(tokens, np.int32)
        self.seq_start = np.zeros(batch + 1, np.int32)
        self.kv_len = np.zeros(batch, np.int32)
        self.tables = [np.zeros((batch, table_width), np.int32) for _ in self.windows]
        self.out_rows = np.zeros(rows, np.int32)
        self.tokens = self.sequences = self.rows = 0

    def begin(self) -> None:
        self.tokens = self.sequences = self.rows = 0

    def add(self, past: int, count: int, *tables: Ints) -> None:
        """`count` tokens behind the `past` rows of one sequence; a table for each window."""
        t, q = self.tokens, self.sequences
        end = t + count
        if count == 1:
            self.tok_seq[t], self.tok_pos[t] = q, past
        else:
            self.tok_seq[t:end] = q
            self.tok_pos[t:end] = np.arange(past, past + count)
        self.kv_len[q] = past + count
        for mine, given in zip(self.tables, tables, strict=True):
            mine[q] = given
        self.seq_start[q + 1] = end
        self.tokens, self.sequences = end, q + 1

    def want(self, row: int) -> None:
        """Ask for the logits of token `row` of the call."""
        self.out_rows[self.rows] = row
        self.rows += 1

    def want_all(self) -> None:
        self.rows = self.tokens
        self.out_rows[: self.rows] = np.arange(self.rows)

    def table(self, window: int = 0) -> npt.NDArray[np.int32]:
        """Pages [sequences of the largest call, width] of the caches of a window."""
        return self.tables[self.windows.index(window)]

    def give_to(self, native: Any, window: int = 0) -> None:
        """Copy the arrays of this call into the engine's batch, with the table of a window."""
        t, q = self.tokens, self.sequences
        native.set(
            self.tok_seq[:t],
            self.tok_pos[:t],
            self.seq_start[: q + 1],
            self.kv_len[:q],
            self.table(window)[:q],
            self.out_rows[: self.rows],
        )

    def as_batch(self, page_size: int, window: int = 0) -> Batch:
        """The torch form; it shares memory with the arrays."""
        t, q = self.tokens, self.sequences
        return Batch(
            torch.as_tensor(self.tok_seq[:t]),
            torch.as_tensor(self.tok_pos[:t]),
            torch.as_tensor(self.seq_start[: q + 1]),
            torch.as_tensor(self.kv_len[:q]),
            torch.as_tensor(self.table(window)[:q]),
            page_size,
            torch.as_tensor(self.out_rows[: self.rows]),
        )


__all__ = ["CallLimits", "Piece", "StepArrays", "schedule"]
