"""Bits of the tokens that repetition penalties are for, where `sample.tokens` reads them."""

from __future__ import annotations

import torch

from ktgraph.runtime.cache import Ints
from ktgraph.runtime.gpu.device import GpuDevice, Step
from ktgraph.runtime.gpu.inputs import BLOCKS


class SeenTokens:
    """i32[most rows, words] on the GPU; host memory is used in turn, as that of `Inputs`."""

    def __init__(self, device: GpuDevice, most_rows: int, words: int) -> None:
        nbytes = 4 * most_rows * words
        self.device = device
        self.there = device.empty(nbytes).view(torch.int32).view(most_rows, words)
        blocks = [device.host(nbytes).view(torch.int32) for _ in range(BLOCKS)]
        self._host = [b.view(most_rows, words) for b in blocks]
        self._turn = 0

    def set(self, seen: Ints) -> Step:
        """Write the bits of a call's rows; the step that brings them to the GPU."""
        self._turn = (self._turn + 1) % BLOCKS
        here = self._host[self._turn][: len(seen)]
        here.numpy()[:] = seen
        return self.device.copy(here, self.there[: len(seen)])


__all__ = ["SeenTokens"]
