"""The attribute `example` of a plain module's function: the sizes of the call it was traced with.

``func @main(%x: f32[b, s, 64]) {example = ["b=2", "s=5"]}``.  `fix-sizes` compiles for them, and
validation runs at them (a flat function at T = their product).
"""

from __future__ import annotations

from collections.abc import Mapping

from ktgraph.ir.graph import Attr, Function

EXAMPLE = "example"


def set_example(func: Function, sizes: Mapping[str, int]) -> None:
    """Record sizes by sym; without any the attribute goes."""
    func.attrs.pop(EXAMPLE, None)
    if sizes:
        func.attrs[EXAMPLE] = tuple(f"{name}={size}" for name, size in sizes.items())


def example_of(func: Function) -> dict[str, int]:
    """Sizes by sym, {} when none are recorded; raises ValueError for a malformed attribute."""
    given: Attr | None = func.attrs.get(EXAMPLE)
    if given is None:
        return {}
    pairs = [str(p).partition("=") for p in given] if isinstance(given, tuple) else []
    if not pairs or not all(n.isidentifier() and v.isdecimal() for n, _, v in pairs):
        raise ValueError(
            f'@{func.name}: attribute example is {given!r}, expected a list as ["b=2", "s=5"]'
        )
    return {name: int(size) for name, _, size in pairs}


__all__ = ["EXAMPLE", "example_of", "set_example"]
