"""The CPU's side of hand-overs: a native plan for each mailbox, watched by the engine's service."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from ktgraph.cpu_kernels import load_native
from ktgraph.runtime.gpu.device import GpuDevice, Mailbox, Span

_LINE = 64  # bytes: every word has a cache line of its own
_SPIN_US = (
    5000.0  # longer than the pause between two steps, so that the first layer is answered at once
)


class Mailboxes:
    """All mailboxes of an executor; the service starts with the first and ends with `close`."""

    def __init__(self, device: GpuDevice, engine: Any, count: int) -> None:
        words = device.host((2 * count + 1) * _LINE).view(torch.int32).view(-1, _LINE // 4)
        arrived = device.empty(max(count, 1) * _LINE).view(torch.int32).view(-1, _LINE // 4)
        words.fill_(0)
        arrived.fill_(0)
        self._header = words[-1]
        self._sizes = words[-1].numpy()
        self.boxes = [
            Mailbox(words[2 * n, :1], words[2 * n + 1, :1], arrived[n, :1]) for n in range(count)
        ]
        self._service: Any = load_native().Service(engine, _SPIN_US) if count else None

    def answer(self, number: int, plan: Any) -> None:
        """Let mailbox `number` run a native plan."""
        box = self.boxes[number]
        header = self._header.data_ptr()
        self._service.add(plan, box.request.data_ptr(), box.reply.data_ptr(), header)

    def start(self) -> None:
        if self._service is not None:
            self._service.start()

    @property
    def busy_seconds(self) -> float:
        """Time that the CPU spent in the plans of answered requests."""
        return 0.0 if self._service is None else float(self._service.busy_seconds)

    def set_sizes(self, tokens: int, rows: int) -> None:
        """T and O of the requests to come; none is pending."""
        self._sizes[:2] = (tokens, rows)

    def take(self, number: int) -> bool:
        """Whether mailbox `number` has answered; its reply is lowered then."""
        reply = self.boxes[number].reply
        if int(reply) == 0:
            return False
        reply.fill_(0)
        return True

    def check(self) -> None:
        """Raises RuntimeError with the first failure of the CPU's work."""
        if self._service is not None:
            self._service.check()

    def spans(self) -> dict[int, Span]:
        """When each mailbox that was answered since the last call was last answered."""
        if self._service is None:
            return {}
        # the engine's steady clock is the clock of time.perf_counter
        return {number: (b * 1e-9, e * 1e-9) for number, b, e in self._service.spans()}

    def release(self) -> None:
        """Answer every request as failed, so that a stream that waits goes on."""
        for box in self.boxes:
            box.reply.fill_(load_native().REPLY_FAILED + 1)

    def reset(self) -> None:
        """After a failure: no request and no answer is pending, and the service begins anew."""
        if self._service is None:
            return
        with suppress(RuntimeError):  # the failure that was reported already
            self._service.stop()
        for box in self.boxes:
            box.request.fill_(0)
            box.reply.fill_(0)
            box.arrived.fill_(0)
        self._service.start()

    def close(self) -> None:
        if self._service is not None and self._service.running:
            self._service.stop()
            self._service = None


__all__ = ["Mailboxes"]
