"""`SimulatedDevice`: a GPU's rules kept on the CPU, where every kernel is its op's reference.

Nothing that is started runs before the host waits: a host that reads a result too early sees what
was there before, and one that changes an input too early changes what the kernels see.  Hand-overs
go through the engine's real mailboxes.  Device memory begins as NaN, as poison.  Spans are those of
the references, on this CPU: measured timelines take the GPU's share from `model` instead.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

import torch

from ktgraph.runtime.batch import Batch
from ktgraph.runtime.errors import ExecutionError
from ktgraph.runtime.gpu.device import (
    Fetch,
    Fork,
    GpuDevice,
    KernelCall,
    Mailbox,
    Span,
    Step,
)
from ktgraph.runtime.operands import WeightUse
from ktgraph.triton_kernels.batch import DeviceBatch
from ktgraph.weights.encodings import to_float

_REQUEST = 1
_PAUSE = 50e-6  # seconds; the thread that answers may need this CPU
_POISON = 0xFF  # bytes of NaN in every float format, and of -1 in integers


class SimulatedDevice(GpuDevice):
    """Started work is queued; waiting does it, in order."""

    checks_order = True

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self._queue: deque[Step] = deque()
        self._copies: deque[Fetch] = deque()  # started, and not done before somebody waits

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), _POISON, dtype=torch.uint8)

    def host(self, nbytes: int) -> torch.Tensor:
        aligned = torch.full((nbytes + 64,), _POISON, dtype=torch.uint8)
        return aligned[-aligned.data_ptr() % 64 :][:nbytes]

    def catch_up(self) -> None:
        """torch has no stream here: what it writes is there at once."""

    def kernel(self, call: KernelCall) -> Step:
        def step() -> None:
            given = [_operand(o) for o in call.operands]
            found = call.definition.reference(*given, **call.attrs)
            results = cast("tuple[Any, ...]", found if isinstance(found, tuple) else (found,))
            for target, value in zip(call.out, results, strict=True):
                if target is not None:
                    target.copy_(value)

        return step

    def weight(self, packed: torch.Tensor, use: WeightUse) -> Any:
        """Values, for the op's reference: made when it reads them, since bytes may be streamed."""
        encoding, shape = use.type.encoding, [d.const() for d in use.type.dims]
        assert encoding is not None
        return lambda: to_float((packed,), shape, encoding)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> Step:
        return lambda: target.copy_(source)

    def post(
        self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], box: Mailbox
    ) -> Step:
        def step() -> None:
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source)
            box.request.fill_(_REQUEST)

        return step

    def receive(
        self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], box: Mailbox
    ) -> Step:
        def step() -> bool:
            if int(box.reply) < _REQUEST:
                return False
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source)
            box.reply.fill_(0)
            return True

        return step

    def fork(self, fork: Fork) -> Step:
        return _nothing

    def aside(self, fork: Fork, step: Step) -> Step:
        """Delayed to the join: the main stream's ops in between come first, as they may."""
        fork.begin = step
        return _nothing

    def join(self, fork: Fork) -> Step:
        def step() -> None:
            fork.began = time.perf_counter()
            fork.begin()
            fork.end = time.perf_counter()

        return step

    def pin(self, memory: torch.Tensor) -> str:
        return ""

    def fetch(self, copy: Fetch, after: Fetch | None) -> Step:
        def step() -> None:
            if after is not None and not after.free:
                raise ExecutionError("a copy of weights begins before its buffer was released")
            copy.began = copy.ready = copy.free = None
            for target in copy.targets:
                target.view(-1).view(torch.uint8).fill_(_POISON)
            self._copies.append(copy)

        return step

    def fetched(self, copy: Fetch) -> Step:
        def step() -> None:
            while not copy.ready:
                done = self._copies.popleft()
                begin = time.perf_counter()
                for source, target in done.parts():
                    target.copy_(source)
                done.began, done.ready = begin, time.perf_counter()

        return step

    def release(self, copy: Fetch) -> Step:
        def step() -> None:
            copy.free = True

        return step

    def run(self, steps: Sequence[Step]) -> None:
        self._queue.extend(steps)

    def timed(self, steps: Sequence[Step]) -> Callable[[], list[Span]]:
        spans: list[Span] = []
        self.run([_noting(step, spans) for step in steps])
        return lambda: spans

    def span(self, work: Fetch | Fork) -> Span:
        return work.began, work.ready if isinstance(work, Fetch) else work.end

    def capture(self, steps: Sequence[Step]) -> Step:
        kept = tuple(steps)
        return lambda: self._queue.extendleft(reversed(kept))

    def mark(self) -> list[float]:
        """It holds the time when it is passed."""
        passed: list[float] = []
        self._queue.append(lambda: passed.append(time.perf_counter()))
        return passed

    def seconds(self, begin: list[float], end: list[float]) -> float:
        return end[0] - begin[0]

    def is_done(self, mark: list[float] | None = None) -> bool:
        """Works off the queue, as far as a mark, up to a step that must wait."""
        while self._queue and not mark:
            step = self._queue.popleft()
            try:
                is_waiting = step() is False
            except KeyboardInterrupt:  # of the host; a GPU goes on
                self._queue.appendleft(step)
                raise
            if is_waiting:
                self._queue.appendleft(step)
                time.sleep(_PAUSE)
                return False
        return True

    def drain(self, look: Callable[[], object], patience: float) -> None:
        """What is left is done, as a GPU would: later calls may build on it."""
        end = time.perf_counter() + patience
        while self._queue and time.perf_counter() < end:
            with suppress(Exception):  # of a step; the others go on
                while not self.is_done() and time.perf_counter() < end:
                    look()
        self._queue.clear()


def _noting(step: Step, spans: list[Span]) -> Step:
    """The step, which notes its span once it is done; it may be tried several times."""
    begins: list[float] = []

    def run() -> object:
        begins.append(time.perf_counter())
        found = step()
        if found is not False:
            spans.append((begins[0], time.perf_counter()))
        return found

    return run


def _nothing() -> None:
    """A mark that the simulation does not need."""


def _operand(given: Any) -> Any:
    """What an op's reference takes."""
    if isinstance(given, DeviceBatch):
        return host_batch(given)
    return given() if callable(given) else given


def host_batch(batch: DeviceBatch) -> Batch:
    """The batch as references take it, of one whose tensors lie on the host."""
    return Batch(
        batch.tok_seq,
        batch.tok_pos,
        batch.seq_start,
        batch.kv_len,
        batch.block_table,
        batch.page_size,
        batch.out_rows,
    )


__all__ = ["SimulatedDevice", "host_batch"]
