"""Other libraries that run routed experts on the CPU: an adapter file each.

A peer that is not installed is no silent gap: its cells are refused, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from importlib import import_module

from ktgraph.bench.subject import Subject
from ktgraph.errors import UnsupportedInputError

PEERS = ("torch", "kt", "ggml")


def subjects_of(names: Sequence[str], formats: Collection[str] = ()) -> list[Subject]:
    """The subjects of some peers, of some formats (none named: of all)."""
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise UnsupportedInputError(f"no peer {unknown[0]!r}; there are: {', '.join(PEERS)}")
    found: list[Subject] = []
    for name in names:
        make: Callable[[], list[Subject]] = import_module(f"peers.{name}_peer").subjects
        found += make()
    offered = sorted({s.format for s in found})
    if found and formats and not set(formats) & set(offered):
        raise UnsupportedInputError(f"no peer has {', '.join(formats)}; there are {offered}")
    return [s for s in found if not formats or s.format in formats]
