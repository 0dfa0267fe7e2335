"""Other libraries that run routed experts on the CPU: an adapter file each.

A peer that is not installed is no silent gap: its cells are refused, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module

from ktgraph.bench.subject import Subject
from ktgraph.errors import UnsupportedInputError

PEERS = ("torch", "kt", "ggml")


def subjects_of(names: Sequence[str]) -> list[Subject]:
    """All subjects of some peers."""
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise UnsupportedInputError(f"no peer {unknown[0]!r}; there are: {', '.join(PEERS)}")
    found: list[Subject] = []
    for name in names:
        make: Callable[[], list[Subject]] = import_module(f"peers.{name}_peer").subjects
        found += make()
    return found
