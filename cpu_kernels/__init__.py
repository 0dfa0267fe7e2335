"""Native CPU kernels: an engine of pinned threads that runs whole plans, and packed weights.

Layouts are in ``docs/layouts.md``; what each kernel takes is in ``kernels()``.  Pointers go in as
integers, so whoever owns the memory (torch, numpy, a mapped file) must keep it alive while a plan
may run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = [
    "BATCH",
    "REPLY_FAILED",
    "RUN_CALL",
    "SUBMIT_CALL",
    "WAIT_CALL",
    "Batch",
    "Call",
    "Engine",
    "NativeMissingError",
    "Plan",
    "Service",
    "State",
    "Tensor",
    "Weight",
    "default_cpus",
    "empty_packed",
    "isa_info",
    "kernels",
    "load_native",
    "node_slices",
    "numa_node_of",
    "numa_place",
    "pack_into",
    "pack_ints_into",
    "packed_nbytes",
    "quantize",
    "repack_into",
    "self_check",
    "topology",
    "unpack",
]


class NativeMissingError(ImportError):
    """The compiled part of ktgraph is not there."""


def load_native() -> Any:
    """The compiled module; raises NativeMissingError saying how to build it."""
    try:
        from ktgraph.cpu_kernels import _native
    except ImportError as e:
        raise NativeMissingError(
            "ktgraph's native CPU kernels are not built for this Python "
            f"({e}). Build them with: pip install -e .  (needs a C++20 compiler and x86-64)"
        ) from e
    return _native


def self_check() -> list[tuple[str, Callable[[], str]]]:
    """(name, check) for kernels on this machine; a check returns its error as text, or raises."""
    from ktgraph.cpu_kernels.checks import checks

    return checks()


def __getattr__(name: str) -> Any:
    """Everything in ``__all__`` comes from the compiled module, on first use."""
    if name in __all__:
        return getattr(load_native(), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
