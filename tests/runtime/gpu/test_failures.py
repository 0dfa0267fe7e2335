"""What goes wrong on either side is one error, and the next call is as if nothing had happened."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hybrid_models import Hybrid, make_hybrid
from lowered_models import prompts

from ktgraph.cpu_kernels import load_native
from ktgraph.runtime.errors import ExecutionError
from ktgraph.runtime.gpu import phase as phase_module
from ktgraph.runtime.gpu.cuda import CudaDevice
from ktgraph.runtime.gpu.device import KernelCall, Step
from ktgraph.runtime.gpu.simulated import SimulatedDevice

LIMIT = 1e-10


@pytest.fixture(params=["mla", "gqa"])
def hybrid(request: pytest.FixtureRequest) -> Iterator[Hybrid]:
    pair = make_hybrid(request.param, "cpu")
    yield pair
    pair.executor.close()


@pytest.fixture
def started(hybrid: Hybrid) -> list[int]:
    """Two sequences with rows, after a decode step that was captured."""
    seqs = [hybrid.open(), hybrid.open()]
    hybrid.forward(list(zip(seqs, prompts(5, 2), strict=True)))
    for _ in range(3):
        hybrid.forward([(seq, [4]) for seq in seqs])
    return seqs


def fails_once(
    hybrid: Hybrid, seqs: list[int], error: type[BaseException], match: str | None = None
) -> None:
    """A decode step fails, and lengths stay; the same step, and a chunk, are right afterwards."""
    lengths = [hybrid.runner.length(s) for s in seqs]
    with pytest.raises(error, match=match):
        hybrid.runner.forward([(seq, [6]) for seq in seqs])
    assert [hybrid.runner.length(s) for s in seqs] == lengths


def goes_on(hybrid: Hybrid, seqs: list[int]) -> None:
    for _ in range(3):
        assert hybrid.forward([(seq, [6]) for seq in seqs]) <= LIMIT
    assert hybrid.forward(list(zip(seqs, prompts(4, 3, seed=2), strict=True)), "all") <= LIMIT


def test_a_failing_kernel_of_the_cpu(hybrid: Hybrid, started: list[int]) -> None:
    """The header of the mailboxes asks for more tokens than the native plan was made for."""
    boxes: Any = hybrid.executor.mailboxes
    with pytest.MonkeyPatch.context() as patch:
        asked = boxes.set_sizes
        patch.setattr(boxes, "set_sizes", lambda tokens, rows: asked(10**6, rows))
        fails_once(
            hybrid, started, ExecutionError,
            r"the CPU's share of @decode: mailbox \d: .*exceed this plan's max_tokens",
        )  # fmt: skip
    goes_on(hybrid, started)


def test_a_failing_kernel_of_the_gpu(
    hybrid: Hybrid, started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a phase: mailboxes have been posted to."""

    def kernel(self: SimulatedDevice, call: KernelCall) -> Step:
        if call.definition.name != "logits.gather":
            return healthy(self, call)

        def step() -> None:
            raise ValueError("a kernel failed")

        return step

    healthy = SimulatedDevice.kernel
    remembered: Any = hybrid.executor._phases["decode"]  # pyright: ignore[reportPrivateUsage]
    remembered.forget_steps()
    monkeypatch.setattr(SimulatedDevice, "kernel", kernel)
    fails_once(
        hybrid, started, ExecutionError, r"^ValueError: a kernel failed\n  in: .*logits.gather"
    )
    monkeypatch.undo()
    remembered.forget_steps()
    goes_on(hybrid, started)


def test_a_mailbox_that_never_answers(
    hybrid: Hybrid, started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    service: Any = hybrid.executor.mailboxes._service  # pyright: ignore[reportPrivateUsage]
    service.stop()
    begin = time.perf_counter()
    with monkeypatch.context() as patch:
        patch.setattr(phase_module, "PATIENCE", 0.2)
        fails_once(hybrid, started, ExecutionError, r"@decode did not end within.*does not come")
    assert time.perf_counter() - begin < 10
    goes_on(hybrid, started)


@pytest.mark.parametrize("during_recovery", [False, True])
def test_ctrl_c_while_waiting(
    hybrid: Hybrid, started: list[int], monkeypatch: pytest.MonkeyPatch, during_recovery: bool
) -> None:
    """Pressed once, and again while the first is handled."""

    def interrupted(*args: Any) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(hybrid.executor.device, "finish", interrupted)
        if during_recovery:
            patch.setattr(hybrid.executor.device, "drain", interrupted)
        fails_once(hybrid, started, KeyboardInterrupt)
    goes_on(hybrid, started)


def test_ctrl_c_while_the_cpu_computes(
    hybrid: Hybrid, started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupt comes behind the post: the service may still write when the call ends."""
    device = hybrid.executor.device
    finish = device.finish

    def interrupted(look: Callable[[], object], patience: float) -> bool:
        device.is_done()  # runs up to the first await
        raise KeyboardInterrupt

    for _ in range(5):
        with monkeypatch.context() as patch:
            patch.setattr(device, "finish", interrupted)
            fails_once(hybrid, started, KeyboardInterrupt)
        assert device.finish == finish
        goes_on(hybrid, started)


def test_no_answer_is_pending_after_a_failure(hybrid: Hybrid, started: list[int]) -> None:
    """A reply that was left would let the next call take the answer of this one."""
    test_a_failing_kernel_of_the_cpu(hybrid, started)
    for box in hybrid.executor.mailboxes.boxes:
        for word in (box.request, box.reply, box.arrived):
            assert int(word) == 0


def test_a_failed_reply_lets_the_stream_go_on() -> None:
    """The word that `release` writes counts as an answer for a stream that waits for 1."""
    word = torch.zeros(1, dtype=torch.int32)
    word.fill_(load_native().REPLY_FAILED + 1)
    assert int(word) >= 1


class Interrupted(SimulatedDevice):
    """Ctrl-C comes while the steps of a run are launched, so that the last ones never are."""

    armed = False

    def __init__(self) -> None:
        super().__init__()
        self.captures = 0

    def run(self, steps: Sequence[Step]) -> None:
        if self.armed and len(steps) > 2:
            self.armed = False
            super().run(steps[: len(steps) // 2])
            raise KeyboardInterrupt
        super().run(steps)

    def capture(self, steps: Sequence[Step]) -> Step:
        self.captures += 1
        return super().capture(steps)


def test_a_first_run_that_was_broken_off_is_no_first_run() -> None:
    """A capture compiles nothing, and makes no zeros: one whole run comes before."""
    device = Interrupted()
    pair = make_hybrid("mla", "cpu", device=device)
    seq = pair.open()
    assert pair.forward([(seq, [1, 2])]) <= LIMIT
    device.armed = True
    fails_once(pair, [seq], KeyboardInterrupt)
    assert pair.forward([(seq, [6])]) <= LIMIT
    assert device.captures == 0
    assert pair.forward([(seq, [6])]) <= LIMIT
    assert device.captures == 1
    pair.executor.close()


def test_a_gpu_that_is_lost(
    hybrid: Hybrid, started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What failed is told, not that recovery failed too; later calls say what is left to do."""

    def lost(*given: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def interrupted(*given: object) -> bool:
        raise ExecutionError("the first failure")

    with monkeypatch.context() as patch:
        patch.setattr(hybrid.executor.device, "finish", interrupted)
        patch.setattr(hybrid.executor.mailboxes, "reset", lost)
        fails_once(hybrid, started, ExecutionError, "the first failure")
        fails_once(hybrid, started, ExecutionError, "did not recover .*illegal memory.*new process")
        hybrid.executor.close()


@pytest.mark.parametrize("how", ["close", "count_experts"])
def test_what_follows_an_interrupted_recovery_recovers_first(
    hybrid: Hybrid, started: list[int], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Without the threads that answer, a stream that still waits would wait forever."""

    def interrupted(*args: Any) -> bool:
        raise KeyboardInterrupt

    executor, order = hybrid.executor, list[str]()
    with monkeypatch.context() as patch:
        patch.setattr(executor.device, "finish", interrupted)
        patch.setattr(executor.device, "drain", interrupted)
        fails_once(hybrid, started, KeyboardInterrupt)
    drain, close = executor.device.drain, executor.mailboxes.close
    with monkeypatch.context() as patch:
        patch.setattr(executor.device, "drain", lambda *g: (order.append("drain"), drain(*g)))
        patch.setattr(executor.mailboxes, "close", lambda: (order.append("close"), close()))
        if how == "close":
            executor.close()
        else:
            executor.count_experts(True)
    assert order == (["drain", "close"] if how == "close" else ["drain"])


def test_threads_end_before_the_memory_that_they_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an executor that is dropped without a close."""
    from ktgraph.runtime.gpu.mailboxes import Mailboxes

    close, found = Mailboxes.close, list[int]()

    def closing(self: Mailboxes) -> None:
        found.append(len(self.boxes))  # they are there still
        close(self)

    pair = make_hybrid("mla", "cpu")
    pair.forward([(pair.open(), [1, 2])])
    monkeypatch.setattr(Mailboxes, "close", closing)
    del pair
    gc.collect()
    assert found
    assert all(found)


def test_what_was_under_way_ends_as_on_a_gpu() -> None:
    """A failure drops no steps of before: later calls build on them."""
    device, done = SimulatedDevice(), list[int]()

    def fails() -> None:
        raise ValueError("a kernel failed")

    device.run([lambda: done.append(1), fails, lambda: done.append(2)])
    device.drain(lambda: None, 1.0)
    assert done == [1, 2]
    device.run([lambda: False])  # an answer that never comes
    device.drain(lambda: None, 0.01)
    assert device.is_done()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ExecutionError])
def test_a_capture_that_breaks_off_says_why(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that a capture with a stream that was never joined cannot be ended."""

    class Broken(nullcontext[None]):
        def __exit__(self, *given: object) -> None:
            if given[0] is not None:
                raise RuntimeError("capture has unjoined work")

    def fails() -> None:
        raise error

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", lambda *given, **more: Broken())
    device: Any = CudaDevice.__new__(CudaDevice)
    device.stream = device._pool = None
    with pytest.raises(error):
        device.capture([fails])


def test_copies_that_nothing_waits_for_end_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host stopped between a copy's start and its reader: its memory must not go yet."""
    order: list[str] = []

    class Stream:
        def wait_stream(self, other: str) -> None:
            order.append(f"main waits for {other}")

    class End:
        def record(self, stream: object) -> None:
            order.append("end")

        def query(self) -> bool:
            order.append("asked")
            return True

    device: Any = CudaDevice.__new__(CudaDevice)
    device.stream, device.side, device.copies, device._end = Stream(), "side", "copies", End()
    device.drain(lambda: None, 1.0)
    assert order == ["main waits for side", "main waits for copies", "end", "asked"]
