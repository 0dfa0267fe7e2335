"""Ragged batches over paged caches with NaN in every row that no sequence wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ktgraph.runtime.batch import Batch
from ktgraph.runtime.state import State
from ktgraph.triton_kernels.batch import DeviceBatch

LAYERS, LAYER = 2, 1


@dataclass(frozen=True)
class Ragged:
    """The batch, random numbers, and where kernels run."""

    batch: Batch
    rng: torch.Generator
    device: torch.device

    @staticmethod
    def make(
        past: Sequence[int], new: Sequence[int], device: torch.device, *, page: int, seed: int = 0
    ) -> Ragged:
        rng = torch.Generator().manual_seed(seed)
        counts = [-(-(p + n) // page) for p, n in zip(past, new, strict=True)]
        order = torch.randperm(sum(counts) + 2, generator=rng).tolist()
        tables = [[order.pop() for _ in range(c)] for c in counts]
        return Ragged(Batch.build(past, new, tables, page), rng, device)

    def on_device(self, slack: int = 0) -> DeviceBatch:
        return DeviceBatch.of(self.batch, self.device, slack=slack)

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=self.rng).to(dtype)

    def cache(self, *rows: Sequence[int], dtype: torch.dtype) -> State:
        """One part per row shape."""
        written = torch.cat([self.batch.rows(s) for s in range(self.batch.sequences)])
        capacity = (int(self.batch.block_table.max()) + 3) * self.batch.page_size
        parts: list[torch.Tensor] = []
        for row in rows:
            part = torch.full([LAYERS, capacity, *row], float("nan"), dtype=dtype)
            part[LAYER, written] = self.randn(len(written), *row, dtype=dtype)
            parts.append(part)
        return State(tuple(parts))

    def moved(self, state: State) -> State:
        return State(tuple(p.to(self.device) for p in state.parts))


def strided(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same values with gaps of NaN between heads and tokens."""
    wide = torch.full([*x.shape[:-1], x.shape[-1] + 16], float("nan"), dtype=x.dtype, device=device)
    wide[..., : x.shape[-1]] = x.to(device)
    return wide[..., : x.shape[-1]]


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def nmse(got: torch.Tensor, want: torch.Tensor) -> float:
    wide = want.double()
    return float((got.detach().cpu().double() - wide).square().sum() / wide.square().sum())


def widened(*values: torch.Tensor | State | None) -> list[torch.Tensor | State | None]:
    """The same operands in f64, for a reference whose own rounding does not count."""
    out: list[torch.Tensor | State | None] = []
    for x in values:
        if isinstance(x, State):
            out.append(State(tuple(p.double() for p in x.parts)))
        else:
            out.append(None if x is None else x.double())
    return out


__all__ = ["LAYER", "Ragged", "nmse", "poisoned", "strided", "widened"]
