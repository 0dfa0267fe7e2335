"""What an fx node stands for while its graph is imported.

Most nodes are tensors: a value of the IR under a permutation of its axes, so that the transposes
that models put around attention cancel instead of becoming ops.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ktgraph.ir.dims import Dim
from ktgraph.ir.graph import Value, WeightRef


@dataclass(frozen=True)
class Tensor:
    """Axis i of the tensor is axis ``order[i]`` of `base`."""

    base: Value | WeightRef
    order: tuple[int, ...]

    @staticmethod
    def of(base: Value | WeightRef, rank: int) -> Tensor:
        return Tensor(base, tuple(range(rank)))

    @property
    def is_plain(self) -> bool:
        return self.order == tuple(range(len(self.order)))

    def permuted(self, order: tuple[int, ...]) -> Tensor:
        return Tensor(self.base, tuple(self.order[i] for i in order))


@dataclass(frozen=True)
class Rows:
    """All cached rows of one part of a layer, ``[b, G, t, A]`` as the model sees them."""

    state: Value
    part: int
    layer: int


@dataclass(frozen=True)
class Tables:
    """Cosines and sines, which only rope reads: the frequencies stand for them."""

    freqs: WeightRef
    scaling: float


@dataclass
class Buffer:
    """An uninitialised tensor that is filled piece by piece along one axis."""

    axis: int | None = None
    pieces: dict[int, tuple[Dim, Tensor]] = field(default_factory=dict)  # start -> (size, piece)


@dataclass(frozen=True)
class BufferSlice:
    buffer: Buffer
    axis: int
    start: int
    size: Dim


@dataclass(frozen=True)
class Positions:
    """The positions input; the batch holds it."""


Imported = Tensor | Rows | Tables | Buffer | BufferSlice | Positions | Value | tuple | None
