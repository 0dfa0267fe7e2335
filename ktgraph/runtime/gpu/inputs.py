"""What a call brings to the GPU, in one block of host memory and one copy: ids and the batch.

There are two blocks, used in turn: while a step runs, the next one is described.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch

from ktgraph.ops.sample import COLUMNS
from ktgraph.runtime.cache import Ints
from ktgraph.runtime.gpu.device import GpuDevice, Step
from ktgraph.runtime.steps import StepArrays
from ktgraph.triton_kernels.batch import DeviceBatch

_ALIGN = 64  # bytes between the starts of two arrays are a multiple of this
BLOCKS = 2  # of host memory


@dataclass(frozen=True)
class Sizes:
    """A call's tokens, rows of logits and sequences."""

    tokens: int
    rows: int
    sequences: int


class Inputs:
    """i32 arrays at fixed addresses, so that a captured graph reads each call's own."""

    def __init__(
        self, device: GpuDevice, most: Sizes, table_width: int, windows: Sequence[int] = ()
    ) -> None:
        self.windows = (0, *windows)
        shapes = {
            "ids": (most.tokens,),
            "tok_seq": (most.tokens,),
            "tok_pos": (most.tokens,),
            "seq_start": (most.sequences + 1,),
            "kv_len": (most.sequences,),
            **{_table(w): (most.sequences, table_width) for w in self.windows},
            "out_rows": (most.rows,),
            "how": (most.sequences, COLUMNS),
        }
        starts: dict[str, int] = {}
        total = 0
        for name, shape in shapes.items():
            starts[name] = total // 4
            total += -(-4 * prod(shape) // _ALIGN) * _ALIGN
        blocks = [device.host(total).view(torch.int32) for _ in range(BLOCKS)]
        there = device.empty(total).view(torch.int32)
        for block in (*blocks, there):
            block.fill_(0)
        self._whole: list[Step] = [device.copy(b, there) for b in blocks]
        rest = starts["tok_seq"]
        self._but_ids: list[Step] = [device.copy(b[rest:], there[rest:]) for b in blocks]
        self._host = [
            {n: self._part(b, starts[n], s).numpy() for n, s in shapes.items()} for b in blocks
        ]
        self._gpu = {n: self._part(there, starts[n], s) for n, s in shapes.items()}
        self._turn = 0

    @staticmethod
    def _part(block: torch.Tensor, start: int, shape: tuple[int, ...]) -> torch.Tensor:
        return block[start : start + prod(shape)].view(shape)

    @property
    def ids(self) -> torch.Tensor:
        """i32[most tokens] on the GPU."""
        return self._gpu["ids"]

    @property
    def how(self) -> torch.Tensor:
        """i32[most sequences, 8] on the GPU: how the tokens of a call are chosen."""
        return self._gpu["how"]

    def set(self, ids: list[int] | None, step: StepArrays, how: Ints | None = None) -> Step:
        """Write a call's arrays; the step that brings them to the GPU.

        ids: None leaves those on the GPU as they are.  Nothing that was started may still read the
        arrays of the call before the last.
        """
        self._turn = (self._turn + 1) % BLOCKS
        t, q = step.tokens, step.sequences
        if ids is not None:
            self._write("ids", np.asarray(ids, np.int32))
        self._write("tok_seq", step.tok_seq[:t])
        self._write("tok_pos", step.tok_pos[:t])
        self._write("seq_start", step.seq_start[: q + 1])
        self._write("kv_len", step.kv_len[:q])
        for window in self.windows:
            self._write(_table(window), step.table(window)[:q])
        self._write("out_rows", step.out_rows[: step.rows])
        if how is not None:
            self._write("how", how)
        return (self._whole if ids is not None else self._but_ids)[self._turn]

    def _write(self, name: str, values: Ints) -> None:
        self._host[self._turn][name][: len(values)] = values

    def batches(
        self, sizes: Sizes, page_size: int, max_new: int, max_kv: int
    ) -> dict[int, DeviceBatch]:
        """The batch of each window in a call of these sizes, on the GPU."""
        whole = self._batch(sizes, page_size, max_new, max_kv)
        tables = {w: self._gpu[_table(w)][: sizes.sequences] for w in self.windows}
        return {w: replace(whole, block_table=table) for w, table in tables.items()}

    def _batch(self, sizes: Sizes, page_size: int, max_new: int, max_kv: int) -> DeviceBatch:
        t, q = sizes.tokens, sizes.sequences
        return DeviceBatch(
            tok_seq=self._gpu["tok_seq"][:t],
            tok_pos=self._gpu["tok_pos"][:t],
            seq_start=self._gpu["seq_start"][: q + 1],
            kv_len=self._gpu["kv_len"][:q],
            block_table=self._gpu[_table(0)][:q],
            out_rows=self._gpu["out_rows"][: sizes.rows],
            page_size=page_size,
            max_new=max_new,
            max_kv=max_kv,
        )


def _table(window: int) -> str:
    return f"block_table.{window}"


__all__ = ["BLOCKS", "Inputs", "Sizes"]
