"""`ktgraph doctor`: what this machine is, what it can do, and whether every kernel works on it."""

from __future__ import annotations

import importlib
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from io import StringIO
from typing import cast

import torch
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table

from ktgraph.bench.limits import Limits, Reader, measure_limits, read_buffer_size
from ktgraph.bench.report import limit_tables
from ktgraph.target import (
    CpuInfo,
    Target,
    cache_file,
    host_target,
    probe_cpu,
    provenance_text,
    round_size,
)
from ktgraph.target.many_rows import NEVER
from ktgraph.target.probe import ISA_FLAGS

PACKAGES = ("ktgraph", "torch", "triton", "transformers", "numpy", "safetensors", "gguf", "onnx")
NATIVE = "ktgraph.cpu_kernels._native"
KERNELS = "ktgraph.cpu_kernels"

Check = tuple[str, Callable[[], object]]


@dataclass(frozen=True)
class KernelCheck:
    """The outcome of one kernel's comparison with its reference on this machine."""

    name: str
    ok: bool
    detail: str = ""


@dataclass(frozen=True)
class DoctorReport:
    """All that `ktgraph doctor` shows. `print(report)` is plain text; rich draws tables."""

    versions: Mapping[str, str]
    cpu: CpuInfo
    target: Target
    native: str  # the extension's file, or "" where it cannot be imported
    native_error: str
    checks: tuple[KernelCheck, ...]
    limits: Limits | None = None  # measured now; None where there is no native extension

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong, each with what to do about it. Empty when all is well."""
        found: list[str] = []
        if not self.native:
            found.append(
                f"the native extension is missing ({self.native_error}); "
                "reinstall with: pip install --force-reinstall --no-deps ."
            )
        if self.cpu.flags and "avx2" not in self.cpu.flags and platform.machine() == "x86_64":
            found.append("this CPU lacks avx2, which the native kernels need: no fast CPU path")
        if "amx_tile" in self.cpu.flags and not self.cpu.tiles_allowed:
            found.append("the CPU has AMX, but the kernel hands out no tiles (Linux >= 5.16 does)")
        return (*found, *self._wrong_kernels())

    def _wrong_kernels(self) -> list[str]:
        """A line for each cause: what is wrong with all of them (KTGRAPH_ISA) is said once."""
        by_cause: dict[str, list[str]] = {}
        for check in self.checks:
            if not check.ok:
                by_cause.setdefault(check.detail, []).append(check.name)
        return [
            f"kernel {names[0]}{_and_more(len(names) - 1)} differs: {cause}"
            for cause, names in by_cause.items()
        ]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def tables(self) -> list[Table]:
        """The report's tables, in order."""
        tables = [self._machine(), self._bandwidth(), self._engine(), self._peaks()]
        tables.append(self._many_rows())
        tables += limit_tables(self.limits) if self.limits is not None else []
        if self.target.links:
            tables.append(self._links())
        return [*tables, self._kernels()]

    def __rich__(self) -> Group:
        verdict = [f"[bold red]problem[/]: {escape(p)}" for p in self.problems]
        return Group(*self.tables(), *(verdict or ["[green]nothing wrong found[/]"]))

    def __str__(self) -> str:
        console = Console(file=StringIO(), width=100, color_system=None, emoji=False)
        console.print(self.__rich__())
        lines = cast("StringIO", console.file).getvalue().splitlines()
        return "\n".join(line.rstrip() for line in lines)

    def _machine(self) -> Table:
        cpu, memory = self.cpu, self.cpu.memory
        table = _table("machine", "", "")
        table.add_row("versions", ", ".join(f"{k} {v}" for k, v in self.versions.items()))
        table.add_row("CPU", f"{cpu.model}, {cpu.cores} cores, {len(cpu.affinity)} CPUs allowed")
        table.add_row("CPU quota", "none" if cpu.quota is None else f"{cpu.quota:g} CPUs")
        table.add_row("ISA", " ".join(cpu.isa) or "none that kernels use")
        missing = [f for f in ISA_FLAGS if f not in cpu.isa]
        table.add_row("lacks", " ".join(missing) or "nothing")
        table.add_row("caches", ", ".join(_cache_texts(cpu)) or "unknown")
        table.add_row("NUMA nodes", str(max(1, len(cpu.numa))))
        limit = "no limit" if memory.limit is None else f"limit {round_size(memory.limit)}"
        free = f"{round_size(memory.available)} free of {round_size(memory.total)}, {limit}"
        table.add_row("memory", f"{free}; ktgraph plans with {round_size(self.target.cpu.memory)}")
        gpus = [f"{g.name} {g.model}, {round_size(g.memory)}" for g in self.target.gpus]
        table.add_row("GPUs", "\n".join(gpus) or "none that torch can use")
        table.add_row("figures", f"{provenance_text(self.target)}; kept in {cache_file(cpu)}")
        return table

    def _bandwidth(self) -> Table:
        table = _table("read bandwidth", "device", "threads", "GB/s", "")
        for device in self.target.devices:
            for threads, speed in device.bandwidth:
                chosen = "chosen" if threads == device.threads else ""
                shown = str(threads) if device.kind == "cpu" else ""
                table.add_row(device.name, shown, f"{speed / 1e9:.1f}", chosen if shown else "")
        return table

    def _engine(self) -> Table:
        """The engine's own kernels by threads, from which its thread count is chosen."""
        columns = ("threads", "weights for one token, GB/s", "many tokens, GFLOP/s", "")
        table = _table("CPU engine", *columns)
        for device in self.target.devices:
            for speed in device.engine:
                chosen = "chosen" if speed.threads == device.threads else ""
                read, compute = f"{speed.read / 1e9:.3g}", f"{speed.compute / 1e9:.3g}"
                table.add_row(str(speed.threads), read, compute, chosen)
        return table

    def _many_rows(self) -> Table:
        """Rows from which a weight's kernel takes its path for many, and the formats with each."""
        title = "rows from which kernels take their path for many"
        table = _table(title, "level", "rows", "weight formats")
        for device in self.target.devices:
            for level, rows in device.many_rows.items():
                for count in sorted(set(rows.values())):
                    names = ", ".join(name for name, n in rows.items() if n == count)
                    table.add_row(level, "never" if count >= NEVER else str(count), names)
        return table

    def _peaks(self) -> Table:
        table = _table("arithmetic", "device", "dtype", "TFLOP/s", "FLOP per byte at the ridge")
        for device in self.target.devices:
            for dtype, peak in device.peak.items():
                table.add_row(
                    device.name, dtype, f"{peak / 1e12:.3g}", f"{device.ridge(dtype):.3g}"
                )
        return table

    def _links(self) -> Table:
        table = _table("links", "from", "to", "GB/s", "µs")
        for link in self.target.links:
            speed, delay = f"{link.bandwidth / 1e9:.3g}", f"{link.latency * 1e6:.3g}"
            table.add_row(link.src, link.dst, speed, delay)
        return table

    def _kernels(self) -> Table:
        table = _table("kernels", "kernel", "", "")
        table.add_row("extension", "ok" if self.native else "MISSING", self.native)
        for check in self.checks:
            table.add_row(check.name, "ok" if check.ok else "WRONG", escape(check.detail))
        return table


def doctor(*, remeasure: bool = False, thorough: bool = False) -> DoctorReport:
    """Looks at this machine and runs every kernel's own check, on its CPU and on its GPU.

    Measures for a few seconds if this machine never was, or if `remeasure`.  Limits are measured
    each time, for one or two seconds; `thorough`: for longer, on more memory.
    """
    native, error = _native()
    return DoctorReport(
        versions=_versions(),
        cpu=probe_cpu(),
        target=host_target(remeasure=remeasure),
        native=native,
        native_error=error,
        checks=tuple(run_check(name, check) for name, check in (*_kernel_checks(), *_gpu_checks())),
        limits=_limits(thorough) if native else None,
    )


def _limits(thorough: bool) -> Limits:
    """Natively measured limits: what kernels are held against."""
    reader = Reader(read_buffer_size() if thorough else read_buffer_size(4.0, 1 << 30))
    if thorough:
        return measure_limits(reader, seconds=0.5)
    return measure_limits(reader, passes=2, seconds=0.03)


def run_check(name: str, check: Callable[[], object]) -> KernelCheck:
    """Runs one check. It fails by raising or returning False; a text it returns is the detail."""
    try:
        outcome = check()
    except Exception as error:  # one broken kernel must not hide the others
        return KernelCheck(name, False, f"{type(error).__name__}: {error}")
    return KernelCheck(name, outcome is not False, outcome if isinstance(outcome, str) else "")


def _kernel_checks() -> Iterable[Check]:
    """(name, check) of each native kernel this CPU supports, from cpu_kernels.self_check()."""
    try:
        module = importlib.import_module(KERNELS)
    except ImportError:
        return []
    listed = getattr(module, "self_check", None)
    return cast("Iterable[Check]", listed()) if callable(listed) else []


def _gpu_checks() -> Iterable[Check]:
    """The same of each GPU kernel, where torch can use a GPU."""
    if not torch.cuda.is_available():
        return []
    from ktgraph.triton_kernels.checks import self_check

    return self_check(torch.device("cuda"))


def _native() -> tuple[str, str]:
    """(file, "") of the extension, or ("", why it cannot be imported)."""
    try:
        module = importlib.import_module(NATIVE)
    except ImportError as error:
        return "", str(error)
    return str(module.__file__), ""


def _versions() -> dict[str, str]:
    versions = {"Python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def _and_more(count: int) -> str:
    return f" (and {count} more)" if count else ""


def _cache_texts(cpu: CpuInfo) -> list[str]:
    return [
        f"L{c.level} {round_size(c.size)}" + (f" (shared by {c.shared_by})" * (c.shared_by > 1))
        for c in cpu.caches
        if c.kind != "Instruction"
    ]


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", show_header=any(columns), box=None)
    for column in columns:
        right = column in ("threads", "GB/s", "TFLOP/s", "µs") or column.startswith("FLOP")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    return table
