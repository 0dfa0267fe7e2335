"""How fast the engine's kernels read packed weights for one token, by weight format.

On few fast cores unpacking binds before memory does, so decode is priced with what kernels reach.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from ktgraph.target.probe import CpuInfo

COLUMNS = 2048
# with columns that share a scale
FORMATS = (("bf16", 0), ("fp8", 128), ("int8", 0), ("int4", 64), ("int4p", 64))
LEAST, MOST = 64 << 20, 512 << 20  # bytes of weights that a reading goes over
SECONDS = 0.15  # for each format


def measure_reads(info: CpuInfo, threads: int) -> dict[str, float]:
    """Bytes/s by format on `threads` threads, best of several; empty where no engine is built."""
    from ktgraph.cpu_kernels import NativeMissingError, load_native

    try:
        native = load_native()
        engine = native.Engine(min(threads, len(native.default_cpus())))
    except NativeMissingError:
        return {}
    size = max(LEAST, min(MOST, 4 * info.last_level_cache, info.memory.available // 8))
    return {name: _read(native, engine, name, group, size) for name, group in FORMATS}


def _read(native: Any, engine: Any, name: str, group: int, size: int) -> float:
    """Of one product of a row with a matrix of `size` bytes; what is in it costs no time."""
    a_row = native.packed_nbytes(name, 64, COLUMNS, group) / 64
    rows = int(size / a_row) // 64 * 64
    data = native.empty_packed(native.packed_nbytes(name, rows, COLUMNS, group))
    data[:] = 0
    x, y = np.ones((1, COLUMNS), np.float32), np.empty((1, rows), np.float32)
    weight = native.Weight(
        name, rows, COLUMNS, 1, group, False, data.ctypes.data, data.nbytes,
        "int8" if name == "int8" else "",
    )  # fmt: skip
    plan = native.Plan(engine)
    given = native.Tensor(x.ctypes.data, "f32", [-1, COLUMNS])
    made = native.Tensor(y.ctypes.data, "f32", [-1, rows])
    plan.add("cpu.linear", [given, weight, None, made])
    plan.run(1)  # touches y, wakes the threads
    best, spent = float("inf"), 0.0
    while spent < SECONDS:
        start = time.perf_counter()
        plan.run(1)
        seconds = max(time.perf_counter() - start, 1e-9)
        best, spent = min(best, seconds), spent + seconds
    return float(f"{data.nbytes / best:.4g}")


__all__ = ["measure_reads"]
