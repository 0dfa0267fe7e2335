"""`Batch`: which token of a call belongs to which sequence, its position, and its cache rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass
class Batch:
    """The run-time value of IR type ``batch``.  All tensors are int32 on the CPU.

    tok_seq[T], tok_pos[T]: sequence and position of each new token; seq_start[B+1]: where each
    sequence's tokens begin; kv_len[B]: cache rows of a sequence, the new tokens included;
    block_table[B, M]: page numbers; out_rows[O]: token rows whose logits are asked for.
    """

    tok_seq: torch.Tensor
    tok_pos: torch.Tensor
    seq_start: torch.Tensor
    kv_len: torch.Tensor
    block_table: torch.Tensor
    page_size: int
    out_rows: torch.Tensor

    @property
    def tokens(self) -> int:
        return int(self.tok_seq.numel())

    @property
    def sequences(self) -> int:
        return int(self.kv_len.numel())

    @staticmethod
    def build(
        past: Sequence[int],
        new: Sequence[int],
        tables: Sequence[Sequence[int]],
        page_size: int,
        out_rows: Sequence[int] | None = None,
    ) -> Batch:
        """Sequence q has `past[q]` cached rows and `new[q]` tokens; `tables[q]` are its pages.

        `out_rows` defaults to the last token of each sequence.
        """
        starts = [0]
        for count in new:
            starts.append(starts[-1] + count)
        width = max((len(t) for t in tables), default=0)
        padded = [list(t) + [0] * (width - len(t)) for t in tables]
        seq = [q for q, count in enumerate(new) for _ in range(count)]
        pos = [past[q] + i for q, count in enumerate(new) for i in range(count)]
        rows = [s - 1 for s in starts[1:]] if out_rows is None else list(out_rows)
        return Batch(
            _ints(seq),
            _ints(pos),
            _ints(starts),
            _ints([p + n for p, n in zip(past, new, strict=True)]),
            _ints(padded).reshape(len(new), width),
            page_size,
            _ints(rows),
        )

    def slots(self) -> torch.Tensor:
        """Cache row of each new token, int64[T]."""
        pos = self.tok_pos.long()
        page = self.block_table[self.tok_seq.long(), pos // self.page_size].long()
        return page * self.page_size + pos % self.page_size

    def rows(self, sequence: int, window: int = 0) -> torch.Tensor:
        """Cache rows of a sequence in order of position, int64[kv_len].

        With a window only those that its new tokens look back to: older ones may be gone.
        """
        first = int(self.tok_pos[self.seq_start[sequence]]) if window else 0
        pos = torch.arange(max(0, first - window + 1) if window else 0, int(self.kv_len[sequence]))
        return self.block_table[sequence, pos // self.page_size].long() * self.page_size + (
            pos % self.page_size
        )

    def span(self, sequence: int) -> slice:
        """The tokens of a sequence."""
        return slice(int(self.seq_start[sequence]), int(self.seq_start[sequence + 1]))


def _ints(values: Sequence[object]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
