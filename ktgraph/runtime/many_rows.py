"""`device cpu {many_rows = ["int4p:7", ...]}`: the measured row counts, frozen into a plan.

From so many rows a weight's kernel takes its path for many: panels or tiles of integer weights,
with equal bits; bf16 rows for bf16 and fp8 weights, which round.  There the tokens of a call decide,
of which an expert gets K / E: the choice follows from the plan, never from where tokens are routed.
`lower` writes the line from the target; edit it, or the target's file, to choose otherwise.
"""

from __future__ import annotations

from ktgraph.errors import KtgraphError
from ktgraph.ir.graph import Module, WeightRef, attr
from ktgraph.placement.graph import CPU
from ktgraph.placement.lanes import op_device
from ktgraph.target import Device
from ktgraph.target.many_rows import format_key
from ktgraph.weights.encodings import Tile

_ATTR = "many_rows"


class ManyRowsError(KtgraphError, ValueError):
    """A `many_rows` of the IR that cannot be read."""


def write_many_rows(module: Module, device: Device | None) -> dict[str, int]:
    """Keep what was measured for the formats that CPU ops read; returns it.

    device: the target's CPU; None or a device without figures for the engine's level: nothing is
    kept, and the engine's own constants hold.
    """
    module.devices.get(CPU, {}).pop(_ATTR, None)
    measured = device.many_rows.get(_level()) if device is not None else None
    used = _formats(module)
    found = {name: rows for name, rows in (measured or {}).items() if name in used}
    if found:
        shown = [f"{name}:{rows}" for name, rows in found.items()]
        module.devices.setdefault(CPU, {})[_ATTR] = attr(shown)
    return found


def read_many_rows(module: Module) -> dict[str, int]:
    """What `write_many_rows` kept, by format; raises ManyRowsError for another text."""
    given = module.devices.get(CPU, {}).get(_ATTR, ())
    found: dict[str, int] = {}
    for item in given if isinstance(given, tuple) else (given,):
        name, _, rows = str(item).partition(":")
        if not rows.isdecimal() or int(rows) < 1:
            raise ManyRowsError(
                f'device cpu: many_rows has {item!r}: expected a format and rows, as in "int4p:7"'
            )
        found[name] = int(rows)
    return found


def tile_rows(module: Module, tile: Tile | None) -> int:
    """The count for a packed weight; 0: the engine's own constant."""
    if tile is None or tile.rows == "f32":
        return 0
    return read_many_rows(module).get(format_key(tile.format, tile.group), 0)


def _formats(module: Module) -> set[str]:
    """Formats of the weights in tiles whose CPU ops may take either path."""
    refs = [
        operand
        for op in module.walk()
        if op.body is None and op_device(module, op) == CPU
        for operand in op.operands
        if isinstance(operand, WeightRef)
    ]
    tiles = [Tile.of(module.weight_of(ref).type.encoding) for ref in refs]
    return {format_key(t.format, t.group) for t in tiles if t is not None and t.rows != "f32"}


def _level() -> str:
    """The instruction set whose kernels the engine runs."""
    from ktgraph.cpu_kernels import NativeMissingError, load_native

    try:
        return str(load_native().isa_info()["chosen"])
    except NativeMissingError:
        return ""


__all__ = ["ManyRowsError", "read_many_rows", "tile_rows", "write_many_rows"]
