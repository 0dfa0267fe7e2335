"""Miniatures: sizes at which a model's graph runs in milliseconds, and still tells its dims apart.

A module with named dims is rebound to small, pairwise distinct sizes; one that still has witness
traces takes the sizes of a witness; any other runs as it is, when it is small enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from ktgraph.ir.dims import SLOTS, Dim
from ktgraph.ir.graph import Module, Witness
from ktgraph.ir.literals import literals, set_literals
from ktgraph.ir.types import TensorType
from ktgraph.ir.verify import VerifyError, verify
from ktgraph.weights.encodings import EncodingError, encoding_def

LARGEST = 40_000_000  # weight elements that a validation run may hold

# Sizes without special wishes; constraints are in `choose_sizes`.
_PREFERRED: dict[str, int] = {
    "KG": 2, "K": 3, "NG": 4, "G": 5, "NS": 6, "J": 7, "N": 11, "V": 13, "R": 17, "RQ": 19,
    "F": 23, "FS": 31, "I": 29, "D": 36, "VOC": 61, "W": 8,
}  # fmt: skip
_WIDTHS = ("F", "D", "I", "V", "FS", "R", "RQ", "N")  # may be made multiples of a block


class MiniatureError(ValueError):
    """The modules cannot be run together at small sizes: the message says why."""


@dataclass(frozen=True)
class Miniature:
    """Modules at the same small sizes; `how` says where the sizes come from."""

    modules: tuple[Module, ...]
    how: str


def shrink(*modules: Module) -> Miniature:
    """The modules at the same sizes, small where they can be; raises MiniatureError."""
    reasons: list[str] = []
    for how, attempt in _attempts(modules):
        reason = _unfit(attempt)
        if not reason:
            return Miniature(tuple(attempt), how)
        reasons.append(f"{how}: {reason}")
    raise MiniatureError("; ".join(reasons))


def _attempts(modules: Sequence[Module]) -> Iterator[tuple[str, list[Module]]]:
    witnesses = next((m.witnesses for m in modules if m.witnesses), list[Witness]())
    for number in range(len(witnesses)):
        found = [_at_witness(m, number, witnesses[number].bindings) for m in modules]
        if all(found):
            yield f"witness {number}", [m for m in found if m is not None]
    if not witnesses and any(m.dims for m in modules):
        sizes = choose_sizes(modules)
        yield "named dims", [_rebound(m, sizes) for m in modules]
    yield "its own sizes", list(modules)


def _at_witness(module: Module, number: int, bindings: dict[str, int]) -> Module | None:
    """The module at a witness's sizes; None when its literals no longer fit the witness."""
    if not module.witnesses:
        return _rebound(module, bindings)
    small = _rebound(module, bindings)
    found = module.witnesses[number].literals
    if len(found) != len(literals(small)):
        return None
    set_literals(small, found)
    return small  # it keeps its witnesses: they say that its literals are meant to be there


def _rebound(module: Module, sizes: dict[str, int]) -> Module:
    return module.rebind(**{k: v for k, v in sizes.items() if k in module.dims})


def _unfit(modules: Sequence[Module]) -> str:
    """Why the modules cannot be run at their sizes; an empty string when they can."""
    for module in modules:
        count = elements(module)
        if count > LARGEST:
            return f"{count / 1e6:.0f} million weight elements, at most {LARGEST / 1e6:.0f} are run"
        try:
            verify(module)
        except VerifyError as error:
            return str(error).split("\n", 1)[1].strip().replace("\n", " ")
    return ""


def elements(module: Module) -> int:
    """Elements of all weights that come from a checkpoint."""
    leaves = [w for w in module.weights.values() if w.source is not None]
    return sum(w.members * prod(d.at(module.dims) for d in w.type.dims) for w in leaves)


def choose_sizes(modules: Sequence[Module]) -> dict[str, int]:
    """Small pairwise distinct sizes for every named dim of the modules.

    Kept from the real sizes: P or A = 2*J, H a multiple of G, E of NG.  K experts fit into the
    groups kept; widths along which blocks of an encoding run are multiples of the block.  No size
    equals a literal of the modules, and no axis as long as ``K-2`` is empty.
    """
    real = {k: v for m in modules for k, v in m.dims.items()}
    taken = {n for m in modules for n in literals(m) if n >= 8}
    sizes: dict[str, int] = {}
    axes = _axes(modules)
    for name in sorted(real, key=_order):
        sizes[name] = _size(name, real, sizes, taken)
        while any(d.names == frozenset((name,)) and d.at(sizes) < 1 for d in axes):
            sizes[name] += 1
        taken.add(sizes[name])
    blocked, block = _blocked(modules), _block(modules)
    for count, name in enumerate(blocked, start=1):
        sizes[name] = count * block
    if "A" in sizes and _heads_are_blocked(modules):
        sizes["A"] = (2 * len(blocked) + 1) * block  # odd, so that A / 2 is no multiple of a block
        if real.get("A") == 2 * real.get("J", 0):
            sizes["J"] = sizes["A"] // 2
    return sizes


def _axes(modules: Sequence[Module]) -> set[Dim]:
    """Axes of values that are sums of names and numbers."""
    types = [v.type for m in modules for f in m.functions.values() for v in f.values()]
    return {d for t in types if isinstance(t, TensorType) for d in t.dims if len(d.terms) > 1}


def _order(name: str) -> tuple[int, int, str]:
    """Dims that others depend on first, the free ones in the order of the table."""
    tied = {"H": 1, "E": 1, "P": 1, "A": 1}.get(name, 0)
    rank = list(_PREFERRED).index(name) if name in _PREFERRED else len(_PREFERRED)
    return tied, rank, name


def _size(name: str, real: dict[str, int], chosen: dict[str, int], taken: set[int]) -> int:
    size, step = _wish(name, real, chosen)
    while step and _is_taken(name, size, taken):
        size += step
    return size


def _is_taken(name: str, size: int, taken: set[int]) -> bool:
    """Whether a size would be mistaken for another, or lead to one that would (P = 2*J)."""
    return size in taken or (name == "J" and 2 * size in taken)


def _wish(name: str, real: dict[str, int], chosen: dict[str, int]) -> tuple[int, int]:
    """A first size and the step to the next one; step 0: it is determined."""
    pairs = chosen.get("J")
    if name in ("P", "A") and pairs is not None and real[name] >= 2 * real["J"]:
        return (2 * pairs, 0) if real[name] == 2 * real["J"] else (2 * pairs + 4, 2)
    if name == "H":
        return 2 * chosen.get("G", 5), chosen.get("G", 1)
    if name == "E":
        each = max(3, -(-chosen.get("K", 3) // chosen.get("KG", 1)))
        return each * chosen.get("NG", 3), chosen.get("NG", 1)
    if name in ("P", "A"):
        return 16, 2
    if name.startswith(SLOTS):
        return 4, 1
    return _PREFERRED.get(name, 37), 2 if name == "D" else 1


def _blocked(modules: Sequence[Module]) -> list[str]:
    """Width dims that occur in the last axis of a weight with blocks."""
    found: dict[str, None] = {}
    for module in modules:
        for weight in module.weights.values():
            if weight.type.dims and _weight_block(module, weight.name) > 1:
                names = weight.type.dims[-1].names
                found.update({n: None for n in _WIDTHS if n in names})
    return [n for n in _WIDTHS if n in found]


def _heads_are_blocked(modules: Sequence[Module]) -> bool:
    """Whether blocks run along the heads' channels [H*A], as in an output projection."""
    axes = [
        weight.type.dims[-1].names
        for module in modules
        for weight in module.weights.values()
        if weight.type.dims and _weight_block(module, weight.name) > 1
    ]
    return any("A" in names and not any(w in names for w in _WIDTHS) for names in axes)


def _block(modules: Sequence[Module]) -> int:
    """The largest block of the modules' encodings, in elements of a row."""
    return max([1, *(_weight_block(m, name) for m in modules for name in m.weights)])


def _weight_block(module: Module, name: str) -> int:
    encoding = module.weights[name].type.encoding
    if encoding is None:
        return 1
    try:
        return max(encoding.get("group", 0), encoding_def(encoding).block)
    except EncodingError:
        return 1


__all__ = ["LARGEST", "Miniature", "MiniatureError", "choose_sizes", "elements", "shrink"]
