"""From how many rows a weight's kernel should take its other path, measured by weight format.

Few rows meet integer weights straight from the packed bytes, many meet panels or tiles of them;
few rows meet bf16 and fp8 weights as f32, many as bf16.  Where the paths cross differs by machine.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import numpy as np

HIDDEN, INNER = 1024, 512  # of an expert
SIZE = 4 << 20  # bytes of the experts' weights: more than caches close to a core hold
COUNTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 64)  # rows of each expert
NEVER = 4096  # more rows than a kernel takes at a time: the first path for all
CLEARLY = 0.95  # of the first path's time, for the second to be taken
RUNS, SECONDS = 3, 0.005  # for each path at each count: at least so many calls, and so long

# Tile formats with columns that share a scale, and the rows that they meet.
FORMATS = (
    ("bf16", 0, "bf16"), ("fp8", 128, "bf16"), ("int8", 0, "int8"), ("int8", 64, "int8"),
    ("int4", 64, "int8"), ("int4p", 64, "int8"), ("int4z", 64, "int8"), ("mxfp4", 32, "int8"),
    ("q4_0", 0, "int8"), ("q8_0", 0, "int8"), ("q4_k", 0, "int8"), ("q5_k", 0, "int8"),
    ("q6_k", 0, "int8"), ("iq4_xs", 0, "int8"),
)  # fmt: skip

BF16_LEVELS = ("avx512_bf16", "amx")  # others have no products of bf16 rows


def format_key(format: str, group: int) -> str:
    """The name under which a tile format's figure is kept."""
    return "int8_group" if format == "int8" and group else format


def measure_many_rows() -> dict[str, dict[str, int]]:
    """Rows by the engine's level and by format; empty where no engine is built.

    On one thread, as several wait for each other beside other programs.  Takes about a second.
    """
    from ktgraph.cpu_kernels import NativeMissingError, load_native

    try:
        native = load_native()
        engine = native.Engine(1)
    except NativeMissingError:
        return {}
    data = native.empty_packed(SIZE)
    data[:] = 0
    found: dict[str, int] = {}
    for format, group, rows in FORMATS:
        if rows == "bf16" and engine.isa not in BF16_LEVELS:
            continue
        experts = _Experts(native, engine, data, format, group, rows)
        found[format_key(format, group)] = crossing(experts.many_win)
    return {engine.isa: found}


def crossing(many_win: Callable[[int], bool]) -> int:
    """The least of COUNTS for which `many_win` holds, as it does for all above it; or NEVER."""
    at = bisect_left(COUNTS, True, key=many_win)
    return COUNTS[at] if at < len(COUNTS) else NEVER


class _Experts:
    """A layer of experts of zeros (what is in them costs no time), each with the same rows."""

    def __init__(
        self, native: Any, engine: Any, data: Any, format: str, group: int, rows: str
    ) -> None:
        self._native, self._engine, self._data = native, engine, data
        self._format, self._group, self._rows = format, group, rows
        one = sum(native.packed_nbytes(format, *shape, group) for shape in _SHAPES)
        self._experts = max(1, data.nbytes // one)

    def many_win(self, rows: int) -> bool:
        """Whether the path for many rows is clearly faster when each expert has `rows` rows.

        The two take turns, so that what else runs on the machine slows both.
        """
        tokens = rows * self._experts
        calls = [self._call(tokens, NEVER), self._call(tokens, 1)]
        best = [float("inf")] * 2
        begin, turns = time.perf_counter(), 0
        while turns <= RUNS or time.perf_counter() - begin < 2 * SECONDS:
            for path, call in enumerate(calls):
                start = time.perf_counter()
                call()
                took = time.perf_counter() - start
                best[path] = min(best[path], took) if turns else best[path]  # the first warms up
            turns += 1
        few, many = best
        return many < CLEARLY * few

    def _call(self, tokens: int, many_rows: int) -> Callable[[], object]:
        """One call of the layer on so many tokens, with that threshold."""
        native = self._native
        x, y = np.ones((tokens, HIDDEN), np.float32), np.empty((tokens, HIDDEN), np.float32)
        ids = (np.arange(tokens, dtype=np.int32) % self._experts).reshape(-1, 1)
        shares = np.ones((tokens, 1), np.float32)
        plan = native.Plan(self._engine)
        plan.add(
            "cpu.grouped_mlp",
            [
                native.Tensor(x.ctypes.data, "f32", [-1, HIDDEN]),
                native.Tensor(ids.ctypes.data, "i32", [-1, 1]),
                native.Tensor(shares.ctypes.data, "f32", [-1, 1]),
                *self._weights(many_rows),
                None,
                None,
                native.Tensor(y.ctypes.data, "f32", [-1, HIDDEN]),
            ],
            {"act": "silu"},
        )
        keep = (x, y, ids, shares)  # the plan holds addresses

        def run() -> object:
            plan.run(tokens)
            return keep

        return run

    def _weights(self, many_rows: int) -> list[Any]:
        native, at = self._native, self._data.ctypes.data
        made: list[Any] = []
        for shape, gate_up in zip(_SHAPES, (True, False), strict=True):
            nbytes = native.packed_nbytes(self._format, *shape, self._group, self._experts, gate_up)
            made.append(
                native.Weight(
                    self._format, *shape, self._experts, self._group, gate_up, at, nbytes,
                    self._rows, many_rows,
                )
            )  # fmt: skip
            at += nbytes
        return made


_SHAPES = ((2 * INNER, HIDDEN), (HIDDEN, INNER))  # gate and up; down

__all__ = ["FORMATS", "crossing", "format_key", "measure_many_rows"]
