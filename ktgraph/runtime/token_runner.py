"""`TokenRunner`: steps whose tokens the GPU chooses, started before the last ones are read.

    started = runner.start(requests, how)            # the prompts, say
    while ...:
        ahead = runner.start_next(started, how)      # runs on tokens that only the GPU knows yet
        tokens = runner.tokens(started)
        started = ahead

Rows of a sequence count once the tokens of their step are read; `drop` takes back those of a step
that nobody wants.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from ktgraph.errors import UnsupportedInputError
from ktgraph.ir.graph import Module
from ktgraph.ops.sample import COLUMNS
from ktgraph.runtime.cache import Ints
from ktgraph.runtime.errors import ExecutionError
from ktgraph.runtime.executor import Executor
from ktgraph.runtime.gpu.executor import GpuExecutor
from ktgraph.runtime.gpu.flights import Flight
from ktgraph.runtime.paged_runner import PagedRunner, Request, Rows, RunnerBusyError
from ktgraph.runtime.steps import CallLimits, Piece, schedule


@dataclass(eq=False)
class Started:
    """A step that was started.

    added: rows of each sequence, which do not count yet.  before: tokens of requests that ended in
    calls before the last.
    """

    added: dict[int, int]
    flight: Flight
    before: list[int]

    @property
    def seconds(self) -> float:
        """How long the step took on the GPU, once its tokens are read."""
        return self.flight.seconds


class TokenRunner(PagedRunner):
    """A paged runner over an executor; `samples` tells whether that chooses tokens."""

    def __init__(
        self, module: Module, executor: Executor | GpuExecutor, phases: dict[str, CallLimits]
    ) -> None:
        super().__init__(module, executor.shape, phases)
        self.executor = executor
        self._started: list[Started] = []  # whose rows do not count yet

    @property
    def samples(self) -> bool:
        """Whether the GPU chooses tokens itself: `start` needs that."""
        return isinstance(self.executor, GpuExecutor) and self.executor.samples

    def start(self, requests: Sequence[Request], how: Ints, seen: Ints | None = None) -> Started:
        """Append tokens to sequences and choose one behind each; does not wait for them.

        how: i32[requests, 8], rows of `ktgraph.ops.sample.settings`.  seen: i32[requests, words],
        tokens that a penalty is for (`ktgraph.ops.sample.mark`).  Raises what `forward` does.
        """
        with self._alone():
            return self._start(requests, how, seen, None)

    def start_next(self, started: Started, how: Ints, seen: Ints | None = None) -> Started:
        """Append the tokens that a step chooses, as `goes_on` allows, and choose one behind each.

        They count as seen whether they are marked or not.
        Raises ContextLimitError or CacheFullError when rows are missing.
        """
        if not self.goes_on(started):
            raise UnsupportedInputError(
                "the step's tokens are no longer on the GPU: read them, and start a step on them"
            )
        with self._alone():
            return self._start([(seq, [0]) for seq in started.added], how, seen, started)

    def goes_on(self, started: Started) -> bool:
        """Whether `start_next` may be called for a step: nothing else has run since."""
        executor = self.executor
        assert isinstance(executor, GpuExecutor)
        whole = started.flight.rows == len(started.added) and not started.before
        limits = self.phases[decode := self._phase_for(1)]
        fits = len(started.added) <= min(limits.batch, limits.rows, limits.tokens)
        mine = started in self._started
        return (
            mine
            and whole
            and fits
            and executor.can_overlap(decode)
            and executor.goes_on(started.flight)
        )

    def tokens(self, started: Started) -> list[int]:
        """The token behind each request, in order; the step's rows count from then on.

        Raises ExecutionError when it failed: then every sequence is as it was before the step.
        """
        with self._alone():
            try:
                found = self._gpu.land(started.flight)
            except BaseException:
                self._forget_lost([])
                raise
            self._started.remove(started)
            for seq, rows in started.added.items():
                self.sequences[seq].length += rows
        self._count(started.flight.taken)
        return [*started.before, *found]

    def drop(self, started: Started) -> None:
        """Let a step end and forget its rows."""
        with self._alone():
            try:
                with suppress(ExecutionError):  # nobody waits for its tokens
                    self._gpu.land(started.flight)
            finally:
                if started in self._started:
                    self._started.remove(started)
                self._forget_lost(started.added)

    def close(self, seq: int) -> None:
        """End a sequence and give its pages back."""
        super().close(seq)
        for started in self._started:
            started.added.pop(seq, None)

    def truncate(self, seq: int, n: int) -> None:
        """Forget all but the first `n` rows; raises RunnerBusyError while a step adds some."""
        self._check_idle([seq])
        super().truncate(seq, n)

    @property
    def _gpu(self) -> GpuExecutor:
        if not isinstance(self.executor, GpuExecutor) or not self.executor.samples:
            raise UnsupportedInputError(
                "the logits of this model are on the CPU, where tokens are chosen from them: use "
                "forward"
            )
        return self.executor

    def _checked(self, requests: Sequence[Request], logits: Rows) -> dict[int, Sequence[int]]:
        wanted = super()._checked(requests, logits)
        self._check_idle(wanted)
        return wanted

    def _check_idle(self, seqs: Iterable[int]) -> None:
        busy = next((seq for seq in seqs if self._pending(seq)), None)
        if busy is not None:
            raise RunnerBusyError(
                f"a step of sequence {busy} is under way: read its tokens, or drop it"
            )

    def _start(
        self,
        requests: Sequence[Request],
        how: Ints,
        seen: Ints | None,
        after: Started | None,
    ) -> Started:
        goes_on = after is not None
        wanted = dict(requests) if goes_on else self._checked(requests, "last")
        pending = {seq: self._pending(seq) for seq in wanted}
        past = {seq: self.sequences[seq].length + rows for seq, rows in pending.items()}
        added = {seq: len(ids) for seq, ids in wanted.items()}
        lengths = list(added.values())
        phase = self._phase_for(max(lengths))
        calls = list(schedule(lengths, self.phases[phase], all_rows=False))

        def start(pieces: list[Piece]) -> Flight:
            ids = self._describe(requests, past, pieces, all_rows=False)
            ended = [p.request for p in pieces if p.is_last]
            rows = how[ended] if ended else np.zeros((1, COLUMNS), np.int32)
            marked = seen[ended or [0]] if seen is not None else None
            return self._gpu.start(phase, None if goes_on else ids, self._step, rows, marked)

        try:
            self.sequences.reserve({seq: pending[seq] + rows for seq, rows in added.items()})
            before: list[int] = []
            for pieces in calls[:-1]:  # one after the other
                flight = start(pieces)
                before += self._gpu.land(flight)[: sum(p.is_last for p in pieces)]
                self._count(flight.taken)
            flight = start(calls[-1])
        except BaseException:
            self._forget_lost(added)
            raise
        self._started.append(Started(added, flight, before))
        return self._started[-1]

    def _pending(self, seq: int) -> int:
        """Rows of a sequence that do not count yet."""
        return sum(started.added.get(seq, 0) for started in self._started)

    def _forget_lost(self, seqs: Iterable[int]) -> None:
        """After a failure: of these sequences, and those of lost steps, only known rows stay."""
        lost = [s for s in self._started if s.flight.lost]
        self._started = [s for s in self._started if not s.flight.lost]
        touched = {*seqs, *(seq for started in lost for seq in started.added)}
        counted = {s: self.sequences[s].length for s in touched if s in self.sequences}
        self.sequences.restore({s: rows + self._pending(s) for s, rows in counted.items()})
        for seq, rows in counted.items():
            self.sequences[seq].length = rows

    @abstractmethod
    def _count(self, tokens: int) -> None:
        """Note that a call of so many tokens has ended."""


__all__ = ["Started", "TokenRunner"]
