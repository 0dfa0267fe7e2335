"""Weights as kernels read them: tiles for matrices, dense tensors for the rest, each made once.

Loading streams: a stack of experts is read, quantized and packed one expert at a time, so the
checkpoint never exists twice.  Tiles of several weights are made side by side.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from math import prod
from typing import Any

import torch

from ktgraph.ir.types import DTYPES
from ktgraph.ops.tensor import torch_dtype
from ktgraph.runtime.native import dense_dtype, native_dense, native_weight, packed_nbytes
from ktgraph.runtime.operands import WeightUse
from ktgraph.runtime.weight_views import WeightView
from ktgraph.weights.evaluate import WeightEvaluator

_SHOW_PROGRESS = 1 << 30  # bytes of weights from which loading shows a bar, on a terminal
_WORKERS = 4  # weights packed side by side, at most; each holds one expert in memory

Advance = Callable[[str, int], None]  # what was loaded, and its bytes


def use_nbytes(use: WeightUse) -> int:
    """Bytes that a weight takes in memory, from its type alone."""
    if use.form == "tile":
        return packed_nbytes(use)
    return prod(d.const() for d in use.type.dims) * DTYPES[dense_dtype(use)]


class LoadedWeights:
    """Every weight a plan uses, by `WeightUse.key`.

    `owner` keeps alive what the tensors are views of, such as a mapped file.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], owner: object = None) -> None:
        self.tensors = dict(tensors)
        self._owner = owner
        self._packed: dict[str, Any] = {}  # what kernels of a GPU take, by key

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    def native(self, use: WeightUse) -> Any:
        """The engine's object of a packed or dense weight."""
        found = self.tensors[use.key]
        if use.form == "tile":
            return native_weight(use, found.data_ptr(), found.nbytes)
        return native_dense(use, found.data_ptr())

    def with_gpu(self, uses: Sequence[WeightUse], gpu: torch.device) -> LoadedWeights:
        """The same weights, those that a GPU's ops read copied there."""
        there = {u.key for u in uses if u.device != "cpu"}
        tensors = {k: t.to(gpu) if k in there else t for k, t in self.tensors.items()}
        return LoadedWeights(tensors, self._owner)

    def with_views(self, views: Mapping[str, WeightView]) -> LoadedWeights:
        """The same weights and views of them, which share their memory."""
        made = {key: view.of(self.tensors[view.base]) for key, view in views.items()}
        return LoadedWeights({**self.tensors, **made}, self._owner)

    def on_gpu(self, use: WeightUse, packed: Callable[[torch.Tensor, WeightUse], Any]) -> Any:
        """The tensor of a dense weight, or what `packed` makes of the bytes of a packed one."""
        if use.form != "tile":
            return self.tensors[use.key]
        if use.key not in self._packed:
            self._packed[use.key] = packed(self.tensors[use.key], use)
        return self._packed[use.key]

    def value(self, use: WeightUse) -> torch.Tensor:
        """The dense tensor of a weight that a torch reference reads."""
        return self.tensors[use.key]


def load_weights(
    uses: Sequence[WeightUse],
    evaluator: WeightEvaluator,
    threads: int = 1,
    gpu: torch.device | None = None,
) -> LoadedWeights:
    """Evaluate and pack every weight; those that a GPU's ops read go to `gpu`, one at a time.

    Raises WeightError or WeightSourceError naming a weight that the source does not have.
    """
    made = packed_weights(uses, evaluator, threads)
    return LoadedWeights({u.key: t.to(gpu) if u.device != "cpu" else t for u, t in made})


def packed_weights(
    uses: Sequence[WeightUse], evaluator: WeightEvaluator, threads: int = 1
) -> Iterator[tuple[WeightUse, torch.Tensor]]:
    """Each weight in order, evaluated and packed, the next few side by side, with a bar."""
    workers = max(1, min(threads, _WORKERS))
    pool = ThreadPoolExecutor(workers)
    ahead: deque[tuple[WeightUse, Future[torch.Tensor]]] = deque()
    waiting = iter(uses)
    try:
        with _progress(sum(map(use_nbytes, uses))) as advance:
            while True:
                for use in islice(waiting, workers - len(ahead)):
                    ahead.append((use, pool.submit(_made, evaluator, use)))
                if not ahead:
                    return
                use, made = ahead.popleft()
                yield use, made.result()
                advance(use.key, use_nbytes(use))
    finally:
        pool.shutdown(cancel_futures=True)  # after an error, what has not begun is left


def packing_nbytes(uses: Sequence[WeightUse], threads: int) -> int:
    """About the most bytes that `packed_weights` holds at a time, when none is kept."""
    workers = max(1, min(threads, _WORKERS))
    largest = sorted((use_nbytes(u) + _matrix_nbytes(u) for u in uses), reverse=True)
    return sum(largest[: workers + 1])


def _matrix_nbytes(use: WeightUse) -> int:
    """One matrix of a weight as float32: an expert is read and packed at a time."""
    return prod(d.const() for d in use.type.dims[-2:]) * 4


def _made(evaluator: WeightEvaluator, use: WeightUse) -> torch.Tensor:
    return _tiles(evaluator, use) if use.form == "tile" else _dense(use, evaluator)


def _tiles(evaluator: WeightEvaluator, use: WeightUse) -> torch.Tensor:
    (packed,) = evaluator.stored(use.ref, use.index)
    return packed


def _dense(use: WeightUse, evaluator: WeightEvaluator) -> torch.Tensor:
    """A copy in pages of its own: sources may give views of mapped files or of a live model."""
    if use.form == "stored":
        (value,) = evaluator.stored(use.ref, use.index)
    else:
        value = evaluator.tensor(use.ref, use.index)
    dtype = torch_dtype(dense_dtype(use))
    kept = _own_pages(value.numel() * dtype.itemsize).view(dtype).view(value.shape)
    return kept.copy_(value)


def _own_pages(nbytes: int) -> torch.Tensor:
    """uint8 memory that shares no page with other memory."""
    from ktgraph.cpu_kernels import NativeMissingError, load_native

    try:
        return torch.as_tensor(load_native().empty_packed(nbytes))
    except NativeMissingError:  # it may share one, and `pin` refuses it where a GPU copies from it
        return torch.empty(nbytes, dtype=torch.uint8)


@contextmanager
def _progress(total: int) -> Generator[Advance]:
    if total < _SHOW_PROGRESS or not sys.stderr.isatty():
        yield lambda name, nbytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("packing weights"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("weights", total=total)
        yield lambda name, nbytes: bar.advance(task, nbytes)


__all__ = ["LoadedWeights", "load_weights", "packed_weights", "packing_nbytes", "use_nbytes"]
