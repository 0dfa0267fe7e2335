"""What the executor asks of a GPU: memory, steps in the order of a stream, capture, hand-overs.

A *step* is a function without arguments that starts one piece of work on the stream.  `CudaDevice`
is a real GPU; `simulated.SimulatedDevice` keeps the same rules on the CPU.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from ktgraph.ops.registry import KernelDef, OpDef
from ktgraph.runtime.operands import WeightUse

Step = Callable[[], object]
Span = tuple[float, float]  # begin and end, in seconds of time.perf_counter

# (phase, new tokens and cached rows of each sequence, measured seconds of ops of the flat order)
# -> begin and end of every op of the flat order, in seconds from the start of the phase
Model = Callable[[str, Sequence[int], Sequence[int], Mapping[int, float]], Sequence[Span]]


@dataclass(frozen=True)
class KernelCall:
    """One launch: operands in the op's order, a tensor per result (None for a state)."""

    definition: OpDef
    kernel: KernelDef
    operands: Sequence[Any]
    out: tuple[torch.Tensor | None, ...]
    attrs: Mapping[str, Any]


@dataclass(frozen=True)
class Mailbox:
    """Words of one hand-over, int32[1] each: request and reply both sides see, arrived the GPU."""

    request: torch.Tensor
    reply: torch.Tensor
    arrived: torch.Tensor


@dataclass
class Fetch:
    """One copy of weights from the host, and the events around it.

    parts: gives sources and targets when the copy starts; together they fill `targets`.
    began: the copy has begun; ready: it has ended; free: its target may be written over.  Devices
    fill them.
    """

    parts: Callable[[], Sequence[tuple[torch.Tensor, torch.Tensor]]]
    targets: Sequence[torch.Tensor]
    began: Any = None
    ready: Any = None
    free: Any = None


@dataclass
class Fork:
    """Work on the side stream, and the events around it; devices fill them.

    begin: it may begin; began: it has begun; end: it has ended.
    """

    begin: Any = None
    began: Any = None
    end: Any = None


class GpuDevice(ABC):
    """One GPU with a main stream, on which steps run in order, and a stream for copies."""

    torch_device: torch.device
    model: Model | None = None  # gives times in place of measured ones: of a device without its own
    checks_order = False  # whether plans are checked for races before they run

    @abstractmethod
    def empty(self, nbytes: int) -> torch.Tensor:
        """uint8[nbytes] in the GPU's memory."""

    @abstractmethod
    def host(self, nbytes: int) -> torch.Tensor:
        """uint8[nbytes] of host memory that the GPU reads and writes too."""

    @abstractmethod
    def catch_up(self) -> None:
        """Zeros, weights and what else torch's current stream was given come before later steps.

        So does the last work on memory that `empty` gives again.
        """

    @abstractmethod
    def weight(self, packed: torch.Tensor, use: WeightUse) -> Any:
        """What kernels take for a packed weight whose bytes lie in the GPU's memory."""

    @abstractmethod
    def kernel(self, call: KernelCall) -> Step:
        """A step that launches a kernel."""

    @abstractmethod
    def copy(self, source: torch.Tensor, target: torch.Tensor) -> Step:
        """A step that copies between the GPU and memory of `host`, or inside the GPU."""

    @abstractmethod
    def post(
        self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], box: Mailbox
    ) -> Step:
        """A step that copies operands to the host and raises the box's request."""

    @abstractmethod
    def receive(
        self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], box: Mailbox
    ) -> Step:
        """A step that waits for the box's reply, takes the answers, and lowers the reply."""

    @abstractmethod
    def fork(self, fork: Fork) -> Step:
        """A step that marks where the side stream may begin."""

    @abstractmethod
    def aside(self, fork: Fork, step: Step) -> Step:
        """The step on the side stream, behind the fork's mark and what went there before."""

    @abstractmethod
    def join(self, fork: Fork) -> Step:
        """A step behind which the fork's work on the side stream has ended."""

    @abstractmethod
    def pin(self, memory: torch.Tensor) -> str:
        """Make host memory fit for fast copies; an empty string, or why the system refused."""

    @abstractmethod
    def fetch(self, copy: Fetch, after: Fetch | None) -> Step:
        """A step that starts a copy on the stream for copies, once `after` has been released."""

    @abstractmethod
    def fetched(self, copy: Fetch) -> Step:
        """A step behind which the copy has ended."""

    @abstractmethod
    def release(self, copy: Fetch) -> Step:
        """A step that lets the copy's target be written over, once what came before has ended."""

    @abstractmethod
    def run(self, steps: Sequence[Step]) -> None:
        """Start steps, in order, behind what was started before; does not wait for them."""

    @abstractmethod
    def timed(self, steps: Sequence[Step]) -> Callable[[], list[Span]]:
        """Like `run`, when nothing runs; what it gives reads every step's span once all is done.

        The steps have run before, so that none of them compiles or loads a kernel.
        """

    @abstractmethod
    def span(self, work: Fetch | Fork) -> Span:
        """When work beside the main stream, started by `timed`, began and ended."""

    @abstractmethod
    def capture(self, steps: Sequence[Step]) -> Step:
        """One step that does all of them again whenever it is run."""

    @abstractmethod
    def mark(self) -> Any:
        """A point behind what was started so far, and before what will be."""

    @abstractmethod
    def seconds(self, begin: Any, end: Any) -> float:
        """Time between two marks that the GPU has passed."""

    @abstractmethod
    def is_done(self, mark: Any = None) -> bool:
        """Whether everything that was started, or all before a mark, has ended."""

    def finish(self, look: Callable[[], object], patience: float, mark: Any = None) -> bool:
        """Wait until all is done, or all before a mark, calling `look` now and then.

        False after `patience` seconds.
        """
        end = time.perf_counter() + patience
        while not self.is_done(mark):
            if time.perf_counter() > end:
                return False
            look()
        return True

    def drain(self, look: Callable[[], object], patience: float) -> None:
        """After a failure: let nothing that was started be under way; its results are void."""
        with suppress(RuntimeError):  # what failed fails again
            self.finish(look, patience)


__all__ = ["Fetch", "Fork", "GpuDevice", "KernelCall", "Mailbox", "Model", "Span", "Step"]
