"""Generation: prompts share ragged batches, each has its own sampler, text and end.

A step runs one token of every sequence that is past its prompt, then fills the call with pieces of
prompts that are not.  A sequence that ends leaves the batch and makes room for the next prompt.
`ktgraph/stepping.py` runs the steps.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from ktgraph.errors import ContextLimitError, UnsupportedInputError, is_whole
from ktgraph.sampling import Sampler, Sampling
from ktgraph.stepping import Batch, Steps
from ktgraph.tokenizer import TextPieces, Tokenizer

Finish = Literal["eos", "stop", "length", "context", "interrupted"]


class Runner(Protocol):
    """What runs a compiled model step by step (ktgraph/runtime/runner.py)."""

    def open(self) -> int:
        """A new, empty sequence."""
        ...

    def close(self, seq: int) -> None:
        """Give the sequence's cache rows back."""
        ...

    def length(self, seq: int) -> int:
        """Cache rows of a sequence."""
        ...

    def truncate(self, seq: int, n: int) -> None:
        """Forget all but the first `n` rows."""
        ...

    def forward(
        self, requests: Sequence[tuple[int, Sequence[int]]], logits: Literal["last", "all"] = "last"
    ) -> Tensor:
        """Append tokens to sequences; f32[O, VOC], O = one row a request, or one a token."""
        ...


@dataclass(frozen=True)
class Limits:
    """What the model was compiled for."""

    max_tokens: int  # new tokens in one call
    max_batch: int  # sequences in one call
    context: int  # rows of one sequence
    cache_rows: int  # rows of the whole cache
    page_size: int
    vocabulary: int
    positions: int | None = None  # that the model was made for: no context is longer

    @property
    def rows(self) -> int:
        """Most cache rows that one sequence can have."""
        return min(self.context, self.cache_rows // self.page_size * self.page_size)

    def way_out(self, shorter: str, rows: int) -> str:
        """What to do where a sequence needs more rows: a longer context only if there is one."""
        if self.positions is not None and rows > self.positions:
            return f"{shorter}: the model was made for {self.positions} positions"
        return f"{shorter}, or compile with context={rows} or more"

    def pages(self, rows: int) -> int:
        return -(-rows // self.page_size)


@dataclass
class Timing:
    """Tokens and seconds; a call that holds any part of a prompt counts as prefill."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0

    def add(self, tokens: int, seconds: float, *, prefill: bool) -> None:
        if prefill:
            self.prefill_tokens += tokens
            self.prefill_seconds += seconds
        else:
            self.decode_tokens += tokens
            self.decode_seconds += seconds

    def __str__(self) -> str:
        prefill = _rate("prefill", self.prefill_tokens, self.prefill_seconds)
        return f"{prefill}; {_rate('decode', self.decode_tokens, self.decode_seconds)}"


def _rate(name: str, tokens: int, seconds: float) -> str:
    speed = f" ({tokens / seconds:.1f} tok/s)" if seconds > 0 else ""
    return f"{name} {tokens} tokens in {seconds:.3f} s{speed}"


@dataclass
class Continuation:
    """One prompt and what came of it so far; `ids` are new tokens, without the end token."""

    prompt: list[int]
    ids: list[int] = field(default_factory=list[int])
    text: str = ""  # empty without a tokenizer
    finish: Finish | None = None


@dataclass
class Generation:
    """All continuations of one call, also after an interruption (`Compiled.last`)."""

    continuations: list[Continuation]
    timing: Timing = field(default_factory=Timing)

    @property
    def texts(self) -> list[str]:
        return [c.text for c in self.continuations]

    @property
    def ids(self) -> list[list[int]]:
        return [c.ids for c in self.continuations]


@dataclass(frozen=True)
class Event:
    """A token of one sequence, and the text that became certain with it (may be empty)."""

    index: int
    token: int | None  # None: only held-back text, at the end
    piece: str


@dataclass(frozen=True)
class Endings:
    """When a sequence ends, besides the context's end."""

    max_new_tokens: int | None = None
    eos: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        most = self.max_new_tokens
        if most is not None and not is_whole(most):
            raise UnsupportedInputError(f"max_new_tokens={most!r}: expected a whole number or None")
        if most is not None and most < 1:
            raise UnsupportedInputError(f"max_new_tokens={most}: expected 1 or more")
        if "" in self.stop:
            raise UnsupportedInputError("stop=[…, '']: expected texts of one character or more")

    @staticmethod
    def of(max_new_tokens: int | None, eos: object, stop: object) -> Endings:
        """What a user gave; raises UnsupportedInputError naming the argument that is wrong."""
        ids: list[Any] | None = [eos] if is_whole(eos) else _items(eos)
        if ids is None or not all(map(is_whole, ids)):
            raise UnsupportedInputError(
                f"eos={eos!r}: expected a token id, or several; () for none"
            )
        stops = [stop] if isinstance(stop, str) else _items(stop)
        if stops is None or not all(isinstance(s, str) for s in stops):
            raise UnsupportedInputError(f"stop={stop!r}: expected a text, or a list of texts")
        return Endings(max_new_tokens, frozenset(ids), tuple(stops))


def _items(given: object) -> list[Any] | None:
    """The entries of a list, tuple or set; None for anything else."""
    return list(given) if isinstance(given, (list, tuple, set, frozenset)) else None  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


class StopFilter:
    """Passes text on, but never a stop string nor what may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit = False

    def push(self, piece: str) -> str:
        """The text that is certain to come before any stop string."""
        text = self._held + piece
        found = [at for s in self._stops if (at := text.find(s)) >= 0]
        if found:
            self.hit, self._held = True, ""
            return text[: min(found)]
        keep = self._may_become_stop(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back, at the end."""
        text, self._held = self._held, ""
        return text

    def _may_become_stop(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max((len(s) - 1 for s in self._stops), default=0)
        for size in range(min(longest, len(text)), 0, -1):
            if any(s.startswith(text[-size:]) for s in self._stops):
                return size
        return 0


class _Job:
    """A continuation at work: its cache sequence, the tokens not run yet, sampler and text."""

    def __init__(
        self,
        index: int,
        continuation: Continuation,
        sampler: Sampler,
        endings: Endings,
        tokenizer: Tokenizer | None,
        room: int,
    ) -> None:
        self.index = index
        self.continuation = continuation
        self.sampler = sampler
        self.endings = endings
        self.room = room  # most new tokens
        self.pending = list(continuation.prompt)
        self.seq: int | None = None
        self.stays_open = False  # whether the sequence is kept when the job ends
        self._pieces = TextPieces(tokenizer, continuation.prompt) if tokenizer else None
        self._stops = StopFilter(endings.stop)

    @property
    def in_prompt(self) -> bool:
        return not self.continuation.ids

    @property
    def is_at_end(self) -> bool:
        """Whether it ends with its next token, whatever that is."""
        return len(self.continuation.ids) + 1 >= self.room

    @property
    def has_ended(self) -> bool:
        return self.continuation.finish is not None

    def take(self, token: int) -> Event:
        """Add the next token; ends the job when it is the last."""
        if token in self.endings.eos:
            return Event(self.index, None, self._end("eos"))
        self.continuation.ids.append(token)
        self.pending = [token]
        piece = self._text(token)
        if self._stops.hit:
            self.continuation.finish = "stop"
        elif len(self.continuation.ids) >= self.room:
            limited = self.room == self.endings.max_new_tokens
            piece += self._end("length" if limited else "context")
        return Event(self.index, token, piece)

    def interrupt(self) -> None:
        if self.continuation.finish is None:
            self._end("interrupted")

    def _text(self, token: int) -> str:
        return self._give(self._pieces.push(token)) if self._pieces else ""

    def _end(self, finish: Finish) -> str:
        self.continuation.finish = finish
        rest = self._give(self._pieces.finish()) if self._pieces else ""
        if self._stops.hit:
            self.continuation.finish = "stop"
        held = self._stops.finish()
        self.continuation.text += held
        return rest + held

    def _give(self, piece: str) -> str:
        certain = self._stops.push(piece)
        self.continuation.text += certain
        return certain


class Decoder:
    """Runs prompts to their ends on a runner, within its limits."""

    def __init__(self, runner: Runner, limits: Limits, tokenizer: Tokenizer | None) -> None:
        self.runner = runner
        self.limits = limits
        self.tokenizer = tokenizer

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[Sampling],
        endings: Endings,
    ) -> tuple[Generation, Generator[Event]]:
        """The result, which fills as the events are read; checks every prompt before the first run.

        Leaving the iterator early, by an error, Ctrl-C or `close()`, gives all cache rows back.
        """
        if endings.stop and self.tokenizer is None:
            raise UnsupportedInputError("stop strings need a tokenizer, and this model has none")
        rooms = [self._room(i, p, endings.max_new_tokens) for i, p in enumerate(prompts)]
        generation = Generation([Continuation(list(p)) for p in prompts])
        jobs = [
            _Job(i, c, Sampler(s, self.limits.vocabulary, c.prompt), endings, self.tokenizer, room)
            for i, (c, s, room) in enumerate(
                zip(generation.continuations, sampling, rooms, strict=True)
            )
        ]
        return generation, self._run(jobs, generation.timing)

    def resume(
        self, seq: int, prompt: Sequence[int], sampling: Sampling, endings: Endings
    ) -> tuple[Generation, Generator[Event]]:
        """`start` for one prompt on an open sequence, which stays open.

        The rows that the sequence has must be those of the prompt's first tokens: only the others
        are run.  Afterwards it has rows for the prompt and all new tokens but the last.
        """
        room = self._room(0, prompt, endings.max_new_tokens)
        known = self.runner.length(seq)
        if known >= len(prompt):
            raise ValueError(f"sequence {seq} has {known} rows, the prompt {len(prompt)} tokens")
        generation = Generation([Continuation(list(prompt))])
        sampler = Sampler(sampling, self.limits.vocabulary, prompt)
        job = _Job(0, generation.continuations[0], sampler, endings, self.tokenizer, room)
        job.seq, job.stays_open, job.pending = seq, True, list(prompt[known:])
        return generation, self._run([job], generation.timing)

    def _room(self, index: int, prompt: Sequence[int], wanted: int | None) -> int:
        """Most new tokens of a prompt.  The last one is never run, so it needs no cache row."""
        check_prompt(self.limits, index, prompt)
        room = self.limits.rows - len(prompt) + 1
        if wanted is not None and wanted > room:
            way_out = self.limits.way_out(
                f"Use max_new_tokens={room} or less", len(prompt) + wanted - 1
            )
            raise ContextLimitError(
                f"prompt {index} has {len(prompt)} tokens and max_new_tokens={wanted}, and the "
                f"cache was compiled for {self.limits.rows} rows a sequence. {way_out}"
            )
        return room if wanted is None else wanted

    def _run(self, jobs: list[_Job], timing: Timing) -> Generator[Event]:
        waiting, active, steps = list(jobs), list[_Job](), Steps[_Job](self.runner)
        try:
            while waiting or active:
                self._admit(waiting, active)
                yield from self._step(steps, active, timing)
                self._release([j for j in active if j.has_ended], active)
        finally:
            try:
                steps.drop()
            finally:
                self._release(list(active), active)
            for job in jobs:
                job.interrupt()

    def _admit(self, waiting: list[_Job], active: list[_Job]) -> None:
        """Open sequences in order while all active ones can be run to their ends."""
        while waiting and len(active) < self.limits.max_batch:
            taken = sum(self._pages(j) for j in active)
            capacity = self.limits.cache_rows // self.limits.page_size
            if active and taken + self._pages(waiting[0]) > capacity:
                return
            job = waiting.pop(0)
            active.append(job)
            if job.seq is None:
                job.seq = self.runner.open()

    def _pages(self, job: _Job) -> int:
        return self.limits.pages(len(job.continuation.prompt) + job.room - 1)

    def _step(self, steps: Steps[_Job], active: list[_Job], timing: Timing) -> Iterator[Event]:
        batch = steps.ahead() or self._batch(active)
        prefill = any(job.in_prompt for job, _ in batch)
        found, seconds = steps.run(batch, is_all=len(batch) == len(active))
        timing.add(sum(len(tokens) for _, tokens in batch), seconds, prefill=prefill)
        events: list[Event] = []
        for (job, tokens), token in zip(batch, found, strict=True):
            del job.pending[: len(tokens)]
            if token is not None:
                events.append(job.take(token))
        yield from events

    def _batch(self, active: list[_Job]) -> Batch[_Job]:
        """Each job's next tokens: those past their prompts first, then pieces of prompts."""
        budget = self.limits.max_tokens
        batch: Batch[_Job] = []
        for job in sorted(active, key=lambda j: j.in_prompt):
            tokens = job.pending[:budget]
            if tokens:
                batch.append((job, tokens))
                budget -= len(tokens)
        return batch

    def _release(self, jobs: list[_Job], active: list[_Job]) -> None:
        for job in jobs:
            active.remove(job)
            if job.seq is not None and not job.stays_open:
                self.runner.close(job.seq)


@dataclass(frozen=True)
class Piece:
    """Tokens start..stop of one prompt, run in one call."""

    prompt: int
    start: int
    stop: int


def prompt_logits(runner: Runner, limits: Limits, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Logits of every token of every prompt, f32[s, VOC] each; short prompts share calls."""
    for index, prompt in enumerate(prompts):
        check_prompt(limits, index, prompt)
    seqs: dict[int, int] = {}
    rows: list[list[Tensor]] = [[] for _ in prompts]
    try:
        for call in packed_calls(limits, [len(p) for p in prompts]):
            for piece in call:
                if piece.start == 0:
                    seqs[piece.prompt] = runner.open()
            requests = [(seqs[p.prompt], prompts[p.prompt][p.start : p.stop]) for p in call]
            found = runner.forward(requests, logits="all")
            parts = torch.split(found, [p.stop - p.start for p in call])
            for piece, part in zip(call, parts, strict=True):
                rows[piece.prompt].append(part)
                if piece.stop == len(prompts[piece.prompt]):
                    runner.close(seqs.pop(piece.prompt))
    finally:
        for seq in seqs.values():
            runner.close(seq)
    return [torch.cat(parts) for parts in rows]


def packed_calls(limits: Limits, lengths: Sequence[int]) -> Iterator[list[Piece]]:
    """Prompts of these lengths, in order, cut into calls that keep to the limits."""
    call: list[Piece] = []
    tokens = pages = 0
    for index, length in enumerate(lengths):
        at = 0
        while at < length:
            crowded = pages + limits.pages(length) > limits.cache_rows // limits.page_size
            if call and (tokens == limits.max_tokens or len(call) == limits.max_batch or crowded):
                yield call
                call, tokens, pages = [], 0, 0
            stop = min(length, at + limits.max_tokens - tokens)
            call.append(Piece(index, at, stop))
            tokens, pages, at = tokens + stop - at, pages + limits.pages(length), stop
    if call:
        yield call


def check_prompt(limits: Limits, index: int, prompt: Sequence[int]) -> None:
    """Raises when a prompt is empty, holds ids of no token, or is longer than the cache."""
    if not prompt:
        raise UnsupportedInputError(f"prompt {index} has no tokens: expected one or more")
    wrong = [t for t in prompt if not is_whole(t) or not 0 <= t < limits.vocabulary]
    if wrong:
        raise UnsupportedInputError(
            f"prompt {index} holds token {wrong[0]!r}: expected ids 0 to {limits.vocabulary - 1}"
        )
    if len(prompt) > limits.rows:
        raise ContextLimitError(
            f"prompt {index} has {len(prompt)} tokens, and the cache was compiled for "
            f"{limits.rows} rows a sequence. {limits.way_out('Shorten the prompt', len(prompt))}"
        )
