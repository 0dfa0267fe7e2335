"""flatten-tokens: one ragged token axis in place of a traced causal LM's ``[b, s]``.

What: leading axes [b, s] (or b*s) become T, reshapes between the two vanish, and logits are
computed only on the rows that the batch asks for.

Why: one graph then serves prefill, decode and mixed batches; lm_head never runs on a whole prompt.

Before:  @main(%ids: i64[b, s], %batch: batch, …) -> (f32[b, s, VOC], …)
After:   @main(%ids: i32[T], %batch: batch, …) -> (f32[O, VOC], …)

A function with an op that is not computed token by token is left as it is, with the op named.  A
function that takes no batch, of a plain module, has the leading axes that its arguments share as
its tokens; it keeps every row of its results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from ktgraph.ir.dims import Dim, product
from ktgraph.ir.graph import Attr, Block, Function, Module, Op, Operand, Value
from ktgraph.ir.types import BatchType, StateType, TensorType, Type
from ktgraph.ops import SignatureError, build, op_def
from ktgraph.ops.signature import TensorPattern
from ktgraph.pass_api import Numerics, Pass, PassContext, exact, register_pass

_TRACED = frozenset({"b", "s", "t"})
_SYMS = {"T": (1, 8192), "O": (1, 8192), "B": (1, 256)}
_PAIR = (Dim.of("b"), Dim.of("s"))  # the token axes of a causal LM
_POINTWISE = frozenset(
    {"tensor.add", "tensor.add3", "tensor.mul", "tensor.scale", "tensor.cast", "nn.act"}
)
_BY_TOKEN = ("nn.", "moe.", "mla.", "kv.", "attn.", "logits.")
_ALL_ROWS = frozenset({"kv.read", "attn.sdpa_rows"})
_LAST = frozenset({"nn.linear", "nn.rms_norm", "nn.act", "tensor.scale", "tensor.cast"})


@register_pass
@dataclass(frozen=True)
class FlattenTokens(Pass):
    name: ClassVar[str] = "flatten-tokens"
    numerics: ClassVar[Numerics] = exact()
    requires: ClassVar[Sequence[str]] = ("named",)
    ensures: ClassVar[Sequence[str]] = ("ragged",)

    def run(self, module: Module, ctx: PassContext) -> None:
        flat: list[Function] = []
        traced = [f for f in module.functions.values() if _axes(module, f) is not None]
        for function in traced:
            axes = _axes(module, function)
            assert axes is not None
            try:
                flat.append(_Flattener(module, function, axes).run())
            except NotPerTokenError as error:
                ctx.refused(self.name, error.op, error.reason)
                if not _takes_batch(function):
                    ctx.note(f"@{function.name} keeps its own axes: {error.reason}")
                return
        if not flat or not ctx.may_rewrite(self.name, traced[0].body.ops[0]):
            return
        names = {n for f in traced if (axes := _axes(module, f)) is not None for n in axes.names}
        module.functions.update({f.name: f for f in flat})
        for name in names:
            module.syms.pop(name, None)
        wanted = _SYMS if any(map(_takes_batch, flat)) else {"T": _SYMS["T"]}
        module.syms.update({k: v for k, v in wanted.items() if k not in module.syms})
        for function in flat:
            if _takes_batch(function):
                _gather_logits(module, function)


class NotPerTokenError(ValueError):
    """An op mixes tokens, or the frontend's batch and sequence axes do not come first."""

    def __init__(self, op: Op, reason: str) -> None:
        super().__init__(reason)
        self.op = op
        self.reason = reason


@dataclass(frozen=True)
class _Axes:
    """The axes that tokens take in a function, and every name that must be gone afterwards."""

    lead: tuple[Dim, ...]
    names: frozenset[str]

    def of(self, type: Type) -> int:
        """How many: all for [b, s, …], 1 for [b*s, …], 0 without tokens."""
        if not isinstance(type, TensorType):
            return 0
        if type.dims[: len(self.lead)] == self.lead:
            return len(self.lead)
        return 1 if type.dims[:1] == (product(self.lead),) else 0

    def are_in(self, type: Type) -> bool:
        return bool(_names(type) & self.names)


def _axes(module: Module, function: Function) -> _Axes | None:
    """The token axes of a traced function; None for one without, or that is flat already."""
    if _takes_batch(function):
        is_traced = any(_names(v.type) & _TRACED for v in function.values())
        return _Axes(_PAIR, _TRACED) if is_traced else None
    names = frozenset(module.syms) - _SYMS.keys()
    kinds = [a.type for a in function.args if _names(a.type) & names]
    lead: list[Dim] = []
    for dims in zip(*(t.dims for t in kinds if isinstance(t, TensorType)), strict=False):
        if len(set(dims)) > 1 or dims[0] not in map(Dim.of, names):
            break
        lead.append(dims[0])
    return _Axes(tuple(lead), names) if lead else None


def _takes_batch(function: Function) -> bool:
    return any(isinstance(a.type, BatchType) for a in function.args)


def _names(type: Type) -> frozenset[str]:
    if not isinstance(type, TensorType):
        return frozenset()
    return frozenset(n for d in type.dims for n in d.names)


class _Flattener:
    """Copies one function, op by op, onto the token axis."""

    def __init__(self, module: Module, function: Function, axes: _Axes) -> None:
        self.module = module
        self.function = function
        self.axes = axes
        self.values: dict[Value, Value] = {}
        self._special: dict[str, Callable[[Op, Block], None]] = {
            "tensor.reshape": self._reshape,
            "tensor.permute": self._permute,
            "tensor.expand": self._expand,
            "tensor.split": self._along_axis,
            "tensor.concat": self._along_axis,
            "tensor.slice": self._along_axis,
        }

    def run(self) -> Function:
        """The flat copy; raises NotPerTokenError."""
        copy = Function(self.function.name, attrs=dict(self.function.attrs))
        for arg in self.function.args:
            type = self._type(arg.type, self.function.body.ops[0], f"argument %{arg.name}")
            if isinstance(type, TensorType) and type.dtype == "i64" and self._are_ids(arg):
                type = replace(type, dtype="i32")
            self.values[arg] = copy.body.add_arg(arg.name, type)
        self._block(self.function.body, copy.body)
        return copy

    def _are_ids(self, arg: Value) -> bool:
        """Whether an argument is read as ids alone: then i32 is enough."""
        return self._lead_of(arg) > 0 and all(u.name == "nn.embedding" for u in arg.users)

    def _lead_of(self, value: Value) -> int:
        return self.axes.of(value.type)

    def _block(self, source: Block, target: Block) -> None:
        for op in source.ops:
            self._op(op, target)
        target.set_returns([self.values[v] for v in source.returns])

    def _type(self, type: Type, op: Op, what: str) -> Type:
        if not isinstance(type, TensorType) or not self.axes.are_in(type):
            return type
        lead = self.axes.of(type)
        rest = type.dims[lead:]
        if not lead or any(d.names & self.axes.names for d in rest):
            raise NotPerTokenError(op, f"{what} is {type}: its tokens are not the leading axes")
        return type.with_dims("T", *rest)

    def _op(self, op: Op, target: Block) -> None:
        if op.body is not None:
            self._repeat(op, target)
        elif op.name in self._special:
            self._special[op.name](op, target)
        else:
            _check_by_token(op, self.axes)
            self._copy(op, target, op.attrs)

    def _operands(self, op: Op) -> list[Operand]:
        return [self.values[o] if isinstance(o, Value) else o for o in op.operands]

    def _copy(self, op: Op, target: Block, attrs: dict[str, Attr]) -> None:
        """The same op on flat operands; its results must be the flat forms of the old ones."""
        names = [r.name for r in op.results]
        device = op.results[0].type.device
        try:
            made = build(
                self.module, op.name, self._operands(op), names, attrs, loc=op.loc, device=device
            )
        except SignatureError as error:
            raise NotPerTokenError(op, str(error)) from error
        made.via = op.via
        target.append(made)
        for old, new in zip(op.results, made.results, strict=True):
            if new.type != self._type(old.type, op, f"%{old.name}"):
                raise NotPerTokenError(op, f"%{old.name} is {old.type}, flat it is {new.type}")
            self.values[old] = new

    def _repeat(self, op: Op, target: Block) -> None:
        assert op.body is not None
        body = Block()
        for arg in op.body.args:
            self.values[arg] = body.add_arg(arg.name, self._type(arg.type, op, f"%{arg.name}"))
        self._block(op.body, body)
        results = [(r.name, self._type(r.type, op, f"%{r.name}")) for r in op.results]
        made = Op("repeat", self._operands(op), results, op.attrs, loc=op.loc, body=body)
        target.append(made)
        self.values.update(zip(op.results, made.results, strict=True))

    # -- ops that name axes ---------------------------------------------------------------------
    def _reshape(self, op: Op, target: Block) -> None:
        flat = self._type(op.result.type, op, f"%{op.result.name}")
        given = op.operand(0)
        assert isinstance(flat, TensorType)
        if isinstance(given, Value) and (self._lead_of(given) > 0) != (
            self._lead_of(op.result) > 0
        ):
            raise NotPerTokenError(op, "the reshape takes tokens into other axes")
        if isinstance(given, Value) and self.values[given].type == flat:
            self.values[op.result] = self.values[given]
        else:
            self._copy(op, target, {"shape": flat.dims})

    def _permute(self, op: Op, target: Block) -> None:
        order = [d.const() for d in _dims_attr(op, "order")]
        lead = self._lead_of(op.value(0)) if op.values else 0
        if order[:lead] != list(range(lead)):
            raise NotPerTokenError(op, "the permute moves the token axes")
        shift = max(lead - 1, 0)
        flat = [0] * min(lead, 1) + [i - shift for i in order[lead:]]
        self._copy(op, target, {"order": tuple(Dim.of(i) for i in flat)})

    def _expand(self, op: Op, target: Block) -> None:
        flat = self._type(op.result.type, op, f"%{op.result.name}")
        assert isinstance(flat, TensorType)
        if self._lead_of(op.value(0)) != self._lead_of(op.result):
            raise NotPerTokenError(op, "the expand makes token axes")
        self._copy(op, target, {"shape": flat.dims})

    def _along_axis(self, op: Op, target: Block) -> None:
        rank, axis = op.result.tensor.rank, op.int_attr("axis", -1)
        if axis % rank < self._lead_of(op.result):
            raise NotPerTokenError(op, f"{op.name} works along a token axis")
        self._copy(op, target, {**op.attrs, "axis": Dim.of(axis % rank - rank)})


def _dims_attr(op: Op, key: str) -> list[Dim]:
    found = op.attrs[key]
    return [d for d in found if isinstance(d, Dim)] if isinstance(found, tuple) else []


def _check_by_token(op: Op, axes: _Axes) -> None:
    """Raise when an op may mix tokens: an unknown one, or one whose own axes are tokens."""
    if op.name in _ALL_ROWS:
        raise NotPerTokenError(op, f"{op.name} gives every cached row: run canonicalize first")
    if op.name not in _POINTWISE and not op.name.startswith(_BY_TOKEN):
        raise NotPerTokenError(op, f"nothing says that {op.name} is computed token by token")
    params = op_def(op.name).signature.params
    for param, operand in zip(params, op.operands, strict=False):
        if not isinstance(operand, Value) or not isinstance(param.pattern, TensorPattern):
            continue
        own = [d for d in param.pattern.dims if not d.startswith("...")]
        free, lead = operand.tensor.rank - len(own), axes.of(operand.type)
        if free < lead or (lead and len(own) == len(param.pattern.dims)):
            raise NotPerTokenError(op, f"{param.name} is {operand.type}: {op.name} mixes tokens")


# -- logits of the rows asked for -----------------------------------------------------------------
def _gather_logits(module: Module, function: Function) -> None:
    """Gather rows before the ops that only the logits need: lm_head and the final norm."""
    batch = next(a for a in function.args if isinstance(a.type, BatchType))
    for position, logits in enumerate(function.body.returns):
        if isinstance(logits.type, StateType) or _names(logits.type).isdisjoint({"T"}):
            continue
        tail = _tail(function.body, logits)
        source = tail[0].value(0) if tail else logits
        name = function.fresh_name("rows")
        gather = build(module, "logits.gather", [source, batch], [name], device=source.type.device)
        place = function.body.ops.index(tail[0]) if tail else len(function.body.ops)
        function.body.insert(place, gather)
        if tail:
            tail[0].replace_operand(source, gather.result)
        else:
            returns = list(function.body.returns)
            returns[position] = gather.result
            function.body.set_returns(returns)
        for value in (r for op in tail for r in op.results):
            value.type = value.tensor.with_dims("O", *value.tensor.dims[1:])


def _tail(block: Block, logits: Value) -> list[Op]:
    """The ops that lead to the logits alone, each of one tensor and row by row; in order."""
    tail: list[Op] = []
    op = logits.producer
    while op is not None and op.block is block and op.name in _LAST and len(op.values) == 1:
        if len(op.result.users) != 1 or op.value(0).tensor.dims[0] != Dim.of("T"):
            break
        tail.insert(0, op)
        op = op.value(0).producer
    return tail
