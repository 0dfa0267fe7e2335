"""`DeviceBatch`: the batch of a call in GPU memory, with what the host knows about its sizes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ktgraph.runtime.batch import Batch


@dataclass(frozen=True)
class DeviceBatch:
    """The same fields as `Batch`, as int32 device tensors.

    tok_seq[T], tok_pos[T]: sequence and position of each new token; seq_start[B+1]: where each
    sequence's tokens begin; kv_len[B]: cache rows of a sequence, the new tokens included;
    block_table[B, M]: page numbers; out_rows[O]: token rows whose logits are asked for.
    max_new, max_kv: upper bounds on the new tokens and the rows of one sequence.  Grids may depend
    on them; a captured graph is replayed with any batch within them.
    """

    tok_seq: torch.Tensor
    tok_pos: torch.Tensor
    seq_start: torch.Tensor
    kv_len: torch.Tensor
    block_table: torch.Tensor
    out_rows: torch.Tensor
    page_size: int
    max_new: int
    max_kv: int

    @property
    def tokens(self) -> int:
        return self.tok_seq.shape[0]

    @property
    def sequences(self) -> int:
        return self.kv_len.shape[0]

    @staticmethod
    def of(batch: Batch, device: torch.device | str, *, slack: int = 0) -> DeviceBatch:
        """A host batch on a device; `slack` rows are added to the bounds (for tests)."""
        new = batch.seq_start.diff().max() if batch.sequences else 0
        longest = batch.kv_len.max() if batch.sequences else 0
        return DeviceBatch(
            tok_seq=batch.tok_seq.to(device),
            tok_pos=batch.tok_pos.to(device),
            seq_start=batch.seq_start.to(device),
            kv_len=batch.kv_len.to(device),
            block_table=batch.block_table.to(device),
            out_rows=batch.out_rows.to(device),
            page_size=batch.page_size,
            max_new=int(new) + slack,
            max_kv=int(longest) + slack,
        )


__all__ = ["DeviceBatch"]
