"""What a machine can do, as plain data: devices, links, and where the figures come from.

Units everywhere: bytes, bytes/s, FLOP/s (one multiply-add counts as two), seconds.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Literal

from ktgraph.errors import KtgraphError

if TYPE_CHECKING:
    from pathlib import Path

DeviceKind = Literal["cpu", "cuda", "simulated"]
Origin = Literal["measured", "described"]

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_DECIMAL = {"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


class TargetError(KtgraphError, ValueError):
    """A target that cannot be found, read or used; the message says what to do instead."""


def parse_size(text: str | int) -> int:
    """Bytes of a size such as "24GiB", "512MiB", "1.5 GiB", "80GB" or a plain count of bytes."""
    if isinstance(text, int):
        return _positive(text, text)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    units = {"": 1} | _UNITS | _DECIMAL
    if match is None or match[2] not in units:
        raise TargetError(f'size {text!r}: expected bytes or a number with a unit, as in "24GiB"')
    return _positive(round(float(match[1]) * units[match[2]]), text)


def _positive(size: int, given: str | int) -> int:
    if size <= 0:
        raise TargetError(f'size {given!r}: expected more than nothing, as in "24GiB"')
    return size


def format_size(size: int) -> str:
    """The shortest text that `parse_size` reads back as exactly `size` bytes."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size and size % _UNITS[unit] == 0:
            return f"{size // _UNITS[unit]}{unit}"
    return f"{size}B"


def round_size(size: float) -> str:
    """`size` bytes for people: "22.5 GiB"."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size >= _UNITS[unit]:
            return f"{size / _UNITS[unit]:.4g} {unit}"
    return f"{size:.0f} B"


@dataclass(frozen=True)
class EngineSpeed:
    """What the CPU engine's own kernels reach on so many threads."""

    threads: int
    read: float  # bytes/s of weights for one token
    compute: float  # FLOP/s for many tokens


@dataclass(frozen=True)
class Device:
    """One place where ops run and bytes lie.

    `kind` says what executes there: "simulated" has a GPU's figures but runs on the CPU.
    """

    name: str  # as in the IR: "cpu", "cuda:0"
    kind: DeviceKind
    memory: int  # bytes that ktgraph may use: weights, caches, activations and workspace
    bandwidth: tuple[tuple[int, float], ...]  # (threads, read bytes/s), rising in threads
    peak: Mapping[str, float] = field(hash=False)  # FLOP/s by compute dtype: "f32" "bf16" "int8"
    launch: float  # seconds to start one op
    model: str = ""  # what people call it
    isa: tuple[str, ...] = ()  # CPU flags that kernels ask for, or ("sm_90",)
    cores: int = 1  # physical cores, or multiprocessors
    threads: int = 1  # worker threads to run with; 1 on a GPU, whose curve has one point
    numa_nodes: int = 1
    # Bytes/s of packed weights that the engine's kernels read for one token, by tile format;
    # unpacking may bind before memory does.  Formats without a figure are read at `bandwidth`.
    reads: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)
    engine: tuple[EngineSpeed, ...] = ()  # by threads, rising: what `threads` was chosen from
    # By the engine's level ("amx") and tile format: rows from which a weight's kernel takes its
    # path for many (ktgraph/target/many_rows.py).  Without a figure, the kernel's own constant.
    many_rows: Mapping[str, Mapping[str, int]] = field(
        default_factory=dict[str, Mapping[str, int]], hash=False
    )

    def bandwidth_at(self, threads: int | None = None) -> float:
        """Read bytes/s with `threads` workers (default: the chosen count), linear in between."""
        wanted = self.threads if threads is None else threads
        below = [point for point in self.bandwidth if point[0] <= wanted]
        above = [point for point in self.bandwidth if point[0] >= wanted]
        if not below:
            return self.bandwidth[0][1] * wanted / self.bandwidth[0][0]
        if not above:
            return self.bandwidth[-1][1]
        (n0, b0), (n1, b1) = below[-1], above[0]
        return b0 if n0 == n1 else b0 + (b1 - b0) * (wanted - n0) / (n1 - n0)

    def many_rows_at(self, level: str) -> Mapping[str, int]:
        """`many_rows` of the engine's level, by format; empty where nothing was measured."""
        found = self.many_rows.get(level)
        return {} if found is None else found

    def peak_for(self, dtype: str) -> float:
        """FLOP/s when computing in `dtype`; raises TargetError if there is no figure for it."""
        if dtype in self.peak:
            return self.peak[dtype]
        raise TargetError(
            f"device {self.name}: no peak for dtype {dtype!r}; known: {', '.join(self.peak)}"
        )

    def ridge(self, dtype: str) -> float:
        """FLOP per byte at which `dtype` work stops being bound by memory."""
        return self.peak_for(dtype) / self.bandwidth_at()


@dataclass(frozen=True)
class Link:
    """A one-way connection between two devices."""

    src: str
    dst: str
    bandwidth: float  # bytes/s for large copies from pinned memory
    latency: float  # seconds for a small copy

    def seconds(self, size: float) -> float:
        """Time to move `size` bytes."""
        return self.latency + size / self.bandwidth


@dataclass(frozen=True)
class Disk:
    """Where weights lie that RAM cannot hold: read at every use.  Planned with, never run from."""

    bandwidth: float  # bytes/s of large reads, past the system's cache
    latency: float = 1e-4  # seconds until the first byte


ASSUMED_DISK = Disk(3e9)  # a common NVMe drive, for a target that says nothing of its own


@dataclass(frozen=True)
class Provenance:
    """Where the figures come from. It is no part of a target's hash."""

    origin: Origin
    date: str = ""  # ISO date
    host: str = ""
    note: str = ""


@dataclass(frozen=True)
class Target:
    """The machine a graph is compiled for. `home` is the device that the IR does not print."""

    name: str
    devices: tuple[Device, ...]
    home: str
    links: tuple[Link, ...] = ()
    provenance: Provenance = Provenance("described")
    disk: Disk | None = None  # no part of the hash: only the planner reads it

    def __post_init__(self) -> None:
        names = [d.name for d in self.devices]
        if len(set(names)) != len(names):
            raise TargetError(f"target {self.name!r}: device names repeat: {', '.join(names)}")
        for role, name in [("home", self.home)] + [
            ("link", end) for k in self.links for end in (k.src, k.dst)
        ]:
            if name not in names:
                raise TargetError(
                    f"target {self.name!r}: {role} names device {name!r}; "
                    f"expected one of {', '.join(names)}"
                )

    def device(self, name: str) -> Device:
        """The device called `name`; raises TargetError with the known ones."""
        for device in self.devices:
            if device.name == name:
                return device
        raise TargetError(
            f"target {self.name!r} has no device {name!r}; "
            f"it has {', '.join(d.name for d in self.devices)}"
        )

    def link(self, src: str, dst: str) -> Link:
        """The link from `src` to `dst`; raises TargetError where there is none."""
        for link in self.links:
            if (link.src, link.dst) == (src, dst):
                return link
        known = ", ".join(f"{k.src} -> {k.dst}" for k in self.links) or "none"
        raise TargetError(f"target {self.name!r} has no link {src} -> {dst}; links: {known}")

    @property
    def cpu(self) -> Device:
        """The host's device."""
        return self.device("cpu")

    @property
    def cpu_threads(self) -> int:
        """Worker threads of the host; 1 for a target that is a GPU alone."""
        return next((d.threads for d in self.devices if d.kind == "cpu"), 1)

    @property
    def gpus(self) -> tuple[Device, ...]:
        """The devices that are GPUs, real or simulated."""
        return tuple(d for d in self.devices if d.kind != "cpu")

    @property
    def is_hybrid(self) -> bool:
        """Whether ops can run on a CPU and on a GPU."""
        return 0 < len(self.gpus) < len(self.devices)

    @property
    def hash(self) -> str:
        """12 hex digits over everything that decisions rest on: not name, provenance and disk."""
        plain = replace(self, name="", provenance=Provenance("described"), disk=None)
        return hashlib.sha256(plain.to_toml().encode()).hexdigest()[:12]

    def with_device(self, changed: Device) -> Target:
        """A copy in which `changed` takes the place of the device of the same name."""
        self.device(changed.name)
        devices = tuple(changed if d.name == changed.name else d for d in self.devices)
        return replace(self, devices=devices)

    def to_toml(self) -> str:
        """The description as TOML text; `from_toml` reads back an equal target."""
        from ktgraph.target.text import write

        return write(self)

    @staticmethod
    def from_toml(text: str, *, path: str | Path = "<text>") -> Target:
        """Reads a description; `path` is only for messages.

        Raises TargetError with file:line, the key, what was expected and what was found.
        """
        from ktgraph.target.text import read

        return read(text, path=str(path))

    def __str__(self) -> str:
        home = [f"home {self.home}", self.provenance.origin, f"hash {self.hash}"]
        lines = [f"target {self.name} ({', '.join(home)})"]
        lines += [f"  {_device_line(d)}" for d in self.devices]
        lines += [
            f"  {k.src} -> {k.dst}: {k.bandwidth / 1e9:.3g} GB/s, {k.latency * 1e6:.3g} µs"
            for k in self.links
        ]
        return "\n".join(lines)


def _device_line(device: Device) -> str:
    peaks = ", ".join(f"{k} {v / 1e12:.3g}" for k, v in device.peak.items())
    threads = f" on {device.threads} thread{'s' * (device.threads > 1)}"
    workers = threads if device.kind == "cpu" else ""
    kind = " (simulated)" if device.kind == "simulated" else ""
    return (
        f"{device.name}{kind}: {device.model or device.kind}, {round_size(device.memory)}, "
        f"{device.bandwidth_at() / 1e9:.3g} GB/s{workers}, peak TFLOP/s {peaks}"
    )


def close_matches(wanted: str, known: list[str]) -> str:
    """The tail of an error message: what the caller may have meant, or all there is."""
    within = [name for name in known if wanted and (wanted in name or name in wanted)]
    close = within or get_close_matches(wanted, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(sorted(known))}"
