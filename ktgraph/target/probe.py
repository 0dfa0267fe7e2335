"""What this machine's CPU is and may use: read from /proc and /sys, nothing is measured here.

Every reader takes a `root` so that tests can lay out another machine's files.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")

# The flags that kernels ask for, in rising order of what they buy.
ISA_FLAGS = (
    "avx2",
    "fma",
    "f16c",
    "avx_vnni",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_int8",
    "amx_bf16",
)


@dataclass(frozen=True)
class Cache:
    """One cache of the first usable CPU; `shared_by` counts the logical CPUs that share it."""

    level: int
    kind: str  # "Data", "Instruction", "Unified"
    size: int  # bytes
    shared_by: int


@dataclass(frozen=True)
class NumaNode:
    """A memory node: its number, its logical CPUs, and its bytes."""

    number: int
    cpus: tuple[int, ...]
    memory: int


@dataclass(frozen=True)
class MemoryInfo:
    """Host memory in bytes. `available` is what can be taken now without swapping or a kill."""

    total: int
    available: int
    limit: int | None  # the control group's; None where there is none

    @property
    def usable(self) -> int:
        """The most this process may ever have."""
        return self.total if self.limit is None else min(self.total, self.limit)


@dataclass(frozen=True)
class CpuInfo:
    """The CPU as this process may use it."""

    model: str
    logical: int  # logical CPUs online
    affinity: tuple[int, ...]  # logical CPUs this process may run on
    cores: int  # physical cores among them
    quota: float | None  # CPUs' worth of time the control group allows; None is no limit
    flags: frozenset[str]
    caches: tuple[Cache, ...]
    numa: tuple[NumaNode, ...]
    memory: MemoryInfo
    tiles_allowed: bool  # the kernel hands out AMX tile state

    @property
    def isa(self) -> tuple[str, ...]:
        """The flags kernels ask for; AMX only where the kernel allows its tiles too."""
        usable = self.flags if self.tiles_allowed else {f for f in self.flags if f[:3] != "amx"}
        return tuple(flag for flag in ISA_FLAGS if flag in usable)

    @property
    def max_threads(self) -> int:
        """The most worker threads that can run at once: physical cores, bound by the quota."""
        return self.cores if self.quota is None else max(1, min(self.cores, int(self.quota)))

    @property
    def last_level_cache(self) -> int:
        """Bytes of the largest cache, or 32 MiB where the kernel does not say."""
        return max((c.size for c in self.caches), default=32 << 20)


def probe_cpu(root: Path = ROOT) -> CpuInfo:
    """Reads CPU, caches, NUMA, affinity and the control group's limits. Takes milliseconds."""
    model, flags = _cpuinfo(root)
    affinity = _affinity(root)
    return CpuInfo(
        model=model,
        logical=len(_online(root)),
        affinity=affinity,
        cores=_physical_cores(root, affinity),
        quota=_quota(root),
        flags=flags,
        caches=tuple(_caches(root, affinity[0])),
        numa=tuple(_numa(root)),
        memory=probe_memory(root),
        tiles_allowed="amx_tile" in flags and _tiles_supported(),
    )


def probe_memory(root: Path = ROOT) -> MemoryInfo:
    """Host memory now: the kernel's MemAvailable, bound by what the control group has left."""
    info = _meminfo(root)
    total = info.get("MemTotal", 0)
    available = info.get("MemAvailable", info.get("MemFree", 0))
    limits = [(limit, used) for limit, used in _memory_groups(root) if limit < total]
    if not limits:
        return MemoryInfo(total, available, None)
    left = min(limit - used for limit, used in limits)
    return MemoryInfo(total, max(0, min(available, left)), min(limit for limit, _ in limits))


def pick_cpus(info: CpuInfo, count: int) -> list[int]:
    """`count` logical CPUs for pinned threads: spread over NUMA nodes, one per core first."""
    nodes = [[c for c in node.cpus if c in info.affinity] for node in info.numa]
    queues = [_one_per_core_first(node) for node in nodes if node] or [list(info.affinity)]
    longest = max(len(q) for q in queues)
    order = [queue[i] for i in range(longest) for queue in queues if i < len(queue)]
    return [order[i % len(order)] for i in range(count)]


# ---- CPU


def _cpuinfo(root: Path) -> tuple[str, frozenset[str]]:
    text = _read(root / "proc/cpuinfo")
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.M)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.M)
    found = frozenset(flags[1].split()) if flags else frozenset[str]()
    return (model[1].strip() if model else platform.machine()), found


def _online(root: Path) -> tuple[int, ...]:
    listed = parse_cpu_list(_read(root / "sys/devices/system/cpu/online"))
    return listed or tuple(range(os.cpu_count() or 1))


def _affinity(root: Path) -> tuple[int, ...]:
    if root != ROOT:
        listed = re.search(r"^Cpus_allowed_list:\s*(\S+)", _read(root / "proc/self/status"), re.M)
        return parse_cpu_list(listed[1]) if listed else _online(root)
    return tuple(sorted(os.sched_getaffinity(0)))


def _physical_cores(root: Path, cpus: tuple[int, ...]) -> int:
    return len({_siblings(root, cpu) for cpu in cpus})


def _siblings(root: Path, cpu: int) -> tuple[int, ...]:
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    return parse_cpu_list(_read(topology / "thread_siblings_list")) or (cpu,)


def _one_per_core_first(cpus: list[int]) -> list[int]:
    seen: set[tuple[int, ...]] = set()
    first: list[int] = []
    for cpu in cpus:
        core = _siblings(ROOT, cpu)
        if core not in seen:
            seen.add(core)
            first.append(cpu)
    return first + [cpu for cpu in cpus if cpu not in first]


def _caches(root: Path, cpu: int) -> Iterator[Cache]:
    for folder in sorted((root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index*")):
        size = re.fullmatch(r"(\d+)([KMG]?)", _read(folder / "size").strip())
        if size is None:
            continue
        scale = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}[size[2]]
        shared = parse_cpu_list(_read(folder / "shared_cpu_list"))
        level, kind = _read(folder / "level").strip(), _read(folder / "type").strip()
        yield Cache(int(level or 0), kind, int(size[1]) * scale, max(1, len(shared)))


def _numa(root: Path) -> Iterator[NumaNode]:
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    for folder in sorted(folders, key=lambda f: int(f.name[4:])):
        memory = re.search(r"MemTotal:\s*(\d+) kB", _read(folder / "meminfo"))
        cpus = parse_cpu_list(_read(folder / "cpulist"))
        yield NumaNode(int(folder.name[4:]), cpus, int(memory[1]) * 1024 if memory else 0)


def _tiles_supported() -> bool:
    """Whether the kernel supports AMX tile data for this process (asks, changes nothing)."""
    if platform.machine() != "x86_64":
        return False
    arch_prctl, get_supported, tile_data_bit = 158, 0x1021, 1 << 18
    supported = ctypes.c_uint64(0)
    failed = ctypes.CDLL(None).syscall(arch_prctl, get_supported, ctypes.byref(supported))
    return not failed and bool(supported.value & tile_data_bit)


# ---- memory and control groups, versions 1 and 2


def _meminfo(root: Path) -> dict[str, int]:
    rows = re.findall(r"^(\w+):\s*(\d+) kB$", _read(root / "proc/meminfo"), re.M)
    return {name: int(kib) * 1024 for name, kib in rows}


def _memory_groups(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes in use that cannot be dropped) of each control group above this process."""
    for folder in _groups(root, "memory"):
        limit = _integer(folder / "memory.max", folder / "memory.limit_in_bytes")
        used = _integer(folder / "memory.current", folder / "memory.usage_in_bytes")
        if limit is None:
            continue
        stat = _read(folder / "memory.stat")
        droppable = re.search(r"^(?:total_)?inactive_file (\d+)$", stat, re.M)
        yield limit, max(0, (used or 0) - (int(droppable[1]) if droppable else 0))


def _quota(root: Path) -> float | None:
    quotas = [q for folder in _groups(root, "cpu") if (q := _group_quota(folder)) is not None]
    return min(quotas, default=None)


def _group_quota(folder: Path) -> float | None:
    both = _read(folder / "cpu.max").split()
    if len(both) == 2 and both[0].isdigit():
        return int(both[0]) / int(both[1])
    quota, period = _integer(folder / "cpu.cfs_quota_us"), _integer(folder / "cpu.cfs_period_us")
    return quota / period if quota and period and quota > 0 else None


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's control groups for `controller`, up to the mount's root."""
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            bases = [mount, mount / "unified"]
        elif controller in controllers.split(","):
            bases = [mount / controllers, mount / controller]
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for base in bases:
            for depth in range(len(parts), -1, -1):
                folder = base.joinpath(*parts[:depth])
                if folder.is_dir():
                    yield folder


# ---- small files


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """The kernel's list format: "0-3,8" is (0, 1, 2, 3, 8)."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        bounds = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if bounds:
            cpus += range(int(bounds[1]), int(bounds[2] or bounds[1]) + 1)
    return tuple(cpus)


def _integer(*paths: Path) -> int | None:
    for path in paths:
        text = _read(path).strip()
        if re.fullmatch(r"-?\d+", text):
            return int(text)
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
