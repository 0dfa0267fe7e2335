"""Random experts and routing: the inputs that every subject gets, and what must come out.

Few experts are really different; a stack holds physical copies of them in turn (expert e is a copy
of source e % n), so that gigabytes are filled in seconds.  Bytes count for speed, values do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ktgraph.bench.shapes import Shape

MOST_SOURCES = 5  # not a power of two: an expert taken for another one shows
SOURCE_BYTES = 1 << 30
CHECKED_TOKENS = 24


@dataclass(frozen=True)
class Source:
    """n experts, bf16: gate and up [n, F, D], down [n, D, F]."""

    shape: Shape
    gate: Tensor
    up: Tensor
    down: Tensor

    @property
    def count(self) -> int:
        return self.gate.shape[0]

    def expert(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """gate, up, down of an expert of the stack in f32."""
        n = index % self.count
        return self.gate[n].float(), self.up[n].float(), self.down[n].float()


def make_source(shape: Shape, seed: int = 0) -> Source:
    """Gaussian weights of the usual spread (one over the square root of the inputs)."""
    fits = SOURCE_BYTES // (2 * shape.weights_of_expert)
    n = max(2, min(MOST_SOURCES, shape.experts, fits))
    rng = torch.Generator().manual_seed(seed)

    def normal(rows: int, cols: int) -> Tensor:
        whole = torch.empty(n, rows, cols, dtype=torch.bfloat16)
        for one in whole:
            one.copy_(torch.randn(rows, cols, generator=rng) * cols**-0.5)
        return whole

    d, f = shape.hidden, shape.width
    return Source(shape, normal(f, d), normal(f, d), normal(d, f))


@dataclass
class Batch:
    """Inputs of one cell: x bf16[T, D], weights f32[T, K], and ids i32[T, K] for each layer."""

    x: Tensor
    weights: Tensor
    ids: list[Tensor]

    @property
    def tokens(self) -> int:
        return self.x.shape[0]


def make_batch(shape: Shape, tokens: int, layers: int, seed: int = 1) -> Batch:
    """Normal activations, positive weights that sum to one."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, shape.hidden, generator=rng).bfloat16()
    weights = torch.rand(tokens, shape.top_k, generator=rng) + 0.1
    weights /= weights.sum(1, keepdim=True)
    ids = [torch.zeros(tokens, shape.top_k, dtype=torch.int32) for _ in range(layers)]
    return Batch(x, weights, ids)


class Deck:
    """Random routing of one layer whose experts come back as late as they can.

    Which slots share an expert is random (every token draws top_k of E); which experts these are
    is decided by use: the least recently used ones.  So a short batch repeated many times walks
    through all the weights instead of finding some of them in a cache.

    Drawn by numpy: a draw lies between timed runs, and torch's OpenMP threads go on spinning for
    milliseconds after an operation, on the cores of what is measured.
    """

    def __init__(self, shape: Shape, seed: int) -> None:
        self._shape = shape
        self._rng = np.random.default_rng(seed)
        self._order = self._rng.permutation(shape.experts)  # least recent first

    def draw(self, ids: Tensor) -> int:
        """Fills ids i32[T, K]; returns how many different experts they name."""
        noise = self._rng.random((ids.shape[0], self._shape.experts), dtype=np.float32)
        labels = noise.argsort(1)[:, : self._shape.top_k]
        distinct, where = np.unique(labels, return_inverse=True)
        used = len(distinct)
        order = self._order[:used]
        ids.numpy()[:] = order[where.reshape(labels.shape)]
        self._order = np.concatenate([self._order[used:], self._rng.permutation(order)])
        return used


def checked_tokens(tokens: int) -> Tensor:
    """Which tokens parity looks at: all of a few, else a spread with the first and the last."""
    if tokens <= CHECKED_TOKENS:
        return torch.arange(tokens)
    return torch.linspace(0, tokens - 1, CHECKED_TOKENS).long()


Expert = Callable[[int], tuple[Tensor, Tensor, Tensor]]  # index -> gate, up, down in f32


def expected(expert: Expert, count: int, batch: Batch, layer: int, tokens: Tensor) -> Tensor:
    """f32[len(tokens), D]: the layer in float32. `count`: different experts of the stack."""
    ids: Any = batch.ids[layer][tokens].long() % count
    x, weights = batch.x[tokens].float(), batch.weights[tokens]
    y: Any = torch.zeros_like(x)
    for index in ids.unique().tolist():
        row, slot = (ids == index).nonzero(as_tuple=True)
        gate, up, down = expert(index)
        inner = torch.nn.functional.silu(x[row] @ gate.T) * (x[row] @ up.T)
        y.index_add_(0, row, weights[row, slot, None] * (inner @ down.T))
    return y


def errors_of(got: Tensor, want: Tensor) -> tuple[float, float]:
    """(of all, of the worst token): norm of the difference over the norm of what is wanted."""
    difference: Any = got.float() - want
    signal: Any = want
    whole = float(difference.norm() / signal.norm())
    worst = float((difference.norm(dim=1) / signal.norm(dim=1)).max())
    return whole, worst


def draw_all(decks: Sequence[Deck], batch: Batch, layers: Sequence[int]) -> int:
    """New ids for some layers; the sum of experts they touch."""
    return sum(decks[i].draw(batch.ids[i]) for i in layers)
