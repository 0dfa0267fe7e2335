"""How many threads the CPU engine should have: measured once with its own kernels, then cached.

Reading weights for one token is bound by memory, many tokens are bound by arithmetic; which count
is best for both differs by machine, and a core's second hardware thread may help or harm.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ktgraph.target.host import cache_file
from ktgraph.target.probe import CpuInfo, probe_cpu

log = logging.getLogger("ktgraph")

COLUMNS, TOKENS = 2048, 64
SMALLEST, LARGEST = 64 << 20, 512 << 20  # bytes of weights that a point reads
SECONDS_A_POINT = 0.2
WITHIN = 1.05  # a slower count is as good as the best up to this factor


@dataclass(frozen=True)
class Speed:
    """What one thread count reaches: bytes/s of weights for one token, FLOP/s for many."""

    read: float
    compute: float


@dataclass(frozen=True)
class ThreadChoice:
    """The count to run with, and what each measured count reaches."""

    threads: int
    speeds: Mapping[int, Speed]


def engine_threads(*, remeasure: bool = False) -> ThreadChoice:
    """The choice for this process's CPUs; the first call on a machine takes about two seconds.

    Raises NativeMissingError when the engine is not built.
    """
    info = probe_cpu()
    path = cache_file(info).with_suffix(".threads.json")
    if not remeasure:
        try:
            return _from_json(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError):
            pass  # not there, or not readable: measured again
    choice = measure_threads(info)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        own = path.with_name(f"{path.name}.{os.getpid()}")
        own.write_text(json.dumps(asdict(choice)) + "\n", encoding="utf-8")
        own.replace(path)
    except OSError as error:
        log.warning("ktgraph: the measured thread count is not kept: %s", error)
    return choice


def measure_threads(info: CpuInfo) -> ThreadChoice:
    """Measures one thread, one a core, and every hardware thread that the quota allows."""
    from ktgraph.cpu_kernels import load_native

    everything = len(load_native().default_cpus())
    weights = _Weights(_weight_bytes(info))
    counts = sorted({1, min(info.max_threads, everything), everything})
    return choose({n: weights.speed(n) for n in counts})


def choose(speeds: Mapping[int, Speed]) -> ThreadChoice:
    """The count with the least time for both works, each relative to its best; fewer when equal.

    Fewer, because the cores left over are of use to others.
    """
    read = max(s.read for s in speeds.values())
    compute = max(s.compute for s in speeds.values())
    spent = {n: read / s.read + compute / s.compute for n, s in speeds.items()}
    good = [n for n, time_spent in spent.items() if time_spent <= WITHIN * min(spent.values())]
    return ThreadChoice(min(good), dict(speeds))


def _from_json(data: Any) -> ThreadChoice:
    speeds = {int(n): Speed(**speed) for n, speed in data["speeds"].items()}
    threads = int(data["threads"])
    if threads not in speeds:
        raise ValueError(f"threads = {threads} was not measured")
    return ThreadChoice(threads, speeds)


def _weight_bytes(info: CpuInfo) -> int:
    wanted = max(SMALLEST, min(LARGEST, 2 * info.last_level_cache))
    return min(wanted, max(1 << 20, info.memory.available // 8))


class _Weights:
    """A bf16 matrix of zeros (what is in it costs no time), and one plan's operands around it."""

    def __init__(self, nbytes: int) -> None:
        from ktgraph.cpu_kernels import load_native

        self._native = load_native()
        self.rows = max(64, nbytes // (2 * COLUMNS) // 16 * 16)
        self._data = self._native.empty_packed(
            self._native.packed_nbytes("bf16", self.rows, COLUMNS)
        )
        self._data[:] = 0
        self._x = np.ones((TOKENS, COLUMNS), np.float32)
        self._y = np.empty((TOKENS, self.rows), np.float32)

    def speed(self, threads: int) -> Speed:
        """Of an engine with so many threads; two figures, best of several runs each."""
        engine = self._native.Engine(threads)
        small = min(self.rows, 4096)  # of which arithmetic, not reading, bounds many tokens
        read = self._seconds(engine, self.rows, 1)
        compute = self._seconds(engine, small, TOKENS)
        return Speed(2.0 * self.rows * COLUMNS / read, 2.0 * small * COLUMNS * TOKENS / compute)

    def _seconds(self, engine: Any, rows: int, tokens: int) -> float:
        native = self._native
        plan, data = native.Plan(engine), self._data
        x = native.Tensor(self._x.ctypes.data, "f32", [-1, COLUMNS])
        y = native.Tensor(self._y.ctypes.data, "f32", [-1, rows])
        w = native.Weight("bf16", rows, COLUMNS, 1, 0, False, data.ctypes.data, data.nbytes)
        plan.add("cpu.linear", [x, w, None, y])
        plan.run(tokens)  # touches y, wakes the threads
        best, spent = float("inf"), 0.0
        while spent < SECONDS_A_POINT:
            start = time.perf_counter()
            plan.run(tokens)
            seconds = max(time.perf_counter() - start, 1e-9)
            best, spent = min(best, seconds), spent + seconds
        return best


__all__ = ["Speed", "ThreadChoice", "choose", "engine_threads", "measure_threads"]
