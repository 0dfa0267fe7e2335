"""What this machine can do, measured once: read bandwidth by threads, matrix peaks, link speed.

The whole of a CPU takes about 5-9 s. Buffers are far larger than the last-level cache, but never
more than a quarter of the memory that is free.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from ktgraph.target.description import Device, Link
from ktgraph.target.kernels import measure_reads
from ktgraph.target.many_rows import measure_many_rows
from ktgraph.target.probe import CpuInfo, MemoryInfo, pick_cpus
from ktgraph.target.threads import best_count, measure_threads

USABLE_PART = 0.9  # of memory: the rest is left to the system, the driver and the interpreter
MOST_BUFFER = 4 << 30
LEAST_BUFFER = 64 << 20
SECONDS_A_POINT = 0.25  # time spent on each measured figure


def measure_cpu(info: CpuInfo) -> Device:
    """Measures the CPU that `info` describes; see the module docstring for how long it takes."""
    counts = thread_counts(info.max_threads)
    curve = _read_bandwidth(info, counts)
    engine = measure_threads(info)
    threads = best_count(engine) if engine else best_threads(curve)
    return Device(
        name="cpu",
        kind="cpu",
        memory=cpu_budget(info.memory),
        bandwidth=curve,
        peak=_cpu_peaks(info.max_threads),
        launch=_cpu_launch(),
        model=info.model,
        isa=info.isa,
        cores=info.cores,
        threads=threads,
        numa_nodes=max(1, len(info.numa)),
        reads=measure_reads(info, threads),
        engine=engine,
        many_rows=measure_many_rows(),
    )


def cpu_budget(memory: MemoryInfo) -> int:
    """Bytes of host memory to plan with: a fixed share, so that equal runs get equal plans.

    What is free right now changes by the minute; loading checks that separately.
    """
    return max(1 << 20, int(memory.usable * USABLE_PART) >> 26 << 26)


def thread_counts(most: int) -> list[int]:
    """The thread counts to measure: 1, 2, 3, 4, 6, 8, 12, 16, 24, ... and `most`."""
    powers = {2**i for i in range(most.bit_length())}
    between = {3 * 2**i for i in range(most.bit_length())}
    return sorted({n for n in powers | between if n <= most} | {most})


def best_threads(curve: tuple[tuple[int, float], ...]) -> int:
    """The largest count whose bandwidth is within 5 % of the best: arithmetic wants them all."""
    top = max(speed for _, speed in curve)
    return max(count for count, speed in curve if speed >= 0.95 * top)


# ---- memory bandwidth


def _read_bandwidth(info: CpuInfo, counts: list[int]) -> tuple[tuple[int, float], ...]:
    """(threads, bytes/s) reading one large buffer with pinned threads; best of several passes."""
    size = _buffer_size(info)
    with _large_buffer(size) as buffer:
        workers = max(counts)
        _on_threads(info, np.array_split(buffer, workers), lambda part: part.fill(1.0))
        return tuple((n, _measure_reads(info, np.array_split(buffer, n))) for n in counts)


def _buffer_size(info: CpuInfo) -> int:
    wanted = min(MOST_BUFFER, max(256 << 20, 4 * info.last_level_cache))
    return max(LEAST_BUFFER, min(wanted, info.memory.available // 4)) >> 21 << 21


@contextmanager
def _large_buffer(size: int) -> Generator[npt.NDArray[np.float32]]:
    """`size` bytes on huge pages where the system gives them, so that page walks do not count."""
    memory = mmap.mmap(-1, size)
    with suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    yield np.frombuffer(memory, dtype=np.float32)  # unmapped with its last reference


def _measure_reads(info: CpuInfo, parts: list[npt.NDArray[np.float32]]) -> float:
    size = sum(part.nbytes for part in parts)
    best, spent = 0.0, 0.0
    while spent < SECONDS_A_POINT:
        seconds = _on_threads(info, parts, np.max)
        best, spent = max(best, size / seconds), spent + seconds
    return _rounded(best)


def _on_threads(
    info: CpuInfo,
    parts: list[npt.NDArray[np.float32]],
    work: Callable[[npt.NDArray[np.float32]], Any],
) -> float:
    """Seconds until `work` is done on every part, one pinned thread each (numpy drops the GIL)."""
    begin = threading.Barrier(len(parts) + 1)

    def run(part: npt.NDArray[np.float32], cpu: int) -> None:
        with suppress(OSError):
            os.sched_setaffinity(0, {cpu})  # of this thread only
        begin.wait()
        work(part)

    cpus = pick_cpus(info, len(parts))
    threads = [threading.Thread(target=run, args=each) for each in zip(parts, cpus, strict=True)]
    for thread in threads:
        thread.start()
    begin.wait()
    start = time.perf_counter()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


# ---- arithmetic


def _cpu_peaks(threads: int) -> dict[str, float]:
    """FLOP/s of torch's matrix products on `threads` threads, by dtype."""
    with _torch_threads(threads):
        return {dtype: _matmul_peak(dtype, "cpu") for dtype in ("f32", "bf16", "int8")}


@contextmanager
def _torch_threads(count: int) -> Generator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _matmul_peak(dtype: str, device: str, sizes: tuple[int, ...] = (256, 512, 1024, 2048)) -> float:
    """Best FLOP/s over square products of rising size; stops once one takes long."""
    best = 0.0
    for n in sizes:
        seconds = _seconds_a_call(_matmul(dtype, n, device), device)
        best = max(best, 2 * n**3 / seconds)
        if seconds > SECONDS_A_POINT / 3:
            break
    return _rounded(best)


def _matmul(dtype: str, n: int, device: str) -> Callable[[], torch.Tensor]:
    own = torch.Generator(device).manual_seed(0)  # the caller's random state stays as it was
    a, b = (torch.rand(n, n, generator=own, device=device) for _ in "ab")
    if dtype == "int8":
        a8, b8 = (a * 99).to(torch.int8), (b * 99).to(torch.int8)
        return lambda: torch.ops.aten._int_mm(a8, b8)
    kind = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
    a, b = a.to(kind), b.to(kind)
    return lambda: a @ b


def _seconds_a_call(call: Callable[[], object], device: str) -> float:
    """Shortest of repeated calls after one to warm up, within SECONDS_A_POINT / 2."""
    best, spent = float("inf"), 0.0
    _timed(call, device)
    while spent < SECONDS_A_POINT / 2:
        seconds = _timed(call, device)
        best, spent = min(best, seconds), spent + seconds
    return best


def _timed(call: Callable[[], object], device: str) -> float:
    start = time.perf_counter()
    call()
    if device != "cpu":
        torch.cuda.synchronize(device)
    return max(time.perf_counter() - start, 1e-9)


def _rounded(figure: float) -> float:
    """Four digits: more would be noise in the file."""
    return float(f"{figure:.4g}")


def _cpu_launch(repeats: int = 500) -> float:
    """Seconds torch takes to start one small op."""
    x = torch.zeros(8)

    def many() -> None:
        for _ in range(repeats):
            x.add_(1.0)

    return _rounded(_seconds_a_call(many, "cpu") / repeats)


# ---- GPUs


def measure_gpu(index: int = 0) -> Device:
    """Measures CUDA device `index`, which must be there and hold about 2 GiB free."""
    name = f"cuda:{index}"
    about = _gpu_properties(index)
    with torch.cuda.device(index), _no_tf32():
        curve = ((1, _hbm_bandwidth(name)),)
        sizes = (1024, 2048, 4096, 8192)
        peak = {dtype: _matmul_peak(dtype, name, sizes) for dtype in ("f32", "bf16", "int8")}
        launch = _gpu_launch(name)
        torch.cuda.empty_cache()
    return Device(
        name=name,
        kind="cuda",
        memory=int(about.total_memory * USABLE_PART) >> 26 << 26,
        bandwidth=curve,
        peak=peak,
        launch=launch,
        model=about.name,
        isa=(f"sm_{about.major}{about.minor}",),
        cores=about.multi_processor_count,
    )


def _gpu_properties(index: int) -> Any:
    return cast("Any", torch.cuda.get_device_properties(index))  # pyright: ignore[reportUnknownMemberType]


def measure_links(index: int = 0) -> tuple[Link, Link]:
    """The links host -> GPU and GPU -> host, for pinned memory."""
    gpu = f"cuda:{index}"
    host = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device=gpu)
    small = 64
    down = _seconds_a_call(lambda: device.copy_(host, non_blocking=True), gpu)
    up = _seconds_a_call(lambda: host.copy_(device, non_blocking=True), gpu)
    down0 = _seconds_a_call(lambda: device[:small].copy_(host[:small], non_blocking=True), gpu)
    up0 = _seconds_a_call(lambda: host[:small].copy_(device[:small], non_blocking=True), gpu)
    size = host.numel()
    return (
        Link("cpu", gpu, _rounded(size / max(down - down0, 1e-9)), _rounded(down0)),
        Link(gpu, "cpu", _rounded(size / max(up - up0, 1e-9)), _rounded(up0)),
    )


@contextmanager
def _no_tf32() -> Generator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _hbm_bandwidth(device: str) -> float:
    """Bytes/s read plus written by a copy inside the GPU's memory."""
    free, _ = torch.cuda.mem_get_info(device)
    size = min(1 << 30, free // 4)
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _rounded(2 * size / _seconds_a_call(lambda: target.copy_(source), device))


def _gpu_launch(device: str, repeats: int = 200) -> float:
    """Seconds that a small kernel takes inside a CUDA graph, which is how steps run."""
    x = torch.zeros(8, device=device)
    x.add_(1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            x.add_(1.0)
    return _rounded(_seconds_a_call(graph.replay, device) / repeats)
