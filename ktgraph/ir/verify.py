"""The verifier: structure, types, devices and linear states; errors show the op, cause and hint."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass

from ktgraph.ir.dims import SLOTS, Dim
from ktgraph.ir.graph import Attr, Block, Function, Module, Op, Operand, Value, Weight, WeightRef
from ktgraph.ir.printer import print_op, print_weight
from ktgraph.ir.types import BatchType, Encoding, StateType, TensorType, Type
from ktgraph.ops.registry import is_op, op_def
from ktgraph.ops.signature import SignatureError
from ktgraph.weights.encodings import EncodingError, encoding_def

_CROSSING = frozenset({"xfer.copy", "xfer.post", "xfer.await"})
# A function attribute of `place`: its copies between devices are still to be inserted.
COPIES, PENDING = "copies", "pending"
_SMALLEST_LITERAL = 8  # smaller integers are ordinary numbers, not sizes someone forgot to name


@dataclass(frozen=True)
class Fault:
    """One defect: where (an op line or a declaration), what, and what to do."""

    where: str
    cause: str
    hint: str = ""

    def __str__(self) -> str:
        hint = f"\n    hint: {self.hint}" if self.hint else ""
        return f"{self.where}\n    {self.cause}{hint}"


class VerifyError(ValueError):
    """The module is not valid IR; `faults` lists every defect found."""

    def __init__(self, module: Module, faults: list[Fault]) -> None:
        self.faults = faults
        shown = "\n  ".join(str(f) for f in faults[:10])
        more = f"\n  … and {len(faults) - 10} more" if len(faults) > 10 else ""
        count = f"{len(faults)} fault{'s' if len(faults) > 1 else ''}"
        super().__init__(f"module @{module.name} is not valid: {count}\n  {shown}{more}")


def verify(module: Module) -> None:
    """Raise VerifyError listing all faults; return None for a valid module."""
    faults = list(find_faults(module))
    if faults:
        raise VerifyError(module, faults)


def find_faults(module: Module) -> Iterator[Fault]:
    """Every fault of the module, in order of the text."""
    for weight in module.weights.values():
        yield from _weight_faults(module, weight)
    for func in module.functions.values():
        yield from _FunctionCheck(module, func).faults()


def _weight_faults(module: Module, weight: Weight) -> Iterator[Fault]:
    line = print_weight(weight)
    if weight.source is None and weight.recipe is None:
        yield Fault(line, "the weight has neither a source nor a recipe", 'write: from "name"')
    yield from _type_faults(module, line, weight.type, set())
    if weight.recipe is None:
        return
    for ref in weight.recipe.args:
        scope = {weight.var: (weight.lo, weight.hi)} if weight.is_family else {}
        yield from _ref_faults(module, line, ref, scope)
    if weight.name in _ancestors(module, weight):
        yield Fault(line, "the recipe depends on the weight itself")


def _ancestors(module: Module, weight: Weight) -> set[str]:
    seen: set[str] = set()
    stack = [r.name for r in weight.recipe.args] if weight.recipe else []
    while stack:
        name = stack.pop()
        found = module.weights.get(name)
        if name in seen or found is None:
            continue
        seen.add(name)
        stack += [r.name for r in found.recipe.args] if found.recipe else []
    return seen


def _ref_faults(
    module: Module, where: str, ref: WeightRef, scope: dict[str, tuple[int, int]]
) -> Iterator[Fault]:
    weight = module.weights.get(ref.name)
    if weight is None:
        close = difflib.get_close_matches(ref.name, module.weights, n=2)
        hint = f"did you mean {', '.join('@' + c for c in close)}?" if close else ""
        yield Fault(where, f"{ref} is not declared", hint)
        return
    if not weight.is_family:
        return
    if ref.index is None:
        yield Fault(where, f"{ref} is a family: an index is missing", "write @name[i].rest")
        return
    unknown = sorted(ref.index.names - scope.keys())
    if unknown:
        yield Fault(where, f"{ref}: index {unknown[0]} is not the index of an enclosing repeat")
        return
    ends = _extremes(ref.index, scope)
    if min(ends) < weight.lo or max(ends) > weight.hi:
        span = f"{weight.lo}..{weight.hi}"
        yield Fault(where, f"{ref} runs over {min(ends)}..{max(ends)}, the family over {span}")


def _extremes(index: Dim, scope: dict[str, tuple[int, int]]) -> list[int]:
    """Values of an index that is linear in the repeat indices, at the ends of their ranges."""
    low = {name: lo for name, (lo, _) in scope.items()}
    high = {name: hi for name, (_, hi) in scope.items()}
    return [index.at(low), index.at(high)]


def _type_faults(module: Module, where: str, type: Type, indices: set[str]) -> Iterator[Fault]:
    known = module.dims.keys() | module.syms.keys() | indices
    for encoding in _encodings_of(type):
        try:
            encoding_def(encoding)
        except EncodingError as error:
            yield Fault(where, str(error))
    for dim in _dims_of(type):
        for name in sorted(dim.names - known):
            yield Fault(where, f"{name} in {type} is no dim or sym", f"declare: dim {name} = …")
        yield from _literal_faults(module, where, dim, str(type))


def _literal_faults(module: Module, where: str, dim: Dim, shown: str) -> Iterator[Fault]:
    """In a named module a size that equals a dim is written by name, or rebinding breaks it."""
    if module.witnesses or not module.dims or not dim.is_const:
        return
    value = dim.const()
    # numbers of slots are chosen by `place`; no size of the model ever stands for one
    named = [n for n, v in module.dims.items() if v == value and not n.startswith(SLOTS)]
    if value >= _SMALLEST_LITERAL and named:
        hint = f"write {' or '.join(named)} (name-dims does it)"
        yield Fault(where, f"the literal {value} in {shown} equals dim {named[0]}", hint)


def _encodings_of(type: Type) -> list[Encoding]:
    parts = type.parts if isinstance(type, StateType) else (type,)
    tensors = [p for p in parts if isinstance(p, TensorType)]
    return [p.encoding for p in tensors if p.encoding is not None]


def _dims_of(type: Type) -> list[Dim]:
    if isinstance(type, TensorType):
        return list(type.dims)
    parts = type.parts if isinstance(type, StateType) else ()
    return [*(d for p in parts for d in p.dims), *([] if type.window is None else [type.window])]


def _attr_dims(value: Attr) -> list[Dim]:
    if isinstance(value, Dim):
        return [value]
    if isinstance(value, tuple):
        return [d for v in value for d in _attr_dims(v)]
    return []


class _FunctionCheck:
    """Checks of one function; `scope` holds the values visible at a point."""

    def __init__(self, module: Module, func: Function) -> None:
        self.module = module
        self.func = func

    def faults(self) -> Iterator[Fault]:
        yield from self._name_faults()
        for arg in self.func.args:
            yield from _type_faults(self.module, f"func @{self.func.name}", arg.type, set())
        yield from self._block_faults(self.func.body, set(), {})

    def _name_faults(self) -> Iterator[Fault]:
        seen: set[str] = set()
        for value in self.func.values():
            if value.name in seen:
                yield Fault(f"func @{self.func.name}", f"%{value.name} is defined twice")
            seen.add(value.name)

    def _block_faults(
        self, block: Block, outer: set[Value], indices: dict[str, tuple[int, int]]
    ) -> Iterator[Fault]:
        scope = outer | set(block.args)
        states = {a for a in block.args if isinstance(a.type, StateType)}
        for op in block.ops:
            yield from self._op_faults(op, scope, indices)
            yield from self._state_faults(op, op.operands, states, _consumes(op))
            states |= {r for r in op.results if isinstance(r.type, StateType)}
            scope |= set(op.results)
        for value in block.returns:
            if value not in scope:
                yield Fault(f"func @{self.func.name}", f"%{value.name} is returned but not defined")
        end = Fault(f"func @{self.func.name}: return or yield", "")
        yield from self._state_faults(None, list(block.returns), states, True, end.where)

    def _state_faults(
        self,
        op: Op | None,
        operands: list[Operand],
        live: set[Value],
        consumes: bool,
        where: str = "",
    ) -> Iterator[Fault]:
        """A state is live until the one op that consumes it; `live` is updated."""
        shown = where or (print_op(op).split("\n")[0] if op is not None else "")
        for value in operands:
            if not isinstance(value, Value) or not isinstance(value.type, StateType):
                continue
            if value not in live:
                yield Fault(
                    shown,
                    f"%{value.name} is used after an append consumed it, or from outside its block",
                    "use the state that the append returned; carry states through a repeat",
                )
            elif consumes:
                live.discard(value)

    def _op_faults(
        self, op: Op, scope: set[Value], indices: dict[str, tuple[int, int]]
    ) -> Iterator[Fault]:
        line = print_op(op).split("\n")[0]
        for value in op.values:
            if value not in scope:
                yield Fault(line, f"%{value.name} is not defined before its use")
        for ref in op.weights:
            yield from _ref_faults(self.module, line, ref, indices)
        for result in op.results:
            yield from _type_faults(self.module, line, result.type, set(indices))
        if op.body is not None:
            yield from self._repeat_faults(op, line, scope, indices)
            return
        for key, value in op.attrs.items():
            for dim in _attr_dims(value):
                if key != "layer":
                    yield from _literal_faults(self.module, line, dim, f"attribute {key}")
                unknown = dim.names - (
                    self.module.dims.keys() | self.module.syms.keys() | indices.keys()
                )
                for name in sorted(unknown):
                    yield Fault(line, f"{name} in attribute {key} is no dim, sym or repeat index")
        yield from self._signature_faults(op, line)
        if self.func.attrs.get(COPIES) != PENDING:
            yield from self._device_faults(op, line)

    def _signature_faults(self, op: Op, line: str) -> Iterator[Fault]:
        if not is_op(op.name):
            try:
                op_def(op.name)
            except KeyError as error:
                yield Fault(line, str(error), "register it with @op, or check the spelling")
            return
        if any(ref.name not in self.module.weights for ref in op.weights):
            return
        definition = op_def(op.name)
        types = [None if o is None else self.module.type_of(o) for o in op.operands]
        try:
            normal = definition.signature.normal_attrs(op.attrs)
            want = definition.result_types(types, normal)
        except (SignatureError, KeyError, AssertionError) as error:
            yield Fault(line, str(error), f"signature: {definition.signature.text}")
            return
        got = [r.type.on(None) for r in op.results]
        if [_bare(t) for t in want] != [_bare(t) for t in got]:
            shown = ", ".join(str(_bare(t)) for t in want)
            yield Fault(
                line, f"the operands give {shown}", f"signature: {definition.signature.text}"
            )
        if list(normal.items()) != list(op.attrs.items()):
            yield Fault(line, "attributes are not in canonical order or spell out a default")

    def _device_faults(self, op: Op, line: str) -> Iterator[Fault]:
        if op.name in _CROSSING:
            return
        devices = {r.type.device for r in op.results if not isinstance(r.type, BatchType)}
        if len(devices) > 1:
            yield Fault(line, "the results lie on different devices")
            return
        if not devices:
            return
        device = devices.pop()
        for operand in op.operands:
            if operand is None or (
                isinstance(operand, WeightRef) and operand.name not in self.module.weights
            ):
                continue
            at = self.module.type_of(operand)
            if isinstance(at, BatchType) or at.device == device:
                continue
            name = f"%{operand.name}" if isinstance(operand, Value) else str(operand)
            home = self.module.home or "home"
            yield Fault(
                line,
                f"{name} is on {at.device or home}, the op runs on {device or home}",
                "insert xfer.copy, or run the pass insert-copies",
            )

    def _repeat_faults(
        self, op: Op, line: str, scope: set[Value], indices: dict[str, tuple[int, int]]
    ) -> Iterator[Fault]:
        assert op.body is not None
        lo, hi = op.int_attr("lo"), op.int_attr("hi")
        if hi < lo:
            yield Fault(line, f"the range {lo}..{hi} is empty")
        pending = self.func.attrs.get(COPIES) == PENDING  # values may lie elsewhere until then
        wanted = [a.type for a in op.body.args]
        for what, values in (("carries", op.values), ("yields", op.body.returns)):
            given = [
                v.type.on(w.device) if pending else v.type
                for v, w in zip(values, wanted, strict=False)
            ]
            if given != wanted:
                shown = ", ".join(str(v.type) for v in values)
                yield Fault(line, f"repeat {what} {shown}, its arguments differ")
        if [r.type for r in op.results] != wanted:
            yield Fault(line, "the results of repeat have other types than its arguments")
        inner = {**indices, str(op.attrs["index"]): (lo, hi)}
        plain = {v for v in scope if not isinstance(v.type, StateType)}
        yield from self._block_faults(op.body, plain, inner)


def _consumes(op: Op) -> bool:
    return any(isinstance(r.type, StateType) for r in op.results)


def _bare(type: Type) -> Type:
    """The type without device, for comparison with what a signature infers."""
    if isinstance(type, TensorType):
        return type.on(None).encoded(None)
    return type.on(None)
