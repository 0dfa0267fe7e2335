"""`PagedRunner`: sequences over a paged cache, and `forward`, which appends tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Literal

import torch
from torch import Tensor

from ktgraph.errors import KtgraphError, UnsupportedInputError
from ktgraph.ir.graph import Function, Module
from ktgraph.ir.types import TensorType
from ktgraph.runtime.arena import PlanError
from ktgraph.runtime.cache import CacheShape, SequenceTable
from ktgraph.runtime.steps import CallLimits, Piece, StepArrays, schedule

Request = tuple[int, Sequence[int]]  # sequence number, its new tokens
Rows = Literal["last", "all"]


class RunnerBusyError(KtgraphError, RuntimeError):
    """A call while another one runs."""


class PagedRunner(ABC):
    """Sequences, pages and the cutting of requests into calls; subclasses run one call."""

    def __init__(self, module: Module, shape: CacheShape, phases: dict[str, CallLimits]) -> None:
        first = next(iter(module.functions.values()))
        self.module = module
        self.shape = shape
        self.phases = phases
        self.vocabulary = _vocabulary(module, first)
        self.max_tokens = max(p.tokens for p in phases.values())
        self.max_batch = max(p.batch for p in phases.values())
        self.sequences = SequenceTable(shape)
        self._lock = Lock()
        width = shape.pages_for(shape.sequence_rows)
        rows = max(p.rows for p in phases.values())
        windows = [w for w, _ in shape.windows]
        self._step = StepArrays(self.max_tokens, self.max_batch, rows, width, windows)

    @property
    def context(self) -> int:
        """Most rows of one sequence."""
        return self.shape.sequence_rows

    @property
    def cache_rows(self) -> int:
        return self.shape.rows

    @property
    def page_size(self) -> int:
        return self.shape.page_size

    def open(self) -> int:
        """A new, empty sequence."""
        return self.sequences.open()

    def close(self, seq: int) -> None:
        """End a sequence and give its pages back."""
        self.sequences.close(seq)

    def length(self, seq: int) -> int:
        """Cache rows of a sequence."""
        return self.sequences[seq].length

    def truncate(self, seq: int, n: int) -> None:
        """Forget all but the first `n` rows."""
        self.sequences.truncate(seq, n)

    def forward(self, requests: Sequence[Request], logits: Rows = "last") -> Tensor:
        """Append tokens to sequences and run the model on them.

        Gives f32[O, VOC]: the row of each request's last token, or of every token, in order.
        Sequences of any lengths share calls; long requests are cut into several.  After an error
        or Ctrl-C every sequence is as it was before the call.

        Raises UnknownSequenceError, UnsupportedInputError for ids that are no tokens,
        ContextLimitError or CacheFullError when rows are missing, RunnerBusyError on re-entry.
        """
        with self._alone():
            return self._forward(requests, logits)

    @contextmanager
    def _alone(self) -> Generator[None]:
        """One caller at a time; raises RunnerBusyError."""
        if not self._lock.acquire(blocking=False):
            raise RunnerBusyError(
                "forward is running already, in another thread or below this call: a runner "
                "serves one caller at a time. Wait for it, or make a second runner"
            )
        try:
            yield
        finally:
            self._lock.release()

    def _forward(self, requests: Sequence[Request], logits: Rows) -> Tensor:
        wanted = self._checked(requests, logits)
        before = {seq: self.sequences[seq].length for seq in wanted}
        try:
            self.sequences.reserve({seq: len(ids) for seq, ids in wanted.items()})
            found = self._run(requests, before, logits == "all")
            for seq, ids in wanted.items():
                self.sequences[seq].length += len(ids)
        except BaseException:
            self.sequences.restore(before)
            raise
        return found

    def _checked(self, requests: Sequence[Request], logits: Rows) -> dict[int, Sequence[int]]:
        if logits not in ("last", "all"):
            raise UnsupportedInputError(f'logits={logits!r}: expected "last" or "all"')
        if not requests:
            raise UnsupportedInputError("no requests: expected at least one (sequence, tokens)")
        wanted = dict(requests)
        if len(wanted) != len(requests):
            raise UnsupportedInputError("a sequence may be in a call once: join its tokens")
        for seq, ids in wanted.items():
            if len(ids) == 0:
                raise UnsupportedInputError(f"sequence {seq}: no tokens were given")
            if min(ids) < 0 or max(ids) >= self.vocabulary:
                wrong = next(i for i in ids if not 0 <= i < self.vocabulary)
                raise UnsupportedInputError(
                    f"sequence {seq}: token {wrong} is outside the vocabulary of {self.vocabulary}"
                )
        return wanted

    def _run(self, requests: Sequence[Request], before: dict[int, int], all_rows: bool) -> Tensor:
        lengths = [len(ids) for _, ids in requests]
        phase = self._phase_for(max(lengths))
        rows: list[Tensor] = []
        for pieces in schedule(lengths, self.phases[phase], all_rows):
            wanted = all_rows or any(p.is_last for p in pieces)
            ids = self._describe(requests, before, pieces, all_rows)
            found = self._call(phase, ids)
            if wanted:
                rows.append(found)
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _phase_for(self, most_new: int) -> str:
        """The phase with the smallest bound that fits, else the one with the largest."""
        bounds = {name: limits.max_q for name, limits in self.phases.items()}
        fitting = {name: q for name, q in bounds.items() if q >= most_new}
        return (
            min(fitting, key=fitting.__getitem__)
            if fitting
            else max(bounds, key=bounds.__getitem__)
        )

    def _describe(
        self,
        requests: Sequence[Request],
        before: dict[int, int],
        pieces: list[Piece],
        all_rows: bool,
    ) -> list[int]:
        """Write the call's arrays; returns its token ids."""
        step = self._step
        step.begin()
        ids: list[int] = []
        spans: dict[int, tuple[int, int]] = {}
        for piece in pieces:
            seq = requests[piece.request][0]
            spans[seq] = (before[seq] + piece.start, before[seq] + piece.stop)
        self.sequences.advance(spans)
        for piece in pieces:
            seq, tokens = requests[piece.request]
            step.add(spans[seq][0], piece.tokens, *self.sequences[seq].tables)
            ids += tokens if piece.tokens == len(tokens) else tokens[piece.start : piece.stop]
            if piece.is_last and not all_rows:
                step.want(step.tokens - 1)
        if all_rows:
            step.want_all()
        elif step.rows == 0:
            step.want(step.tokens - 1)  # a call has one row of logits at least
        return ids

    @abstractmethod
    def _call(self, phase: str, ids: list[int]) -> Tensor:
        """Run the call that `self._step` describes; f32[rows, VOC], memory of its own."""


def _vocabulary(module: Module, func: Function) -> int:
    logits = next((v.type for v in func.body.returns if isinstance(v.type, TensorType)), None)
    if logits is None:
        raise PlanError(f"@{func.name} returns no logits")
    return logits.dims[-1].at(module.dims)


__all__ = ["PagedRunner", "Request", "Rows", "RunnerBusyError"]
