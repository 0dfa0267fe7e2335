"""`device cpu {many_rows = ["int4p:7", ...]}`: the measured row counts, frozen into a plan.

From so many rows a weight's kernel takes its path for many: panels or tiles of integer weights,
with equal bits; bf16 rows for bf16 and fp8 weights, which round.  There the tokens of a call
decide, of which an expert gets K / E: the choice follows from the plan, never from the routing.
`lower` writes the line from the target; edit it, or the target's file, to choose otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping

from ktgraph.errors import KtgraphError
from ktgraph.ir.graph import Module, WeightRef, attr
from ktgraph.target.many_rows import format_key
from ktgraph.weights.encodings import Tile

_CPU, _ATTR = "cpu", "many_rows"


class ManyRowsError(KtgraphError, ValueError):
    """A `many_rows` of the IR that cannot be read."""


def write_many_rows(module: Module, rows: Mapping[str, int]) -> None:
    """Keep counts by format; where there is none, the engine's own constants hold."""
    module.devices.get(_CPU, {}).pop(_ATTR, None)
    if rows:
        shown = [f"{name}:{count}" for name, count in rows.items()]
        module.devices.setdefault(_CPU, {})[_ATTR] = attr(shown)


def read_many_rows(module: Module) -> dict[str, int]:
    """What `write_many_rows` kept; raises ManyRowsError for another text."""
    given = module.devices.get(_CPU, {}).get(_ATTR, ())
    found: dict[str, int] = {}
    for item in given if isinstance(given, tuple) else (given,):
        name, _, count = str(item).partition(":")
        if not count.isdecimal() or int(count) < 1:
            raise ManyRowsError(
                f'device cpu: many_rows has {item!r}: expected a format and rows, as in "int4p:7"'
            )
        found[name] = int(count)
    return found


def tile_of(module: Module, ref: WeightRef) -> Tile | None:
    """How a weight is packed; None where it is not."""
    return Tile.of(module.weight_of(ref).type.encoding)


def tile_rows(module: Module, tile: Tile | None) -> int:
    """The count for a packed weight; 0: the engine's own constant."""
    key = many_rows_key(tile)
    return read_many_rows(module).get(key, 0) if key else 0


def many_rows_key(tile: Tile | None) -> str:
    """The name of a tile format's count; empty for weights whose kernel has one path."""
    return format_key(tile.format, tile.group) if tile is not None and tile.rows != "f32" else ""


__all__ = [
    "ManyRowsError",
    "many_rows_key",
    "read_many_rows",
    "tile_of",
    "tile_rows",
    "write_many_rows",
]
