"""The machine a graph is compiled for: probed and measured once, or described in a TOML file."""

from ktgraph.target.choose import (
    check_threads,
    cpu,
    cuda,
    hybrid,
    load_target,
    most_threads,
    resolve_target,
    shipped_targets,
    with_gpu_memory,
    with_threads,
)
from ktgraph.target.description import (
    ASSUMED_DISK,
    Device,
    Disk,
    Link,
    Provenance,
    Target,
    TargetError,
    format_size,
    parse_size,
    round_size,
)
from ktgraph.target.host import cache_file, host_target, provenance_text
from ktgraph.target.probe import CpuInfo, MemoryInfo, probe_cpu, probe_memory

__all__ = [
    "ASSUMED_DISK",
    "CpuInfo",
    "Device",
    "Disk",
    "Link",
    "MemoryInfo",
    "Provenance",
    "Target",
    "TargetError",
    "cache_file",
    "check_threads",
    "cpu",
    "cuda",
    "format_size",
    "host_target",
    "hybrid",
    "load_target",
    "most_threads",
    "parse_size",
    "probe_cpu",
    "probe_memory",
    "provenance_text",
    "resolve_target",
    "round_size",
    "shipped_targets",
    "with_gpu_memory",
    "with_threads",
]
