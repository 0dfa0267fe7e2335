"""CPU kernels: which native kernel does an op, with which operands, and when it refuses.

Every op also has the fallback `torch.reference`, which runs the op's meaning on the buffers between
native segments; it is named in `via` and counted in reports, never silent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from ktgraph.ir.dims import Dim, product
from ktgraph.ir.graph import Module, Op, WeightRef
from ktgraph.ir.types import StateType, TensorType
from ktgraph.ops.registry import (
    Refusal,
    all_ops,
    kernels_for,
    no,
    register_kernel,
)
from ktgraph.runtime import kernels_torch as kernels_torch  # registers torch's own kernels
from ktgraph.runtime.flat import View, dense_strides, reshaped_strides
from ktgraph.runtime.operands import (
    BatchUse,
    OperandRef,
    Operands,
    StateUse,
    TensorRef,
    WeightUse,
)
from ktgraph.weights.encodings import Tile

REFERENCE = "torch.reference"
VIEW = "view"

Call = tuple[Sequence[OperandRef], dict[str, Any]]  # operands and attributes of one native call
Emitter = Callable[[Operands], list[Call]]
Supports = Callable[[Op, Module], bool | Refusal]


@dataclass(frozen=True)
class _Row:
    op: str
    kernel: str
    emit: Emitter
    tiles: tuple[int, ...] = ()  # operands that must be packed weights
    check: Supports | None = None
    nmse: float = 1e-10  # bound in f32; sums are taken in another order than torch's
    rows: str = ""  # "int8": the kernel for weights that take rows rounded to 8 bits


_EMITTERS: dict[str, dict[str, Emitter]] = {}  # op -> kernel -> emitter


def emitter(op: str, kernel: str) -> Emitter:
    """How a native kernel is called for an op; raises KeyError for an unknown pair."""
    return _EMITTERS[op][kernel]


@cache
def native_kernels() -> frozenset[str]:
    """Names of the kernels in this build; empty when the native part is missing."""
    from ktgraph.cpu_kernels import NativeMissingError, load_native

    try:
        return frozenset(load_native().kernels())
    except NativeMissingError:
        return frozenset()


def _supports(row: _Row) -> Supports:
    def supports(op: Op, module: Module) -> bool | Refusal:
        if engine_kernel(row.kernel) not in native_kernels():
            return no("the native kernels of this build do not hold it (pip install -e .)", op)
        packed = [_tile_refusal(op, module, position) for position in row.tiles]
        for refusal in (*packed, _rows_refusal(row, op, module)):
            if refusal is not None:
                return refusal
        return True if row.check is None else row.check(op, module)

    return supports


def engine_kernel(name: str) -> str:
    """The engine's name of a kernel: it has one for every form of rows, which the weight tells."""
    return name.removesuffix("_int8")


def _tile_refusal(op: Op, module: Module, position: int) -> Refusal | None:
    found = op.operand(position)
    if not isinstance(found, WeightRef):
        return no(f"operand {position} must be a packed weight", op)
    type = module.weight_of(found).type
    if Tile.of(type.encoding) is None:
        return no(f"{found} is {type}, not packed in tiles: pack-weights has not run", op)
    return None


def _rows_refusal(row: _Row, op: Op, module: Module) -> Refusal | None:
    """A kernel whose name ends in _int8 is for ops that round at least one operand's rows."""
    refs = [op.operand(position) for position in row.tiles]
    tiles = [Tile.of(module.weight_of(r).type.encoding) for r in refs if isinstance(r, WeightRef)]
    rounds = any(t is not None and t.rows == "int8" for t in tiles)
    if rounds == (row.rows == "int8"):
        return None
    return no(f"its weights {'take' if rounds else 'do not take'} rows rounded to int8", op)


# -- emitters -------------------------------------------------------------------------------------
def _plain(inputs: str, outputs: int = 1, attrs: Sequence[str] = ()) -> Emitter:
    """`inputs` has a letter per operand: x value, w tile weight, s stored weight."""

    def emit(o: Operands) -> list[Call]:
        given = [_input(o, letter, i) for i, letter in enumerate(inputs)]
        results = [o.result(i) for i in range(outputs)]
        return [([*given, *results], o.pick(*attrs))]

    return emit


def _by_rows(emit: Emitter) -> Emitter:
    """Kernels of rows, for values of fixed sizes with other axes: [2, 5, D] is seen as [10, D]."""

    def emit_rows(o: Operands) -> list[Call]:
        return [(_as_rows(operands), attrs) for operands, attrs in emit(o)]

    return emit_rows


def _as_rows(operands: Sequence[OperandRef]) -> Sequence[OperandRef]:
    """All of them as matrices, or none: where strides do not allow it the kernel refuses."""
    seen = [_rows_of(r) if isinstance(r, TensorRef) else r for r in operands]
    lost = any(r is None and given is not None for r, given in zip(seen, operands, strict=True))
    return operands if lost else seen


def _rows_of(ref: TensorRef) -> TensorRef | None:
    *lead, last = ref.view.dims
    if len(lead) == 1 or not all(d.is_const for d in ref.view.dims):
        return ref
    dims = (product(lead), last)
    strides = reshaped_strides(ref.view, dims)
    if strides is None:
        return None
    return replace(ref, view=replace(ref.view, dims=dims, strides=strides))


def _input(o: Operands, letter: str, position: int) -> OperandRef:
    if letter == "w":
        return o.weight(position, "tile")
    return o.weight(position, "stored") if letter == "s" else o[position]


def _embedding(o: Operands) -> list[Call]:
    """Ids of fixed sizes and several axes are seen as one row of ids."""
    ids, table, result = o[0], o.weight(1, "stored"), o.result(0)
    assert isinstance(ids, TensorRef)
    count = product(ids.view.dims)
    strides = reshaped_strides(ids.view, (count,)) if count.is_const else None
    if strides is not None:
        ids = replace(ids, view=replace(ids.view, dims=(count,), strides=strides))
        result = _as_rows([result])[0]
    return [([ids, table, result], {})]


def _rope_append(o: Operands) -> list[Call]:
    operands = [*(o[i] for i in range(6)), o.result(0)]
    return [(operands, o.pick("style", "scale", "layer"))]


def _sdpa(o: Operands) -> list[Call]:
    state = o[1]
    assert isinstance(state, StateUse)
    assert isinstance(state.slot.type, StateType)
    heads = state.slot.type.parts[0].dims[1].const()
    attrs = o.pick("layer", "scale", "window", "softcap", kv_heads=heads)
    return [([o[0], state, o[2], o[3], o.result(0)], attrs)]


def _route(o: Operands) -> list[Call]:
    in_logits = o.step.operand(3) is not None
    gate = o.weight(1, "stored")
    if isinstance(gate, WeightUse) and Tile.of(gate.type.encoding) is not None:
        gate = replace(gate, form="tile")
    names = ("score", "renorm", "scale", "groups", "topk_groups", "group_score", "mask")
    operands = [o[0], gate, o[3 if in_logits else 2], o.result(0), o.result(1)]
    return [(operands, o.pick(*names, bias_in_logits=in_logits))]


def _mul(o: Operands) -> list[Call]:
    """The native kernel takes the operand of the result's shape first."""
    first, second, result = o[0], o[1], o.result(0)
    assert isinstance(first, TensorRef)
    assert isinstance(result, TensorRef)
    whole = first.view.dims == result.view.dims
    return [([first, second, result] if whole else [second, first, result], {})]


def _copy(o: Operands) -> list[Call]:
    """Strided to dense: the result is seen in the operand's shape."""
    source, target = o[0], o.result(0)
    assert isinstance(source, TensorRef)
    assert isinstance(target, TensorRef)
    dims = source.view.dims
    shaped = replace(target.view, dims=dims, strides=dense_strides(dims))
    return [([source, replace(target, view=shaped)], {})]


def _concat(o: Operands) -> list[Call]:
    """One copy per piece, into its columns of the result."""
    target = o.result(0)
    assert isinstance(target, TensorRef)
    calls: list[Call] = []
    start = Dim.of(0)
    for position in range(len(o.step.operands)):
        piece = o[position]
        assert isinstance(piece, TensorRef)
        there = View(
            target.view.root, target.view.offset + start, piece.view.dims, target.view.strides
        )
        calls.append(([piece, replace(target, view=there)], {}))
        start = start + piece.view.dims[-1]
    return calls


# -- checks ---------------------------------------------------------------------------------------
def _one_bias(op: Op, module: Module) -> bool | Refusal:
    if op.operand(2) is not None and op.operand(3) is not None:
        return no("one of select_bias and bias, not both", op)
    return True


def _same_shapes(op: Op, module: Module) -> bool | Refusal:
    types = [module.type_of(o) for o in op.operands if o is not None]
    shapes = {t.dims for t in types if isinstance(t, TensorType)}
    return True if len(shapes) == 1 else no("it does not broadcast", op)


def _of_values(op: Op, module: Module) -> bool | Refusal:
    return True if not op.weights else no("it copies values, this is a weight", op)


def _last_axis(op: Op, module: Module) -> bool | Refusal:
    if op.weights:
        return _of_values(op, module)
    axis = op.attrs.get("axis")
    last = op.results[0].tensor.rank - 1
    if axis is None or axis in (Dim.of(-1), Dim.of(last)):
        return True
    return no("it joins along the last axis only", op)


def _act(*known: str) -> Supports:
    def check(op: Op, module: Module) -> bool | Refusal:
        name = op.attrs.get("act", "silu")
        return True if name in known else no(f'act "{name}": it has {", ".join(known)}', op)

    return check


_PLAIN_GATES = ("silu", "gelu", "gelu_tanh", "relu")
_GATES = (*_PLAIN_GATES, "swiglu_clamped")
_ACT = ("act", "alpha", "limit")

_ROWS = (
    _Row("nn.embedding", "cpu.embedding", _embedding, nmse=0.0),
    _Row("nn.rms_norm", "cpu.rms_norm", _by_rows(_plain("xx", attrs=["eps", "late_cast"]))),
    _Row("nn.add_rms_norm", "cpu.add_rms_norm", _plain("xxx", 2, ["eps", "late_cast"])),
    _Row("nn.linear", "cpu.linear", _by_rows(_plain("xwx")), (1,)),
    _Row("nn.linear", "cpu.linear_int8", _by_rows(_plain("xwx")), (1,), nmse=1e-3, rows="int8"),
    _Row("nn.batched_linear", "cpu.batched_linear", _plain("xw"), (1,)),
    _Row("nn.rope", "cpu.rope", _plain("xxxx", 2, ["style", "scale"])),
    _Row("nn.swiglu", "cpu.swiglu", _plain("xww", attrs=["act"]), (1, 2), _act(*_PLAIN_GATES)),
    _Row(
        "nn.swiglu",
        "cpu.swiglu_int8",
        _plain("xww", attrs=["act"]),
        (1, 2),
        _act(*_PLAIN_GATES),
        nmse=3e-3,
        rows="int8",
    ),
    _Row("nn.act", "cpu.sigmoid", _plain("x"), check=_act("sigmoid")),
    _Row(
        "kv.append",
        "cpu.kv_append",
        lambda o: [([o[1], o[2], o[0], o[3]], o.pick("layer"))],
        nmse=0.0,
    ),
    _Row(
        "kv.append_latent",
        "cpu.kv_append_latent",
        lambda o: [([o[1], o[2], o[0], o[3]], o.pick("layer"))],
        nmse=0.0,
    ),
    _Row("kv.rope_append", "cpu.rope_append", _rope_append),
    _Row("kv.rope_append_latent", "cpu.rope_append_latent", _rope_append),
    _Row("mla.attend", "cpu.mla_attend", _plain("xxxx", attrs=["layer", "scale"])),
    _Row(
        "mla.attend_expanded",
        "cpu.mla_attend_expanded",
        _plain("xxxxw", attrs=["layer", "scale"]),
        (4,),
    ),
    _Row("attn.sdpa", "cpu.sdpa", _sdpa),
    _Row("moe.route", "cpu.moe_route", _by_rows(_route), check=_one_bias),
    _Row(
        "moe.grouped_mlp",
        "cpu.grouped_mlp",
        _by_rows(_plain("xxxwwxx", attrs=_ACT)),
        (3, 4),
        _act(*_GATES),
    ),
    _Row(
        "moe.grouped_mlp",
        "cpu.grouped_mlp_int8",
        _by_rows(_plain("xxxwwxx", attrs=_ACT)),
        (3, 4),
        _act(*_GATES),
        nmse=3e-3,
        rows="int8",
    ),
    _Row("tensor.add", "cpu.add", _by_rows(_plain("xx")), check=_same_shapes, nmse=0.0),
    _Row("tensor.add3", "cpu.add3", _plain("xxx"), check=_same_shapes, nmse=0.0),
    _Row("tensor.mul", "cpu.mul", _mul, nmse=0.0),
    _Row("tensor.reshape", "cpu.copy", _copy, check=_of_values, nmse=0.0),
    _Row("tensor.cast", "cpu.copy", _copy, check=_of_values, nmse=0.0),
    _Row("tensor.concat", "cpu.copy", _concat, check=_last_axis, nmse=0.0),
    _Row("logits.gather", "cpu.gather_rows", _plain("xx"), nmse=0.0),
)


def register_all() -> None:
    """Register the native kernels and the fallback of every op of the table."""
    for row in _ROWS:
        _EMITTERS.setdefault(row.op, {})[row.kernel] = row.emit
        register_kernel(
            row.op, row.kernel, "cpu", supports=_supports(row), nmse=row.nmse, priority=20
        )
    for name, definition in all_ops().items():
        if all(k.name != REFERENCE for k in kernels_for(name, "cpu")):
            register_kernel(
                name, REFERENCE, "cpu", launch=definition.reference, nmse=0.0, priority=-100,
                fallback=True,
            )  # fmt: skip


register_all()

__all__ = [
    "REFERENCE",
    "VIEW",
    "BatchUse",
    "Call",
    "Emitter",
    "emitter",
    "engine_kernel",
    "native_kernels",
    "register_all",
]
