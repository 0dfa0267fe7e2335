"""What `ktgraph bench cpu` and bench/cpu_moe.py share: measure, show, write.

Arguments: arguments.py."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from datetime import date

from rich.console import Console

from ktgraph.bench import report
from ktgraph.bench.cells import Store
from ktgraph.bench.cpu_moe import Bench, Options
from ktgraph.bench.limits import Limits, Reader, measure_limits, read_buffer_size
from ktgraph.bench.native_moe import NativeMoe
from ktgraph.bench.roofline import NoPictureError, draw
from ktgraph.bench.shapes import WeightFormat, find_shape, parse_format
from ktgraph.bench.subject import Subject
from ktgraph.cpu_kernels import load_native
from ktgraph.errors import UnsupportedInputError
from ktgraph.target.probe import probe_cpu

WRONG = 1  # exit code where a result of ktgraph's own was wrong, or it failed


def run(args: argparse.Namespace, peers: Callable[[], Sequence[Subject]] | None = None) -> int:
    """Measures and reports; 1 where ktgraph's own result was wrong, or it failed."""
    if args.report_only and args.store is None:
        raise UnsupportedInputError("--report-only shows a store; give --store FILE.jsonl")
    _check_isa(args.isa)
    _check_outputs(args)
    store = Store.open(args.store, fresh=args.fresh)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
    options = options_of(args)
    if not args.report_only:
        subjects: list[Subject] = [NativeMoe(f, args.isa) for f in _formats(args.formats)]
        subjects += peers() if peers is not None else ()
        _measure(subjects, options, store, console)
    _show(store, console)
    _write(args, store)
    bad = ("wrong result", "failed")  # not: a format or a size that cannot be had here
    wrong = [c for c in store.refused() if c.is_ours and c.refused.startswith(bad)]
    return WRONG if wrong else 0


def options_of(args: argparse.Namespace) -> Options:
    """Checked options. Raises UnsupportedInputError."""
    most = len(load_native().default_cpus())
    threads = _numbers("--threads", args.threads) if args.threads else (most,)
    if max(threads) > most:
        raise UnsupportedInputError(
            f"--threads {args.threads}: this process may use {most} CPUs, no more threads than that"
        )
    if args.seconds <= 0 or args.cell_seconds < 0 or args.footprint <= 0 or args.memory < 0:
        raise UnsupportedInputError(
            "--seconds and --footprint: expected numbers above 0; --cell-seconds and --memory: 0 "
            "(for --memory the default) or more"
        )
    return Options(
        shapes=tuple(find_shape(name) for name in args.shapes.split(",")),
        tokens=_numbers("--tokens", args.tokens),
        threads=threads,
        seconds=args.seconds,
        cell_seconds=args.cell_seconds,
        footprint=args.footprint,
        memory=int(args.memory * 2**30),
    )


def _check_isa(name: str) -> None:
    """A wrong name, or one this CPU lacks, is one early message."""
    try:
        load_native().Engine(1, None, name)
    except RuntimeError as error:
        raise UnsupportedInputError(str(error)) from None


def _check_outputs(args: argparse.Namespace) -> None:
    """What is written at the end has a folder to lie in: known before minutes of measuring."""
    for name in ("csv", "markdown", "roofline"):
        path = getattr(args, name)
        if path is not None and not path.parent.is_dir():
            raise UnsupportedInputError(f"--{name} {path}: there is no folder {path.parent}")


def _formats(text: str) -> list[WeightFormat]:
    """Of ktgraph's own kernels; an unknown one is told before anything is measured."""
    found = [parse_format(name) for name in text.split(",") if name]
    for form in found:
        try:
            load_native().packed_nbytes(form.name, 256, 256, form.group)
        except ValueError as error:
            raise UnsupportedInputError(f"--formats {form}: {error}") from None
    return found


def _numbers(name: str, text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise UnsupportedInputError(f"{name} {text!r}: expected whole numbers above 0, as 1,4,16")
    return found


def _measure(subjects: Sequence[Subject], options: Options, store: Store, console: Console) -> None:
    def say(text: str) -> None:
        console.print(text, markup=False)

    reader = Reader(read_buffer_size(max(4.0, options.footprint)))
    limits = measure_limits(reader, max(options.threads))
    for table in report.limit_tables(limits):
        console.print(table)
    _note(store, limits, options)
    bench = Bench(subjects, options, store, reader, limits, say)
    left = bench.run()
    if left:
        say(f"{left} cells are left: the time is over; the same command with --store goes on")


def _note(store: Store, limits: Limits, options: Options) -> None:
    cpu = probe_cpu()
    cache, free = cpu.last_level_cache, cpu.memory.available
    store.note(
        date=date.today().isoformat(),
        machine=f"{cpu.model}, {cpu.cores} cores, last-level cache {cache / 2**20:.0f} MiB, "
        f"{cpu.memory.usable / 2**30:.0f} GiB of memory, {free / 2**30:.0f} GiB free",
        command=" ".join(["python", *sys.argv]),
        weights=f"{options.footprint:g} x the last-level cache where memory allows",
        curve=limits.curve,
        peaks=limits.peaks,
        threads=limits.threads,
        buffer=limits.buffer,
    )


def _show(store: Store, console: Console) -> None:
    console.print(report.cell_table(store.measured()))
    versus = report.versus_table(store.measured())
    if versus is not None:
        console.print(versus)
    reasons = sorted({(c.key.subject, c.key.format, c.refused) for c in store.refused()})
    for subject, fmt, why in reasons:
        console.print(f"no figures: {subject} {fmt}: {why}", markup=False)


def _write(args: argparse.Namespace, store: Store) -> None:
    if args.csv is not None:
        args.csv.write_text(report.csv_text(store))
    if args.markdown is not None:
        args.markdown.write_text(report.markdown(store))
    if args.roofline is None:
        return
    try:
        draw(report.ordered(store.measured()), args.roofline)
    except NoPictureError as error:
        print(error, file=sys.stderr)
