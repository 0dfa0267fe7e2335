"""Measures routed experts cell by cell: parity first, then the median of repeated runs.

A cell is shape x tokens x format x subject x threads.  Weights of several layers are in rotation,
physical copies, many times the last-level cache together.  DRAM bandwidth is read before and after
each cell; where the two differ by more than a tenth the cell is measured again.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date

import torch

from ktgraph.bench.cells import Cell, Key, Store
from ktgraph.bench.limits import Limits, Reader, measure_peaks, peak_unit
from ktgraph.bench.shapes import Shape, bits_of
from ktgraph.bench.source import (
    Batch,
    Deck,
    Source,
    checked_tokens,
    draw_all,
    errors_of,
    expected,
    make_batch,
    make_source,
)
from ktgraph.bench.subject import CannotRunError, Runner, Stack, Subject
from ktgraph.target.probe import probe_cpu

ONE_GO = 16  # up to so many tokens, a run is all layers in one go; above, one layer
LEAST_RUNS, MOST_RUNS = 5, 400
SLOW, LEAST_SLOW_RUNS = 4, 3  # a cell that took so many times its seconds may do with fewer
STEADY = 0.10  # how far the two bandwidth readings of a cell may differ
ATTEMPTS = 3
MOST_LAYERS = 64

# Largest error of the worst token before nothing is reported, by bits of a weight: against the
# subject's own dequantized weights (activations may be rounded to int8), and against float32.
TO_DEQUANTIZED = {32: 0.015, 16: 0.015, 8: 0.08, 4: 0.08}
TO_F32 = {32: 0.02, 16: 0.02, 8: 0.12, 4: 0.5}


@dataclass(frozen=True)
class Options:
    """What to measure, and how long it may take."""

    shapes: tuple[Shape, ...]
    tokens: tuple[int, ...]
    threads: tuple[int, ...]
    seconds: float = 480.0  # of the whole call; cells left over are for the next one
    cell_seconds: float = 1.0
    footprint: float = 20.0  # bytes of weights in rotation, in last-level caches
    memory: int = 0  # bytes for one subject's weights; 0: 45 % of what is free
    peak_seconds: float = 0.1


@dataclass
class Bench:
    """One call: measures what the store lacks until the time is over."""

    subjects: Sequence[Subject]
    options: Options
    store: Store
    reader: Reader
    limits: Limits
    say: Callable[[str], None] = print

    def __post_init__(self) -> None:
        self._ends = time.monotonic() + self.options.seconds
        self._slowest_build = 0.0
        self._source: Source | None = None
        self._cpu = probe_cpu()
        self._tried: set[Key] = set()

    def run(self) -> int:
        """Measures; returns how many cells are left for want of time."""
        for shape in self.options.shapes:
            for subject in self.subjects:
                for threads in self.options.threads:
                    self._measure_stack(shape, subject, threads)
        return len(self.missing())

    def missing(self) -> list[Key]:
        """Cells without figures that this call has not tried: refusals are tried again."""
        o = self.options
        keys = [
            Key(shape.name, tokens, subject.format, subject.name, threads)
            for shape in o.shapes
            for subject in self.subjects
            for threads in o.threads
            for tokens in o.tokens
        ]
        done = self._tried | {c.key for c in self.store.measured()}
        return [k for k in keys if k not in done]

    @property
    def _left(self) -> float:
        return self._ends - time.monotonic()

    def _measure_stack(self, shape: Shape, subject: Subject, threads: int) -> None:
        """All token counts of one subject: its weights are built once."""
        mine = (shape.name, subject.format, subject.name, threads)
        keys = [k for k in self.missing() if (k.shape, k.format, k.subject, k.threads) == mine]
        if not keys or self._left < self._slowest_build:
            return
        torch.set_num_threads(threads)
        began = time.monotonic()
        try:
            layers = self._layers(shape, subject)
            stack = subject.build(shape, self._source_of(shape), layers, threads)
        except Exception as error:  # one library's failure must not end the others' measurement
            for key in keys:
                self._add(Cell(key, refused=_reason(error)))
            return
        spent = time.monotonic() - began
        self._slowest_build = max(self._slowest_build, spent)
        size = layers * shape.experts * stack.bytes_of_expert / 1e9
        self.say(
            f"{shape.name} {subject.format} {subject.name}: {layers} layers, {size:.1f} GB of "
            f"weights built in {spent:.1f} s"
        )
        try:
            peaks = measure_peaks(threads, self.options.peak_seconds)
            for key in keys:
                cell = self._cell(key, shape, stack, layers, peaks) if self._left > 0 else None
                if cell is not None and (cell.refused or cell.runs >= LEAST_SLOW_RUNS):
                    self._add(cell)  # else the time was over: left for the next call
        finally:
            stack.close()

    def _source_of(self, shape: Shape) -> Source:
        if self._source is None or self._source.shape != shape:
            self._source = None  # free the last one first
            self._source = make_source(shape)
        return self._source

    def _layers(self, shape: Shape, subject: Subject) -> int:
        """As many layers as the footprint asks for and the memory holds."""
        one = subject.nbytes(shape)
        available = probe_cpu().memory.available
        room = self.options.memory or int(0.45 * available)
        if one > room:
            raise CannotRunError(
                f"a layer has {one / 1e9:.1f} GB, {room / 1e9:.1f} GB may be used; "
                "give --memory GIB if there is more"
            )
        wanted = self.options.footprint * self._cpu.last_level_cache
        return max(1, min(-(-int(wanted) // one), room // one, MOST_LAYERS))

    def _add(self, cell: Cell) -> None:
        self._tried.add(cell.key)
        self.store.add(cell)
        self.say(line_of(cell))

    # ---- one cell

    def _cell(
        self, key: Key, shape: Shape, stack: Stack, layers: int, peaks: dict[str, float]
    ) -> Cell:
        batch = make_batch(shape, key.tokens, layers)
        decks = [Deck(shape, seed) for seed in range(layers)]
        unit = peak_unit(key.format.partition(":")[0], peaks)
        cell = Cell(
            key,
            flops=shape.flops(key.tokens),
            unit=unit,
            peak=peaks[unit],
            loaded=peaks.get(f"{unit}_loaded", 0.0),
            layers=layers,
            footprint=layers * shape.experts * stack.bytes_of_expert,
            cache=self._cpu.last_level_cache,
            date=date.today().isoformat(),
            load=os.getloadavg()[0],
        )
        try:
            runner = stack.prepare(batch)
            cell = self._check(cell, runner, stack, batch, decks)
            return cell if cell.refused else self._time(cell, runner, stack, batch, decks)
        except Exception as error:
            return replace(cell, refused=_reason(error))

    def _check(
        self, cell: Cell, runner: Runner, stack: Stack, batch: Batch, decks: list[Deck]
    ) -> Cell:
        """The cell with its errors; refused where they are too large."""
        assert self._source is not None
        draw_all(decks, batch, [0])
        runner.load_ids()
        runner.run([0])
        tokens = checked_tokens(batch.tokens)
        got = runner.output()[tokens]
        count = self._source.count
        whole, worst = errors_of(got, expected(self._source.expert, count, batch, 0, tokens))
        cell = replace(cell, error_f32=whole)
        bits = bits_of(cell.key.format) or 4
        reason = _too_large("float32", worst, TO_F32[bits])
        if stack.expert is not None:
            whole, worst = errors_of(got, expected(stack.expert, count, batch, 0, tokens))
            cell = replace(cell, error_dequantized=whole)
            reason = _too_large("its dequantized weights", worst, TO_DEQUANTIZED[bits]) or reason
        return replace(cell, refused=reason)

    def _time(
        self, cell: Cell, runner: Runner, stack: Stack, batch: Batch, decks: list[Deck]
    ) -> Cell:
        """Measures until the bandwidth readings around it agree."""
        for _ in range(ATTEMPTS):
            before = self.reader.read_lately(self.limits.best_threads)
            samples, experts = self._samples(runner, batch, decks)
            after = self.reader.read(self.limits.best_threads)
            steady = abs(before - after) <= STEADY * max(before, after)
            cell = replace(
                cell,
                seconds=statistics.median(samples),
                runs=len(samples),
                bytes=experts * stack.bytes_of_expert,
                bandwidth=(before, after),
                steady=steady,
            )
            if steady or self._left < 0:
                break
        return cell

    def _samples(
        self, runner: Runner, batch: Batch, decks: list[Deck]
    ) -> tuple[list[float], float]:
        """(seconds of a layer, for each run; experts a layer touches on average)."""
        layers = len(decks)
        whole = batch.tokens <= ONE_GO
        chunks = [list(range(layers))] if whole else [[i] for i in range(layers)]
        samples: list[float] = []
        touched = 0.0
        began = time.monotonic()
        while not self._enough(samples, time.monotonic() - began):
            # The first run, of the last chunk, only warms up.
            chunk = chunks[(len(samples) - 1) % len(chunks)]
            experts = draw_all(decks, batch, chunk)
            runner.load_ids()
            start = time.perf_counter()
            runner.run(chunk)
            samples.append((time.perf_counter() - start) / len(chunk))
            touched += 0 if len(samples) == 1 else experts / len(chunk)
        return samples[1:], touched / (len(samples) - 1)

    def _enough(self, samples: list[float], spent: float) -> bool:
        runs, wanted = len(samples) - 1, self.options.cell_seconds
        least = LEAST_RUNS if spent < SLOW * wanted else LEAST_SLOW_RUNS
        if self._left < 0:
            least = 1
        return runs >= MOST_RUNS or (runs >= least and spent >= wanted)


def _reason(error: Exception) -> str:
    """Why there are no figures: what a subject says, or how it failed."""
    if isinstance(error, CannotRunError):
        return str(error)
    return f"failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _too_large(against: str, error: float, limit: float) -> str:
    if error <= limit:  # NaN is not
        return ""
    return f"wrong result: the worst token is {error:.3g} off {against}, at most {limit:g} allowed"


def line_of(cell: Cell) -> str:
    """One line of progress."""
    if cell.refused:
        return f"{cell.key}: no figures: {cell.refused}"
    wobble = "" if cell.steady else "  (bandwidth unsteady)"
    return (
        f"{cell.key}: {cell.seconds * 1e3:.3f} ms, {cell.speed / 1e9:.1f} GB/s = "
        f"{cell.of_bandwidth:.0%} of DRAM, {cell.rate / 1e9:.0f} GFLOP/s = {cell.of_peak:.0%} of "
        f"{cell.unit}, {cell.runs} runs{wobble}"
    )
