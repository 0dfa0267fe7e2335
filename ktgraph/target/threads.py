"""How many threads the CPU engine should have, measured with its own kernels.

Reading weights for one token is bound by memory, many tokens are bound by arithmetic; which count
is best for both differs by machine, and a core's second hardware thread may help or harm.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ktgraph.target.description import EngineSpeed
from ktgraph.target.probe import CpuInfo

COLUMNS, TOKENS = 2048, 64
SMALLEST, LARGEST = 64 << 20, 512 << 20  # bytes of weights that a point reads
SECONDS_A_POINT = 0.2
WITHIN = 1.05  # a slower count is as good as the best up to this factor


def measure_threads(info: CpuInfo) -> tuple[EngineSpeed, ...]:
    """Of one thread, one a core, and every hardware thread that the quota allows.

    Nothing where the engine is not built.  Takes about half a second for each count.
    """
    from ktgraph.cpu_kernels import NativeMissingError, load_native

    try:
        everything = len(load_native().default_cpus())
    except NativeMissingError:
        return ()
    weights = _Weights(_weight_bytes(info))
    counts = sorted({1, min(info.max_threads, everything), everything})
    return tuple(weights.speed(n) for n in counts)


def best_count(speeds: Sequence[EngineSpeed]) -> int:
    """The count with the least time for both works, each relative to its best; fewer when equal.

    Fewer, because the cores left over are of use to others.  One thread is measured to show what
    more of them gain; it is never chosen where there are more: beside other programs, which a
    moment's figures may be of, more threads still get more of the machine.
    """
    many = [s for s in speeds if s.threads > 1] or list(speeds)
    read = max(s.read for s in many)
    compute = max(s.compute for s in many)
    spent = {s.threads: read / s.read + compute / s.compute for s in many}
    return min(n for n, time_spent in spent.items() if time_spent <= WITHIN * min(spent.values()))


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

    def speed(self, threads: int) -> EngineSpeed:
        """Of an engine with so many threads; two figures, best of several runs each."""
        engine = self._native.Engine(threads)
        small = min(self.rows, 4096)  # of which arithmetic, not reading, bounds many tokens
        read = 2.0 * self.rows * COLUMNS / self._seconds(engine, self.rows, 1)
        compute = 2.0 * small * COLUMNS * TOKENS / self._seconds(engine, small, TOKENS)
        return EngineSpeed(threads, float(f"{read:.4g}"), float(f"{compute:.4g}"))

    def _seconds(self, engine: Any, rows: int, tokens: int) -> float:
        native = self._native
        plan, data = native.Plan(engine), self._data
        x = native.Tensor(self._x.ctypes.data, "f32", [-1, COLUMNS])
        y = native.Tensor(self._y.ctypes.data, "f32", [-1, rows])
        w = native.Weight("bf16", rows, COLUMNS, 1, 0, False, data.ctypes.data, data.nbytes)
        plan.add("cpu.linear", [x, w, None, y])
        return _fastest(lambda: plan.run(tokens), SECONDS_A_POINT)


def _fastest(run: Any, seconds: float) -> float:
    """Seconds of the fastest call, of as many as fit into `seconds` after one to warm up."""
    run()
    best, spent = float("inf"), 0.0
    while spent < seconds:
        start = time.perf_counter()
        run()
        took = max(time.perf_counter() - start, 1e-9)
        best, spent = min(best, took), spent + took
    return best


__all__ = ["best_count", "measure_threads"]
