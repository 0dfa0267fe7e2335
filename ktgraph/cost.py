"""The cost model: FLOPs, bytes and seconds of each op at the sizes of a call.

Costs are functions of the call (new tokens and cached rows of each sequence); nothing is -1 or
None: an op without a rule is marked (`OpCost.known`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ktgraph.ir.dims import Dim
from ktgraph.ir.graph import Module, Op, Operand, Value, WeightRef
from ktgraph.ir.types import BatchType, Encoding, StateType, TensorType, Type
from ktgraph.ops.registry import CostDims, OpDef, Reach, op_def
from ktgraph.runtime.weight_forms import PACKED, PACKED_ON_GPU, gpu_decodes
from ktgraph.target import Device, Target
from ktgraph.triton_kernels.packed_forms import MOST_DIRECT, UNPACK_REACH, most_pairs
from ktgraph.weights.encodings import Tile
from ktgraph.weights.encodings import nbytes as encoded_nbytes

Encodings = Mapping[str, Encoding]  # of weights by name


@dataclass(frozen=True)
class Call:
    """The sizes of one call: new tokens and cached rows of each sequence."""

    new: tuple[int, ...]
    past: tuple[int, ...]

    @staticmethod
    def decode(context: int, batch: int = 1) -> Call:
        """One new token for each of `batch` sequences with `context` cached rows."""
        return Call((1,) * batch, (context,) * batch)

    @staticmethod
    def prefill(tokens: int, past: int = 0) -> Call:
        """`tokens` new tokens of one sequence after `past` cached rows."""
        return Call((tokens,), (past,))

    @property
    def tokens(self) -> int:
        return sum(self.new)

    @property
    def rows(self) -> int:
        """Cache rows in use, the new tokens included, summed over sequences."""
        return self.tokens + sum(self.past)

    @property
    def attend(self) -> float:
        """Rows seen, summed over new tokens: each sees what precedes it, and itself."""
        return sum(n * p + n * (n + 1) / 2 for n, p in zip(self.new, self.past, strict=True))

    def bindings(self, module: Module) -> dict[str, int]:
        """Every dim and sym of a flat module at this call."""
        sizes = {
            "T": self.tokens,
            "B": len(self.new),
            "Q": max(self.new),
            "S": self.rows,
            "O": len(self.new),
            "C": self.rows,
        }
        return {**module.dims, **sizes}


@dataclass(frozen=True)
class OpCost:
    """One op at one call; bytes are read or written by the op itself, encoded as they lie."""

    op: Op
    where: str  # "%result", with the layer for ops in a repeat
    repeats: int
    device: str
    dtype: str  # what it computes in: the key of the device's peak
    flops: float
    read: float  # bytes
    written: float  # bytes
    weights: float  # bytes of the weights it reads, part of `read`
    known: bool  # False: the op has no cost rule
    cpu_dtype: str = ""  # what a CPU computes in, where that is another: int8 for integer weights
    format: str = ""  # of its largest weight: the key of a CPU's `reads`
    packed: float = 0.0  # bytes of the weights that a GPU first makes dense, for so many tokens
    dense: float = 0.0  # bytes of them then

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flops / max(self.read + self.written, 1.0)

    def seconds(
        self, target: Target, device: str | None = None, *, fallback: bool = False
    ) -> float:
        """Roofline time of one execution on a device of the target, launch included.

        A dtype for which the device has no peak raises TargetError; with `fallback` it is priced
        as f32, which every description has.
        """
        return sum(self.parts(target, device, fallback=fallback).values())

    def parts(
        self, target: Target, device: str | None = None, *, fallback: bool = False
    ) -> dict[str, float]:
        """`seconds` by what they go to: memory or compute, the longer of both, and launch.

        Where a GPU unpacks weights first, that is memory as well.
        """
        at = target.device(device or self.device)
        dtype = self._dtype_on(at, fallback)
        memory, compute = self._reach(at)
        moved = self._moved(at) / memory
        worked = self.flops / (at.peak_for(dtype) * compute)
        parts = {"compute": worked} if worked >= moved else {"memory": moved}
        if self.dense and at.kind != "cpu":
            unpacking = (self.packed + self.dense) / (at.bandwidth_at() * UNPACK_REACH)
            parts["memory"] = parts.get("memory", 0.0) + unpacking
        return {**parts, "launch": self._launch(at)}

    def _moved(self, at: Device) -> float:
        """Seconds to read and write; weights as fast as kernels unpack them, if that is known."""
        everything = self.read + self.written
        if at.kind != "cpu":
            everything += self.dense - self.packed
        if self.format not in at.reads:
            return everything / at.bandwidth_at()
        weights = self.weights / at.reads[self.format]
        return weights + (everything - self.weights) / at.bandwidth_at()

    def _dtype_on(self, at: Device, fallback: bool) -> str:
        """The key of the device's peak."""
        own = self.cpu_dtype if at.kind == "cpu" and self.cpu_dtype in at.peak else self.dtype
        return own if own in at.peak or not fallback else "f32"

    def _reach(self, at: Device) -> Reach:
        """Shares of the device's bandwidth and peak that this op's kernels reach there."""
        kind = "cpu" if at.kind == "cpu" else "cuda"
        return op_def(self.op.name).reach.get(kind, (1.0, 1.0))

    def _launch(self, at: Device) -> float:
        """Seconds to start it: one region of the CPU's engine, or every kernel on a GPU."""
        return at.launch if at.kind == "cpu" else at.launch * op_def(self.op.name).launches

    def bound(self, target: Target, device: str | None = None, *, fallback: bool = False) -> str:
        """What limits it there: compute, memory or launch."""
        parts = self.parts(target, device, fallback=fallback)
        return max(reversed(parts), key=lambda kind: parts[kind])


def op_cost(
    module: Module,
    op: Op,
    call: Call,
    bindings: Mapping[str, int],
    repeats: int = 1,
    home: str = "cpu",
    encodings: Encodings | None = None,
) -> OpCost:
    """The cost of one execution of an op.

    `encodings`: how weights will lie once `quantize` has run, where that differs from now.
    """
    definition = op_def(op.name)
    sizes = [operand_nbytes(module, o, bindings, encodings) for o in op.operands]
    weights = sum(s for o, s in zip(op.operands, sizes, strict=True) if not isinstance(o, Value))
    dims = CostDims(_dims(module, op, definition, bindings), sizes, call.tokens, call.attend)
    read, written, flops = sum(sizes), _written(op, call, bindings), 0.0
    if definition.reads is not None:
        read = definition.reads(dims)
    if definition.is_view:
        read = written = 0.0
    if definition.flops is not None:
        flops = definition.flops(dims)
    device = _device(op) or module.home or home
    where = ", ".join(f"%{r.name}" for r in op.results)
    known = has_cost_rule(definition)
    dtype = _compute_dtype(op)
    unpacked = _unpacked(module, op, call, dims, bindings, encodings or {})
    return OpCost(
        op, where, repeats, device, dtype, flops, read, written, min(weights, read), known,
        _cpu_dtype(module, op, encodings or {}), _format(module, op, encodings or {}), *unpacked,
    )  # fmt: skip


def _unpacked(
    module: Module,
    op: Op,
    call: Call,
    dims: CostDims,
    bindings: Mapping[str, int],
    encodings: Encodings,
) -> tuple[float, float]:
    """Bytes of the weights that GPU kernels unpack for so many tokens: packed, and then dense."""
    if op.name not in PACKED_ON_GPU:
        return 0.0, 0.0
    is_experts = op.name == "moe.grouped_mlp"
    most = most_pairs(int(dims.E)) if is_experts else MOST_DIRECT
    if call.tokens * (dims.K if is_experts else 1) <= most:
        return 0.0, 0.0
    packed = dense = 0.0
    for position in PACKED[op.name]:
        operand = op.operand(position)
        assert operand is not None
        type = module.type_of(operand)
        assert isinstance(type, TensorType)
        name = operand.name if isinstance(operand, WeightRef) else ""
        planned = encodings.get(name, type.encoding)
        if planned is not None and gpu_decodes(planned):
            packed += dims.nbytes(position)
            dense += type_nbytes(type.encoded(None), bindings)
    return packed, dense


def has_cost_rule(definition: OpDef) -> bool:
    """Whether an op's FLOPs are known; without a rule its bytes are counted, and it is reported."""
    return definition.flops is not None or definition.is_view or definition.name in _MOVERS


# ops that only move bytes: no FLOPs is their rule, not a missing one
_MOVERS = frozenset(
    {
        "tensor.concat",
        "tensor.cast",
        "tensor.add",
        "tensor.add3",
        "tensor.mul",
        "tensor.scale",
        "nn.embedding",
        "logits.gather",
        "kv.append",
        "kv.append_latent",
        "kv.rope_append",
        "kv.rope_append_latent",
        "kv.read",
        "xfer.copy",
        "xfer.post",
        "xfer.await",
    }
)


def _dims(
    module: Module, op: Op, definition: OpDef, bindings: Mapping[str, int]
) -> dict[str, float]:
    types = [None if o is None else module.type_of(o) for o in op.operands]
    attrs = definition.signature.full_attrs(op.attrs)
    found = definition.signature.bind(types, attrs)
    known = {k: _evaluate(d, bindings) for k, d in found.dims.items()}
    shares = {k: v for k, v in attrs.items() if isinstance(v, float)}
    return {**bindings, **shares, **{k: v for k, v in known.items() if v is not None}}


def _evaluate(dim: Dim, bindings: Mapping[str, int]) -> int | None:
    """None for dims over repeat indices, which no cost depends on."""
    try:
        return dim.at(bindings)
    except KeyError:
        return None


def operand_nbytes(
    module: Module,
    operand: Operand,
    bindings: Mapping[str, int],
    encodings: Encodings | None = None,
) -> float:
    """Bytes of an operand; a weight as `encodings` says that it will lie."""
    if operand is None:
        return 0.0
    found = module.type_of(operand)
    if encodings and isinstance(operand, WeightRef) and operand.name in encodings:
        assert isinstance(found, TensorType)
        found = found.encoded(encodings[operand.name])
    return type_nbytes(found, bindings)


def type_nbytes(type: Type, bindings: Mapping[str, int]) -> float:
    """Bytes of a tensor as encoded; 0 for states and the batch (ops say which rows they touch)."""
    if isinstance(type, (StateType, BatchType)):
        return 0.0
    return float(encoded_nbytes(type, bindings))


def _written(op: Op, call: Call, bindings: Mapping[str, int]) -> float:
    total = 0.0
    for result in op.results:
        if isinstance(result.type, StateType):
            rows = [p.with_dims(*p.dims[1:]) for p in result.type.parts]
            total += call.tokens * sum(type_nbytes(r, bindings) for r in rows)
        else:
            total += type_nbytes(result.type, bindings)
    return total


def _device(op: Op) -> str | None:
    return next((r.type.device for r in op.results if not isinstance(r.type, BatchType)), None)


def _cpu_dtype(module: Module, op: Op, encodings: Encodings) -> str:
    """int8 where a CPU's kernel multiplies integer weights with rows rounded to 8 bits, else ""."""
    if op.name not in ("nn.linear", "nn.swiglu", "moe.grouped_mlp"):
        return ""
    for ref in op.weights:
        planned = encodings.get(ref.name) or module.weight_of(ref).type.encoding
        if planned is not None and (planned.name in _INTEGERS or planned.name.startswith("gguf.")):
            return "int8"
        tile = Tile.of(planned)
        if tile is not None and tile.rows == "int8":
            return "int8"
    return ""


def _format(module: Module, op: Op, encodings: Encodings) -> str:
    """The format that a CPU's tiles of the op's matrices have; the largest counts."""
    found: list[tuple[int, str]] = []
    for ref in op.weights if op.name in _PACKED else ():
        type = module.weight_of(ref).type
        planned = encodings.get(ref.name) or type.encoding
        tile = Tile.of(planned)
        name = tile.format if tile is not None else planned.name if planned else type.dtype
        found.append((type.rank, name))
    return max(found)[1] if found else ""


_PACKED = ("nn.linear", "nn.swiglu", "nn.batched_linear", "moe.grouped_mlp", "moe.experts")
_INTEGERS = ("int8", "int4", "int4p", "int4z", "mxfp4")


def _compute_dtype(op: Op) -> str:
    types: Sequence[Type] = [r.type for r in op.results] + [v.type for v in op.values]
    for found in types:
        if isinstance(found, TensorType) and found.dtype in ("f64", "f32", "bf16", "f16"):
            return {"f64": "f32", "f16": "bf16"}.get(found.dtype, found.dtype)
    return "f32"
