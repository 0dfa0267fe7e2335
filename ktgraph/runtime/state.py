"""`State`: the reference value of a ``kv`` state, functional: an append returns a new one."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class State:
    """parts[p] has shape [layers, C, *row]; rows are addressed by `Batch.slots`/`Batch.rows`."""

    parts: tuple[torch.Tensor, ...]

    def append(self, layer: int, slots: torch.Tensor, rows: tuple[torch.Tensor, ...]) -> State:
        """A state with `rows[p]` ([T, *row]) written at `slots` of one layer."""
        parts: list[torch.Tensor] = []
        for part, new in zip(self.parts, rows, strict=True):
            copy = part.clone()
            copy[layer, slots] = new.to(part.dtype)
            parts.append(copy)
        return State(tuple(parts))

    def read(self, part: int, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """Rows of one layer of one part, [len(rows), *row]."""
        return self.parts[part][layer, rows]
