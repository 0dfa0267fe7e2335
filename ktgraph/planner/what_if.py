"""What-if texts: ``gpu_memory=+8GiB``, ``ram=384GiB,link=x2``, ``cpu=NAME``.

A text holds changes of the machine or the call, with commas between them, and becomes one row
beside the base.

    gpu_memory, ram       a size ("24GiB"), more or less ("+8GiB", "-2GiB"), or times ("x2")
    link, disk, dram      bytes a second ("50GB/s"), more or less, or times; dram: main memory
    cpu, gpu              the CPU or GPU of another target, by name or file; RAM and links stay;
                          gpu=none leaves the CPU alone
    quantize, context, batch, max_tokens, defer    as the options of those names
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ktgraph.errors import UnsupportedInputError
from ktgraph.target import (
    ASSUMED_DISK,
    Device,
    Target,
    TargetError,
    format_size,
    parse_size,
    resolve_target,
)

_BOUND_BY_MEMORY = 0.85  # share of memory's bandwidth from which on a kernel is bound by it


class WhatIfError(UnsupportedInputError):
    """A what-if that cannot be read or does not suit the target; the message gives examples."""


@dataclass(frozen=True)
class Setting:
    """What a forecast is for: a machine, and the options of the call that differ from defaults."""

    target: Target
    options: Mapping[str, Any]
    batch: int = 1  # sequences of a decode step


def apply_what_if(text: str, base: Setting) -> Setting:
    """The setting with the changes of a text; raises WhatIfError and TargetError."""
    setting = base
    for key, value in _changes(text):
        setting = _CHANGES[key](setting, value)
    return setting


def _changes(text: str) -> list[tuple[str, str]]:
    """Keys and values; a comma inside a value, as policies have, does not end it."""
    parts = re.split(r",\s*(?=(?:\w+)\s*=)", text) if isinstance(text, str) else []  # pyright: ignore[reportUnnecessaryIsInstance]
    found: list[tuple[str, str]] = []
    for part in parts:
        key, sign, value = (p.strip() for p in part.partition("="))
        if key not in _CHANGES and found and found[-1][0] == "quantize":
            found[-1] = ("quantize", f"{found[-1][1]},{part.strip()}")
        elif key not in _CHANGES or not sign or not value:
            raise WhatIfError(_unreadable(text, key))
        else:
            found.append((key, value))
    if not found:
        raise WhatIfError(_unreadable(str(text), ""))
    return found


def _unreadable(text: str, key: str) -> str:
    close = difflib.get_close_matches(key, list(_CHANGES), n=1)
    hint = f"did you mean {close[0]}=...?" if close and key not in _CHANGES else ""
    known = f"known: {', '.join(_CHANGES)}"
    return (
        f'what-if {text!r}: expected key=value, as in "gpu_memory=+8GiB", "ram=384GiB,link=x2" or '
        f'"cpu=h200+xeon-amx"; {hint or known}'
    )


# -- sizes and rates -------------------------------------------------------------------------------
def amount(key: str, text: str | int, now: float | None) -> int:
    """A size or rate: absolute, more or less than `now`, or times it; raises WhatIfError."""
    match = re.fullmatch(r"\s*([+x-]?)\s*(.+?)\s*(/s)?\s*", str(text))
    assert match is not None
    sign, value = match[1], match[2]
    if sign and now is None:
        raise WhatIfError(f"{key}={text}: there is nothing yet that this could be added to")
    try:
        if sign == "x":
            found = (now or 0.0) * float(value)
        else:
            size = parse_size(int(value) if value.isdecimal() else value)
            found = {"": 0.0, "+": now or 0.0, "-": now or 0.0}[sign] + (
                -size if sign == "-" else size
            )
    except (TargetError, ValueError) as error:
        raise WhatIfError(
            f'{key}={text}: expected an amount such as "24GiB" or "50GB/s", more or less as in '
            '"+8GiB" or "-2GiB", or times as in "x2"'
        ) from error
    if found < 1:
        raise WhatIfError(f"{key}={text}: nothing would be left of {format_size(int(now or 0))}")
    return int(found)


def _gpu_memory(setting: Setting, value: str | int) -> Setting:
    gpu = _gpu(setting, f"gpu_memory={value}")
    changed = replace(gpu, memory=amount("gpu_memory", value, gpu.memory))
    return replace(setting, target=setting.target.with_device(changed))


def _ram(setting: Setting, value: str | int) -> Setting:
    cpu = _cpu(setting, f"ram={value}")
    changed = replace(cpu, memory=amount("ram", value, cpu.memory))
    return replace(setting, target=setting.target.with_device(changed))


def _dram(setting: Setting, value: str) -> Setting:
    """Every point of the curve by one factor, so that the chosen threads reach the rate.

    Kernels that read nearly as fast as memory gives are taken to gain with it, others not.
    """
    cpu = _cpu(setting, f"dram={value}")
    factor = amount("dram", value, cpu.bandwidth_at()) / cpu.bandwidth_at()
    curve = tuple((threads, speed * factor) for threads, speed in cpu.bandwidth)
    near = _BOUND_BY_MEMORY * cpu.bandwidth_at()
    reads = {name: r * factor if r >= near or factor < 1 else r for name, r in cpu.reads.items()}
    changed = replace(cpu, bandwidth=curve, reads=reads)
    return replace(setting, target=setting.target.with_device(changed))


def _link(setting: Setting, value: str) -> Setting:
    _gpu(setting, f"link={value}")
    links = tuple(
        replace(k, bandwidth=float(amount("link", value, k.bandwidth)))
        for k in setting.target.links
    )
    if not links:
        raise WhatIfError(f"link={value}: target {setting.target.name!r} has no links")
    return replace(setting, target=replace(setting.target, links=links))


def _disk(setting: Setting, value: str) -> Setting:
    disk = setting.target.disk or ASSUMED_DISK
    changed = replace(disk, bandwidth=float(amount("disk", value, disk.bandwidth)))
    return replace(setting, target=replace(setting.target, disk=changed))


# -- other devices ---------------------------------------------------------------------------------
def _other_cpu(setting: Setting, name: str) -> Setting:
    own = _cpu(setting, f"cpu={name}")
    other = _cpu(replace(setting, target=resolve_target(name)), f"cpu={name}")
    changed = replace(other, memory=own.memory)
    return replace(setting, target=setting.target.with_device(changed))


def _other_gpu(setting: Setting, name: str) -> Setting:
    if name == "none":
        cpu = _cpu(setting, "gpu=none")
        alone = replace(setting.target, devices=(cpu,), home=cpu.name, links=())
        return replace(setting, target=alone)
    target, other = setting.target, resolve_target(name)
    gpu = _gpu(replace(setting, target=other), f"gpu={name}")
    if target.gpus:
        changed = replace(gpu, name=target.gpus[0].name)
        return replace(setting, target=target.with_device(changed))
    links = tuple(k for k in other.links if {k.src, k.dst} == {"cpu", gpu.name})
    devices = (*target.devices, gpu)
    return replace(setting, target=replace(target, devices=devices, home=gpu.name, links=links))


def _gpu(setting: Setting, asked: str) -> Device:
    if setting.target.gpus:
        return setting.target.gpus[0]
    raise WhatIfError(f"{asked}: target {setting.target.name!r} has no GPU; gpu=NAME adds one")


def _cpu(setting: Setting, asked: str) -> Device:
    for device in setting.target.devices:
        if device.kind == "cpu":
            return device
    raise WhatIfError(f"{asked}: target {setting.target.name!r} is a GPU alone; use hybrid")


# -- options ---------------------------------------------------------------------------------------
def _option(name: str) -> Callable[[Setting, str], Setting]:
    def change(setting: Setting, value: str) -> Setting:
        return replace(setting, options={**setting.options, name: value})

    return change


def _count(name: str) -> Callable[[Setting, str], Setting]:
    def change(setting: Setting, value: str) -> Setting:
        if not value.isdecimal() or int(value) < 1:
            raise WhatIfError(f"{name}={value}: expected a whole number above 0")
        if name == "batch":
            return replace(setting, batch=int(value))
        return replace(setting, options={**setting.options, name: int(value)})

    return change


_CHANGES: dict[str, Callable[[Setting, str], Setting]] = {
    "gpu_memory": _gpu_memory,
    "ram": _ram,
    "cpu": _other_cpu,
    "gpu": _other_gpu,
    "link": _link,
    "dram": _dram,
    "disk": _disk,
    "quantize": _option("quantize"),
    "context": _count("context"),
    "batch": _count("batch"),
    "max_tokens": _count("max_tokens"),
    "defer": _count("defer"),
}

__all__ = ["Setting", "WhatIfError", "amount", "apply_what_if"]
