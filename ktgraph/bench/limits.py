"""What this machine can do at most: DRAM reads by thread count, arithmetic by instruction set."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

from ktgraph.cpu_kernels import load_native
from ktgraph.target.measure import best_threads, thread_counts
from ktgraph.target.probe import probe_cpu

STEP = 1 << 21  # bytes; buffers are whole huge pages
FRESH = 2.0  # seconds for which a bandwidth reading stands for the moment

# The units a weight format could be multiplied on. The peak of a format is the fastest that is
# there, whether a kernel uses it or not.
UNITS_OF = {
    "f32": ("f32",),
    "bf16": ("amx_bf16", "avx512_bf16", "f32"),
    "integer": ("amx_int8", "avx512_vnni", "f32"),
}


@dataclass(frozen=True)
class Limits:
    """Measured limits. `curve`: (threads, bytes/s); `peaks`: operations/s of all threads."""

    curve: tuple[tuple[int, float], ...]
    peaks: dict[str, float]
    threads: int  # of the peaks
    buffer: int  # bytes read for the curve

    @property
    def bandwidth(self) -> float:
        """The best of the curve, bytes/s."""
        return max(speed for _, speed in self.curve)

    @property
    def best_threads(self) -> int:
        """The largest thread count within 5 % of the best bandwidth."""
        return best_threads(self.curve)


class Reader:
    """A buffer of touched pages, far larger than the caches, that is read to measure bandwidth."""

    def __init__(self, nbytes: int) -> None:
        native = load_native()
        self.nbytes = max(STEP, nbytes // STEP * STEP)
        self._native = native
        self._buffer: Any = native.empty_packed(self.nbytes)
        self._last: tuple[int, float, float] | None = None  # threads, when, bytes/s
        native.touch(self._buffer.ctypes.data, self.nbytes, len(native.default_cpus()))

    def read(self, threads: int, passes: int = 5) -> float:
        """Bytes/s: the median of several passes."""
        at = self._buffer.ctypes.data
        found = self._native.read_bandwidth(at, self.nbytes, threads, passes)
        speed = float(statistics.median(found))
        self._last = (threads, time.monotonic(), speed)
        return speed

    def read_lately(self, threads: int) -> float:
        """The last reading if it is fresh, else a new one."""
        if self._last is not None and self._last[0] == threads:
            _, when, speed = self._last
            if time.monotonic() - when < FRESH:
                return speed
        return self.read(threads)


def read_buffer_size(caches: float = 20.0, largest: int = 8 << 30) -> int:
    """`caches` times the last-level cache, but at most an eighth of the free memory."""
    cpu = probe_cpu()
    wanted = min(largest, int(caches * cpu.last_level_cache))
    return max(64 << 20, min(wanted, cpu.memory.available // 8)) // STEP * STEP


def measure_limits(
    reader: Reader, threads: int = 0, *, passes: int = 5, seconds: float = 0.1
) -> Limits:
    """Bandwidth with 1, 2, 3, 4, 6, ... threads, and the peaks of `threads` (0: all) threads."""
    native = load_native()
    most = len(native.default_cpus())
    threads = threads or most
    curve = tuple((n, reader.read(n, passes)) for n in thread_counts(most))
    return Limits(curve, measure_peaks(threads, seconds), threads, reader.nbytes)


def measure_peaks(threads: int, seconds: float = 0.1) -> dict[str, float]:
    """Operations/s of every unit this CPU has, on `threads` threads: the best of three tries."""
    native = load_native()
    units: list[str] = native.arithmetic_units()

    def best(unit: str) -> float:
        return max(float(native.arithmetic_peak(unit, threads, seconds / 3)) for _ in range(3))

    return {unit: best(unit) for unit in units}


def peak_unit(format_name: str, peaks: dict[str, float]) -> str:
    """The fastest unit that a weight format could be multiplied on.

    AMX where there is any, whatever a busy machine measured; else the one measured fastest, as
    vdpbf16ps is slower than f32 on some CPUs.
    """
    units = [u for u in UNITS_OF.get(format_name, UNITS_OF["integer"]) if u in peaks]
    tiles = [u for u in units if u.startswith("amx")]
    return tiles[0] if tiles else max(units, key=lambda u: peaks[u])
