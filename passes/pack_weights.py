"""pack-weights: a twin in tiles for each matrix that a CPU kernel reads (docs/layouts.md).

On a GPU int8 (by row), int4, int4p and fp8 are packed, in the same tiles: an expert that moves
between host and GPU is copied as it is.  Dense matrices stay row-major there.

Tiles hold the same values in the order in which the kernels walk them, so this is exact: bf16 stays
bf16, int4 and mxfp4 keep their groups, GGUF blocks keep their bits.  Gate and up rows of one MLP
alternate by tile.  Tables, norms and router gates stay dense.

The encoding also says in which form a kernel takes the rows that it multiplies: `rows=int8` for
integer weights (dot products run on integer units, with one scale per row and 256 columns),
`rows=bf16` for bf16 weights where the op computes in bf16, else f32.  On a GPU rows are rounded
where few tokens of 16 bits meet 4-bit weights, each 16 columns with a scale of their own.  The
compile option activations="f32" keeps rows as they are, except for int4p and GGUF blocks, whose
kernels take no others.

Before:  %q = nn.linear %h, @q_proj.q                         @q_proj.q : f32[H*A, D]<int8>
After:   %q = nn.linear %h, @q_proj.q.p : f32[T, H*A] via cpu.linear_int8
         weight @q_proj.q.p : f32[H*A, D]<tile.int8(rows=int8)> = pack(@q_proj.q)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ktgraph.ir.graph import Module, Op, Value, Weight, WeightRef
from ktgraph.ir.types import Encoding
from ktgraph.pass_api import Numerics, Pass, PassContext, exact, register_pass
from ktgraph.rewrite import derived_weight, reference
from ktgraph.runtime.weight_forms import (
    ANY_ROWS,
    PACKED,
    PACKED_ON_GPU,
    TILE_FORMATS,
    device_of,
    gpu_reads_tiles,
    is_cpu,
)
from ktgraph.weights.encodings import INT8_ROWS_ONLY, Tile, nbytes

_RULE = "pack-weights"

_INTEGERS = ("int8", "int4", "int4z", "mxfp4", *INT8_ROWS_ONLY)  # tile formats


@register_pass
@dataclass(frozen=True)
class PackWeights(Pass):
    """Give CPU ops their matrices in tiles."""

    name: ClassVar[str] = "pack-weights"
    numerics: ClassVar[Numerics] = exact()
    required: ClassVar[bool] = True

    def run(self, module: Module, ctx: PassContext) -> None:
        packed: set[str] = set()
        for op in module.walk():
            on_cpu = is_cpu(device_of(module, op))
            if not on_cpu and op.name not in PACKED_ON_GPU:
                continue
            for position, gate_up in PACKED.get(op.name, {}).items():
                packed |= _pack(module, ctx, op, position, gate_up, on_cpu)
        packed |= _stream_packed(module, ctx)
        _note_doubles(module, ctx, packed)


def _pack(
    module: Module, ctx: PassContext, op: Op, position: int, gate_up: bool, on_cpu: bool
) -> set[str]:
    """Let the op read the packed twin; returns the name of the weight that was packed."""
    ref = op.operand(position)
    if not isinstance(ref, WeightRef):
        if on_cpu:
            ctx.refused(_RULE, op, f"operand {position} is computed, not stored")
        return set()
    made = _twin(module, ctx, op, ref, gate_up, on_cpu)
    if made is None:
        return set()
    op.set_operand(position, reference(made, [ref]))
    return {ref.name}


def _twin(
    module: Module, ctx: PassContext, op: Op, ref: WeightRef, gate_up: bool, on_cpu: bool
) -> Weight | None:
    """The weight in the tiles that the op's kernel takes, None where it takes none."""
    type = module.weight_of(ref).type
    stored = type.encoding or Encoding(type.dtype)
    if not on_cpu and not gpu_reads_tiles(stored):
        return None
    kept = ctx.options.activations == "f32" or (not on_cpu and not _gpu_rounds(op, stored))
    tile = _tile(stored, gate_up, _rows(op, stored, kept))
    if tile is None:
        if Tile.of(type.encoding) is None:
            ctx.refused(_RULE, op, f"{ref} is stored as {type.encoding}, which no tile holds")
        return None
    if tile.format in INT8_ROWS_ONLY and op.name not in ANY_ROWS:
        ctx.refused(_RULE, op, f"{ref} is {tile.format}, which this op's kernel does not take")
        return None
    leaf = ref.name.rpartition(".")[2] + ".p"
    attrs = {"encoding": str(tile.encoding)}
    made = derived_weight(module, [ref], leaf, "pack", type.encoded(tile.encoding), attrs)
    if made.name not in module.weights:
        module.add_weight(made)
    return module.weights[made.name]


def _stream_packed(module: Module, ctx: PassContext) -> set[str]:
    """What GPU kernels read in tiles crosses in tiles: the CPU's, where a CPU op reads them too.

    GPU kernels take dense matrices row-major, so the host may hold those twice.  Returns the names
    of the weights that were packed.
    """
    found: set[str] = set()
    for op in module.walk():
        if op.name != "xfer.copy":
            continue
        for position, operand in enumerate(op.operands):
            if not isinstance(operand, WeightRef):
                continue
            result = op.results[position]
            twin = _streamed_twin(module, ctx, operand, result)
            if twin is not None:
                op.set_operand(position, reference(twin, [operand]))
                result.type = twin.type.on(result.type.device)
                found.add(operand.name)
    return found


def _streamed_twin(
    module: Module, ctx: PassContext, ref: WeightRef, result: Value
) -> Weight | None:
    stored = module.weight_of(ref).type
    if not gpu_reads_tiles(stored.encoding or Encoding(stored.dtype)):
        return None
    for weight in module.weights.values():
        made = weight.recipe
        if made is not None and made.kind == "pack" and made.args[0].name == ref.name:
            return weight
    for op in module.walk():
        packed = PACKED[op.name] if op.name in PACKED_ON_GPU else {}
        for position, gate_up in packed.items():
            if op.operand(position) is result:
                return _twin(module, ctx, op, ref, gate_up, on_cpu=False)
    return None


def _tile(stored: Encoding, gate_up: bool, rows: str) -> Tile | None:
    """The tile format that holds the same values, None when there is none."""
    format = TILE_FORMATS.get(stored.name)
    return None if format is None else Tile(format, stored.get("group"), gate_up, rows)


def _gpu_rounds(op: Op, stored: Encoding) -> bool:
    """Whether the GPU's kernels have a form for rows of int8: int8 weights gain nothing by it."""
    return stored.name in ("int4", "int4p") and op.results[0].tensor.dtype in ("bf16", "f16")


def _rows(op: Op, stored: Encoding, kept: bool) -> str:
    """What rows that meet the weight are rounded to; `kept`: to nothing, where that can be."""
    if op.name not in ANY_ROWS or kept:
        return "int8" if TILE_FORMATS.get(stored.name) in INT8_ROWS_ONLY else "f32"
    if TILE_FORMATS.get(stored.name) in _INTEGERS:
        return "int8"
    in_bf16 = stored.name in ("bf16", "fp8") and op.results[0].tensor.dtype == "bf16"
    return "bf16" if in_bf16 else "f32"


def _note_doubles(module: Module, ctx: PassContext, packed: set[str]) -> None:
    """Weights that another op still reads as they were lie in memory twice."""
    twice = {name for p in packed for name in _with_origin(module, p)}
    readers: dict[str, Op] = {}
    for op in module.walk():
        readers.update({ref.name: op for ref in op.weights if ref.name in twice})
    for name, op in readers.items():
        weight = module.weights[name]
        size = nbytes(weight.type, module.dims) * weight.members
        ctx.note(f"@{name} is kept packed and as it was ({size / 1e6:.4g} MB): {op.name} reads it")


def _with_origin(module: Module, name: str) -> list[str]:
    """The weight, and what it was quantized from."""
    made = module.weights[name].recipe
    if made is None or made.kind != "quantize":
        return [name]
    return [name, made.args[0].name]


__all__ = ["PackWeights"]
