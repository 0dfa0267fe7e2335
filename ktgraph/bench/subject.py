"""What can be measured: a library that runs routed experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ktgraph.bench.shapes import Shape
from ktgraph.bench.source import Batch, Expert, Source
from ktgraph.errors import KtgraphError


class CannotRunError(KtgraphError):
    """A subject that is not installed, or cannot take this shape, format or CPU; says why."""


class Stack(Protocol):
    """Layers with physical weights in memory."""

    @property
    def bytes_of_expert(self) -> int:
        """What reading one expert's weights and scales takes."""
        ...

    @property
    def expert(self) -> Expert | None:
        """Dequantized gate, up, down of an expert; None where it cannot be told."""
        ...

    def prepare(self, batch: Batch) -> Runner:
        """Plans and buffers for a batch size."""
        ...

    def close(self) -> None:
        """Frees the weights."""
        ...


class Runner(Protocol):
    """One batch on a stack."""

    def load_ids(self) -> None:
        """Takes over changed batch.ids; not timed."""
        ...

    def run(self, layers: Sequence[int]) -> None:
        """Runs these layers, each on the same x; timed. Layers are all of them, or one."""
        ...

    def output(self) -> Tensor:
        """[T, D] of the last layer that ran; not timed."""
        ...


class Subject(Protocol):
    """A library and one of its formats."""

    @property
    def name(self) -> str:
        """As "ktgraph", "kt-kernel AMXInt4"."""
        ...

    @property
    def format(self) -> str:
        """As "int4:64", "q4_K"."""
        ...

    def nbytes(self, shape: Shape) -> int:
        """About the bytes of one layer's weights. Raises CannotRunError."""
        ...

    def build(self, shape: Shape, source: Source, layers: int, threads: int) -> Stack:
        """Packs and copies the weights. Raises CannotRunError."""
        ...
