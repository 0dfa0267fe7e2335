"""The target of this machine: measured on the first call, then read from the user's cache."""

from __future__ import annotations

import datetime
import hashlib
import logging
import os
import platform
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch

from ktgraph.target import measure
from ktgraph.target.description import Link, Provenance, Target, TargetError
from ktgraph.target.probe import CpuInfo, probe_cpu

log = logging.getLogger("ktgraph")
_FIGURES = 3  # changes when other figures are measured, so that files of before are not read


def host_target(*, remeasure: bool = False) -> Target:
    """All devices of this machine with measured figures; `home` is its first GPU, else its CPU.

    The first call measures for a few seconds and writes `cache_file()`; later calls read it.
    Memory budgets come from the control group's limits at each call, never from the cache.
    """
    info = probe_cpu()
    path = cache_file(info)
    target = None if remeasure else _cached(path)
    if target is None:
        target = _measured(info)
        _store(target, path)
    return target.with_device(replace(target.cpu, memory=measure.cpu_budget(info.memory)))


def provenance_text(target: Target) -> str:
    """Where a target's figures come from, how old they are, and how to renew measured ones."""
    about = target.provenance
    age = _days_since(about.date)
    old = f" ({age} days ago)" if age is not None and age > 1 else ""
    text = f"{about.origin} {about.date}{old}".strip()
    if is_this_machine(target):
        note = f" ({about.note})" if about.note else ""
        return f"{text} on this machine{note}; renew with: ktgraph doctor --remeasure"
    return f"{text}: {about.note}" if about.note else text


def is_this_machine(target: Target) -> bool:
    """Whether the target's CPU was measured here."""
    about = target.provenance
    return about.origin == "measured" and bool(about.host) and about.host == platform.node()


def _days_since(date: str) -> int | None:
    try:
        return (datetime.date.today() - datetime.date.fromisoformat(date)).days
    except ValueError:
        return None


def cache_file(info: CpuInfo | None = None) -> Path:
    """Where this machine's figures are kept: one file for each set of CPUs, limits and GPUs."""
    return cache_folder() / f"target-{_host_key(info or probe_cpu())}.toml"


def cache_folder() -> Path:
    """The user's cache folder of ktgraph; it may not be there yet."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(base) if Path(base).is_absolute() else Path.home() / ".cache"
    return folder / "ktgraph"


def gpu_names() -> list[str]:
    """The CUDA devices that torch can use here, by their own names."""
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def _host_key(info: CpuInfo) -> str:
    """Changes with whatever changes the figures: CPU, cores allowed, memory, GPUs, kernels."""
    parts = (
        _FIGURES,
        _engine_stamp(),
        platform.node(),
        info.model,
        info.isa,
        info.affinity,
        info.quota,
        info.memory.total >> 30,
        gpu_names(),
        torch.__version__,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def _engine_stamp() -> tuple[int, int]:
    """Size and time of the native library: kernels of another build have other figures."""
    try:
        found = find_spec("ktgraph.cpu_kernels._native")
        about = os.stat(found.origin) if found is not None and found.origin else None
    except (ImportError, OSError):
        about = None
    return (about.st_size, about.st_mtime_ns) if about is not None else (0, 0)


def _measured(info: CpuInfo) -> Target:
    log.info("measuring this machine once (a few seconds)")
    busy = _busy(info)
    devices = [measure.measure_cpu(info)]
    links: list[Link] = []
    for index in range(len(gpu_names())):
        devices.append(measure.measure_gpu(index))
        links += measure.measure_links(index)
    return Target(
        name=f"{platform.node() or 'host'}",
        devices=tuple(devices),
        home=devices[min(1, len(devices) - 1)].name,
        links=tuple(links),
        provenance=Provenance("measured", time.strftime("%Y-%m-%d"), platform.node(), busy),
    )


def _busy(info: CpuInfo) -> str:
    """What else ran just before: figures taken beside it are too low."""
    load, cpus = os.getloadavg()[0], len(info.affinity)
    return f"load {load:.1f} on {cpus} CPUs then: may be low" if load > 0.5 * cpus else ""


def _cached(path: Path) -> Target | None:
    """The target in `path`; None if it is not there, or broken (which is said, then remeasured)."""
    try:
        text = path.read_text(encoding="utf-8")
        target = Target.from_toml(text, path=path)
        target.device("cpu")
    except FileNotFoundError:
        return None
    except (TargetError, OSError, UnicodeDecodeError) as error:
        log.warning("ktgraph: measuring again, since the cached figures cannot be used: %s", error)
        return None
    return target


def _store(target: Target, path: Path) -> None:
    """Writes beside `path` and renames, so that a reader never sees half a file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    except OSError as error:
        log.warning("ktgraph: figures of this machine are not kept: %s", error)
        return
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write("# Measured by ktgraph; delete this file to measure again.\n")
            file.write(target.to_toml())
        os.replace(temporary, path)
    except OSError as error:
        log.warning("ktgraph: figures of this machine are not kept: %s", error)
        with suppress(OSError):
            os.unlink(temporary)
