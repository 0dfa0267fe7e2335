"""Steps of a generation: a token for every sequence of a batch, chosen where that is quickest.

A runner that chooses tokens itself is kept one step ahead: the next step is started on tokens that
only the GPU knows, before those are read here.  When a sequence ends on such a token, the step that
was started has a row too many, whose token is left out; when all end, it is dropped.  With another
runner a step is a `forward` and a choice here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
from torch import Tensor

from ktgraph.runtime.cache import CacheFullError, Ints
from ktgraph.sampling import Sampler

Requests = Sequence[tuple[int, Sequence[int]]]


class LogitsRunner(Protocol):
    """What gives logits (see `ktgraph.generate.Runner`)."""

    def forward(self, requests: Requests) -> Tensor: ...


@runtime_checkable
class ChoosingRunner(Protocol):
    """What chooses tokens itself, if it `samples` (ktgraph/runtime/token_runner.py)."""

    @property
    def samples(self) -> bool: ...
    def start(self, requests: Requests, how: Ints, seen: Ints | None) -> Any: ...
    def start_next(self, started: Any, how: Ints, seen: Ints | None) -> Any: ...
    def goes_on(self, started: Any) -> bool: ...
    def tokens(self, started: Any) -> list[int]: ...
    def drop(self, started: Any) -> None: ...


class Work(Protocol):
    """A sequence at work: its tokens that were not run yet, and what chooses the next."""

    seq: int | None
    sampler: Sampler
    pending: list[int]

    @property
    def is_at_end(self) -> bool:
        """Whether it ends with its next token, whatever that is."""
        ...

    @property
    def has_ended(self) -> bool: ...


W = TypeVar("W", bound=Work)
Batch = list[tuple[W, list[int]]]


class Steps(Generic[W]):
    """Runs batches on a runner."""

    def __init__(self, runner: LogitsRunner) -> None:
        self._runner = runner
        self._chooser: ChoosingRunner | None = None
        if isinstance(runner, ChoosingRunner) and runner.samples:
            self._chooser = runner
        self._started: list[tuple[Any, list[W]]] = []  # steps whose tokens were not read, in order

    def ahead(self) -> Batch[W]:
        """The batch that must be run next, for it was started; empty where none was."""
        works = self._started[0][1] if self._started else []
        batch = [(w, list(w.pending)) for w in works if not w.has_ended]
        if not batch:
            self.drop()
        return batch

    def run(self, batch: Batch[W], *, is_all: bool) -> tuple[list[int | None], float]:
        """The token behind each sequence, None where tokens are left to run; and the seconds.

        is_all: no other sequence is active, so that the next batch can be known before the tokens.
        A sampler counts its token as taken.
        """
        began = time.perf_counter()
        ends = [len(ids) == len(work.pending) for work, ids in batch]
        if self._chooser is None:
            rows = self._runner.forward([(_seq(w), ids) for w, ids in batch])
            seconds = time.perf_counter() - began
            given = zip(batch, rows, ends, strict=True)
            return [w.sampler.choose(r) if e else None for (w, _), r, e in given], seconds
        found, inside = self._chosen(self._chooser, batch, is_all and all(ends))
        given = zip(batch, found, ends, strict=True)
        tokens = [self._taken(w, token) if e else None for (w, _), token, e in given]
        return tokens, max(inside, time.perf_counter() - began)

    def drop(self) -> None:
        """Let steps that were started end, and forget them."""
        while self._started and self._chooser is not None:
            self._chooser.drop(self._started.pop()[0])

    def _chosen(
        self, chooser: ChoosingRunner, batch: Batch[W], may_go_on: bool
    ) -> tuple[list[int], float]:
        """The tokens of a batch, and the step's own seconds; the step after it is started."""
        works = [w for w, _ in batch]
        if not self._started:
            requests = [(_seq(w), ids) for w, ids in batch]
            self._started.append((chooser.start(requests, *_choices(works)), works))
        started, rows = self._started[0]
        goes_on = may_go_on and len(rows) == len(works) and not any(w.is_at_end for w in works)
        if goes_on and chooser.goes_on(started):
            with suppress(
                CacheFullError
            ):  # rows that these texts may not need: raised when they do
                following = chooser.start_next(started, *_choices(works, ahead=1))
                self._started.append((following, works))
        found = dict(zip(map(id, rows), chooser.tokens(started), strict=True))
        del self._started[0]
        return [found[id(w)] for w in works], float(started.seconds)

    @staticmethod
    def _taken(work: W, token: int) -> int:
        work.sampler.take(token)
        return token


def _choices(works: Sequence[Work], ahead: int = 0) -> tuple[Ints, Ints | None]:
    """How tokens are chosen, and those that a penalty is for, if there is one."""
    how = np.stack([w.sampler.settings(ahead) for w in works])
    marked = [w.sampler.seen for w in works]
    some = next((m for m in marked if m is not None), None)
    if some is None:
        return how, None
    return how, np.stack([np.zeros_like(some) if m is None else m for m in marked])


def _seq(work: Work) -> int:
    assert work.seq is not None
    return work.seq


__all__ = ["Batch", "ChoosingRunner", "LogitsRunner", "Steps", "Work"]
