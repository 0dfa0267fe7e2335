"""`CudaDevice`: a real GPU through torch, Triton and a few calls of the driver."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from ktgraph.runtime.gpu.device import Fetch, GpuDevice, KernelCall, Mailbox, Step
from ktgraph.runtime.gpu.driver import (
    DriverError,
    has_stream_memory_operations,
    register_host,
    wait_value,
)
from ktgraph.runtime.operands import WeightUse
from ktgraph.triton_kernels.packed import PackedWeight

_PIN_AT_ONCE = 4 << 30  # bytes
REQUEST = 1  # the value of every request: a captured graph always writes the same


class CudaDevice(GpuDevice):
    """Steps launch at once and run asynchronously on `stream`."""

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device("cuda", index)
        self.stream = torch.cuda.Stream(self.torch_device)
        self.copies = torch.cuda.Stream(self.torch_device)
        self._pool: Any = None  # scratch of captured graphs, which never run at the same time
        self._end = torch.cuda.Event()
        if not has_stream_memory_operations():
            raise DriverError(
                "this CUDA driver has no cuStreamWaitValue32, which hands layers to the CPU inside "
                "a CUDA graph: update the driver to 11.7 or later"
            )

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def host(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def weight(self, packed: torch.Tensor, use: WeightUse) -> PackedWeight:
        tile, shape = use.tile, [d.const() for d in use.type.dims]
        return PackedWeight(
            packed,
            tile.format,
            shape[-2],
            shape[-1],
            prod(shape[:-2]),
            tile.group,
            tile.gate_up,
        )

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

        return lambda: handover.post(sources, targets, box.arrived, box.request, REQUEST)

    def receive(
        self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], box: Mailbox
    ) -> Step:
        from ktgraph.triton_kernels import handover

        address = box.reply.data_ptr()
        (source,), (target,) = sources, targets  # one answer a mailbox: the sum over experts

        def step() -> None:
            wait_value(torch.cuda.current_stream().cuda_stream, address, REQUEST)
            handover.receive(source, target, box.reply)

        return step

    def pin(self, memory: torch.Tensor) -> str:
        if memory.is_pinned():
            return ""
        try:
            for start in range(0, memory.nbytes, _PIN_AT_ONCE):
                nbytes = min(_PIN_AT_ONCE, memory.nbytes - start)
                register_host(memory.data_ptr() + start, nbytes)
        except DriverError as error:
            return str(error)
        return ""

    def fetch(self, copy: Fetch, after: Fetch | None) -> Step:
        copy.ready, copy.free = torch.cuda.Event(), torch.cuda.Event()

        def step() -> None:
            if after is None:
                self.copies.wait_stream(self.stream)  # a captured copy must branch off the graph
            else:
                self.copies.wait_event(after.free)
            with torch.cuda.stream(self.copies):
                for source, target in zip(copy.sources, copy.targets, strict=True):
                    target.copy_(source, non_blocking=True)
            copy.ready.record(self.copies)

        return step

    def fetched(self, copy: Fetch) -> Step:
        return lambda: self.stream.wait_event(copy.ready)

    def release(self, copy: Fetch) -> Step:
        return lambda: copy.free.record(self.stream)

    def run(self, steps: Sequence[Step]) -> None:
        with torch.cuda.device(self.torch_device), torch.cuda.stream(self.stream):
            for step in steps:
                step()
            self._end.record(self.stream)

    def capture(self, steps: Sequence[Step]) -> Step:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self.stream, capture_error_mode="thread_local"
        ):
            for step in steps:
                step()
        self._pool = graph.pool()
        return graph.replay

    def is_done(self) -> bool:
        done = self._end.query()
        if not done:
            time.sleep(0)  # lets another thread have this CPU
        return done


__all__ = ["REQUEST", "CudaDevice"]
