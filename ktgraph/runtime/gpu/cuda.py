"""`CudaDevice`: a real GPU through torch, Triton and a few calls of the driver."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from math import prod
from typing import Any

import torch

from ktgraph.runtime.gpu.device import (
    Fetch,
    Fork,
    GpuDevice,
    KernelCall,
    Mailbox,
    Span,
    Step,
)
from ktgraph.runtime.gpu.driver import DriverError, wait_value
from ktgraph.runtime.gpu.pinning import Pinned, pin, registration_of
from ktgraph.runtime.operands import WeightUse
from ktgraph.triton_kernels.packed import PackedWeight

_CLOCK_TRIES = 5
_HELD_STEPS = 96  # fewer launches than a stream queues, or the host would wait for itself
REQUEST = 1  # the value of every request: a captured graph always writes the same


class CudaDevice(GpuDevice):
    """Steps launch at once and run asynchronously on `stream`."""

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device("cuda", index)
        self.stream = torch.cuda.Stream(self.torch_device)
        self.copies = torch.cuda.Stream(self.torch_device)
        self.side = torch.cuda.Stream(self.torch_device)
        self._pool: Any = None  # scratch of captured graphs, which never run at the same time
        self._end = torch.cuda.Event()
        self._zero = torch.cuda.Event(enable_timing=True)
        self._pinned: list[Pinned] = []
        self._zero_at = 0.0  # the host's clock when `_zero` was recorded

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def host(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def catch_up(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.torch_device))

    def weight(self, packed: torch.Tensor, use: WeightUse) -> PackedWeight:
        return packed_weight(packed, use)

    def kernel(self, call: KernelCall) -> Step:
        launch, operands, out, attrs = call.kernel.into, call.operands, call.out, dict(call.attrs)
        assert launch is not None
        return lambda: launch(*operands, out=out, **attrs)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> Step:
        return lambda: target.copy_(source, non_blocking=True)

    def post(
        self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], box: Mailbox
    ) -> Step:
        from ktgraph.triton_kernels import handover

        def step() -> None:
            dense = [s.contiguous() for s in sources]  # pieces of a split are not, for many tokens
            handover.post(dense, targets, box.arrived, box.request, REQUEST)

        return step

    def receive(
        self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], box: Mailbox
    ) -> Step:
        from ktgraph.triton_kernels import handover

        (source,), (target,) = sources, targets  # one answer a mailbox: the sum over experts
        return lambda: handover.receive(source, target, box.arrived, box.reply)

    def fork(self, fork: Fork) -> Step:
        fork.begin = torch.cuda.Event()
        fork.began, fork.end = _marks()
        return lambda: fork.begin.record(self.stream)

    def aside(self, fork: Fork, step: Step) -> Step:
        def run() -> None:
            self.side.wait_event(fork.begin)
            fork.began.record(self.side)
            with torch.cuda.stream(self.side):
                step()
            fork.end.record(self.side)

        return run

    def join(self, fork: Fork) -> Step:
        return lambda: self.stream.wait_event(fork.end)

    def pin(self, memory: torch.Tensor) -> str:
        if memory.is_pinned() and registration_of(memory) is None:
            return ""  # torch's own, as long as it lives
        try:
            self._pinned.append(pin(memory))
        except DriverError as error:
            return str(error)
        return ""

    def fetch(self, copy: Fetch, after: Fetch | None) -> Step:
        copy.began, copy.ready = _marks()
        copy.free = torch.cuda.Event()

        def step() -> None:
            if after is None:
                self.copies.wait_stream(self.stream)  # a captured copy must branch off the graph
            else:
                self.copies.wait_event(after.free)
            copy.began.record(self.copies)
            with torch.cuda.stream(self.copies):
                for source, target in copy.parts():
                    target.copy_(source, non_blocking=True)
            copy.ready.record(self.copies)

        return step

    def fetched(self, copy: Fetch) -> Step:
        return lambda: self.stream.wait_event(copy.ready)

    def release(self, copy: Fetch) -> Step:
        return lambda: copy.free.record(self.stream)

    def run(self, steps: Sequence[Step]) -> None:
        with torch.cuda.device(self.torch_device), torch.cuda.stream(self.stream):
            try:
                for step in steps:
                    step()
            except BaseException:
                self._gather()
                raise
            finally:
                self._end.record(self.stream)

    def timed(self, steps: Sequence[Step]) -> Callable[[], list[Span]]:
        """The stream is held while the first steps queue up: launching them must not show."""
        marks = [_marks() for _ in steps]
        gate = self.host(4).view(torch.int32)
        with torch.cuda.device(self.torch_device), torch.cuda.stream(self.stream):
            self._set_zero()
            gate.fill_(0)
            wait_value(self.stream.cuda_stream, gate.data_ptr(), 1)
            self.copies.wait_event(self.stream.record_event())
            try:
                for number, (step, (begin, end)) in enumerate(zip(steps, marks, strict=True)):
                    if number == _HELD_STEPS:
                        gate.fill_(1)
                    begin.record(self.stream)
                    step()
                    end.record(self.stream)
            except BaseException:
                self._gather()
                raise
            finally:
                gate.fill_(1)
                self._end.record(self.stream)

        def spans(_: torch.Tensor = gate) -> list[Span]:  # the gate lives until the stream passed
            return [(self._at(begin), self._at(end)) for begin, end in marks]

        return spans

    def _gather(self) -> None:
        """After an error or Ctrl-C: what was started on other streams ends before the main one."""
        self.stream.wait_stream(self.side)
        self.stream.wait_stream(self.copies)

    def _set_zero(self) -> None:
        """Where both sides' clocks meet: the closest of some tries, as the host may be busy."""
        closest = float("inf")
        for _ in range(_CLOCK_TRIES):
            mark = torch.cuda.Event(enable_timing=True)
            self.stream.synchronize()
            before = time.perf_counter()
            mark.record(self.stream)
            mark.synchronize()
            after = time.perf_counter()
            if after - before < closest:
                closest, self._zero, self._zero_at = after - before, mark, (before + after) / 2

    def _at(self, mark: torch.cuda.Event) -> float:
        return self._zero_at + self._zero.elapsed_time(mark) * 1e-3

    def span(self, work: Fetch | Fork) -> Span:
        return self._at(work.began), self._at(work.ready if isinstance(work, Fetch) else work.end)

    def capture(self, steps: Sequence[Step]) -> Step:
        graph = torch.cuda.CUDAGraph()
        given: Any = {"pool": self._pool, "capture_error_mode": "thread_local"}
        broken: BaseException | None = None
        try:
            with _no_collection(), torch.cuda.graph(graph, stream=self.stream, **given):
                try:
                    for step in steps:
                        step()
                except BaseException as error:
                    broken = error
                    raise
        except RuntimeError:  # a capture that was broken off cannot be ended either
            if broken is None:
                raise
        if broken is not None:
            raise broken
        self._pool = graph.pool()
        return graph.replay

    def mark(self) -> torch.cuda.Event:
        mark = torch.cuda.Event(enable_timing=True)
        mark.record(self.stream)
        return mark

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return begin.elapsed_time(end) * 1e-3

    def is_done(self, mark: torch.cuda.Event | None = None) -> bool:
        done = (mark or self._end).query()
        if not done:
            time.sleep(0)  # lets another thread have this CPU
        return done

    def drain(self, look: Callable[[], object], patience: float) -> None:
        """Copies too that no step waits for, since the one that would have never came."""
        with suppress(RuntimeError):
            self._gather()
            self._end.record(self.stream)
        super().drain(look, patience)


def packed_weight(packed: torch.Tensor, use: WeightUse) -> PackedWeight:
    """What GPU kernels take for a weight whose packed bytes these are."""
    tile, shape = use.tile, [d.const() for d in use.type.dims]
    return PackedWeight(
        packed,
        tile.format,
        shape[-2],
        shape[-1],
        prod(shape[:-2]),
        tile.group,
        tile.gate_up,
        tile.rows,
    )


@contextmanager
def _no_collection() -> Generator[None, None, None]:
    """Python collects no garbage meanwhile: a dead executor's graph or memory, freed while another
    graph is captured, breaks the capture."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _marks() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


__all__ = ["REQUEST", "CudaDevice", "packed_weight"]
