"""The graph: values, ops, blocks, functions, weights, modules, and the edits that keep uses right.

Ownership: a `Value` belongs to the op (or block) that defines it; `value.users` is kept by the edit
methods of `Op` and `Block`, so passes change operands only through them.  Weights are names with
recipes, never bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ktgraph.ir.dims import Dim
from ktgraph.ir.types import BATCH, BatchType, StateType, TensorType, Type

if TYPE_CHECKING:
    from networkx import MultiDiGraph

Attr = bool | float | str | Dim | tuple["Attr", ...]


def attr(value: object) -> Attr:
    """Normalise a Python value to an attribute: integers become dims, lists become tuples."""
    if isinstance(value, (bool, float, str, Dim)):
        return value
    if isinstance(value, int):
        return Dim.of(value)
    if isinstance(value, (list, tuple)):
        return tuple(attr(v) for v in value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    raise TypeError(f"an attribute is a bool, int, float, string, dim or list, not {value!r}")


class Value:
    """An SSA value; `owner` is the defining op, or the block whose argument it is."""

    __slots__ = ("name", "owner", "type", "users")

    def __init__(self, name: str, type: Type, owner: Op | Block) -> None:
        self.name = name
        self.type = type
        self.owner = owner
        self.users: list[Op] = []  # one entry per use

    @property
    def producer(self) -> Op | None:
        """The op that defines the value, None for a block argument."""
        return self.owner if isinstance(self.owner, Op) else None

    @property
    def tensor(self) -> TensorType:
        if not isinstance(self.type, TensorType):
            raise TypeError(f"%{self.name} is a {self.type}, not a tensor")
        return self.type

    def replace_by(self, new: Value) -> None:
        """Make every user read `new` instead."""
        for user in list(self.users):
            user.replace_operand(self, new)

    def __repr__(self) -> str:
        return f"%{self.name}: {self.type}"


@dataclass(frozen=True)
class WeightRef:
    """A weight used by an op: ``@layers[i].q_proj`` is name ``layers[].q_proj`` at index ``i``."""

    name: str
    index: Dim | None = None

    def __str__(self) -> str:
        if self.index is None:
            return f"@{self.name}"
        return "@" + self.name.replace("[]", f"[{self.index}]", 1)


Operand = Value | WeightRef | None


@dataclass(frozen=True)
class Recipe:
    """How a derived weight is made from others: evaluated once at load, weight by weight."""

    kind: str
    args: tuple[WeightRef, ...]
    attrs: tuple[tuple[str, Attr], ...] = ()

    def get(self, key: str, default: Attr | None = None) -> Attr | None:
        return dict(self.attrs).get(key, default)


@dataclass
class Weight:
    """A declaration: type, and either `source` (a name in the checkpoint) or a `recipe`.

    A *family* has one member per index: name ``layers[].q_proj``, var ``i``, lo..hi inclusive.
    """

    name: str
    type: TensorType
    source: str | None = None
    recipe: Recipe | None = None
    var: str = "i"
    lo: int = 0
    hi: int = -1

    @property
    def is_family(self) -> bool:
        return "[]" in self.name

    @property
    def members(self) -> int:
        return self.hi - self.lo + 1 if self.is_family else 1

    def ref(self, index: int | str | Dim | None = None) -> WeightRef:
        if not self.is_family:
            return WeightRef(self.name)
        return WeightRef(self.name, Dim.of(self.var if index is None else index))


class Block:
    """A list of ops with arguments; `returns` are the returned or yielded values."""

    def __init__(self) -> None:
        self.args: list[Value] = []
        self.ops: list[Op] = []
        self.terminator = Op("return", [], [], {}, block=self)
        self.parent: Op | None = None

    def add_arg(self, name: str, type: Type) -> Value:
        value = Value(name, type, self)
        self.args.append(value)
        return value

    @property
    def returns(self) -> list[Value]:
        return [v for v in self.terminator.operands if isinstance(v, Value)]

    def set_returns(self, values: Iterable[Value]) -> None:
        self.terminator.set_operands(list(values))

    def append(self, op: Op) -> Op:
        return self.insert(len(self.ops), op)

    def insert(self, position: int, op: Op) -> Op:
        op.block = self
        self.ops.insert(position, op)
        return op

    def insert_before(self, anchor: Op, op: Op) -> Op:
        return self.insert(self.ops.index(anchor), op)

    def walk(self) -> Iterator[Op]:
        """Every op here and in nested blocks, in order; safe while the block is edited."""
        for op in list(self.ops):
            yield op
            if op.body is not None:
                yield from op.body.walk()


class Op:
    """One line of the IR.  `attrs` values are `Attr`; a `repeat` also has a `body`."""

    def __init__(
        self,
        name: str,
        operands: Iterable[Operand],
        results: Iterable[tuple[str, Type]],
        attrs: Mapping[str, object] | None = None,
        *,
        via: str | None = None,
        loc: str | None = None,
        block: Block | None = None,
        body: Block | None = None,
    ) -> None:
        self.name = name
        self.operands: list[Operand] = []
        self.attrs: dict[str, Attr] = {k: attr(v) for k, v in (attrs or {}).items()}
        self.via = via
        self.loc = loc
        self.block = block
        self.body = body
        self.line = 0  # line in the text the op was parsed from, 0 when built
        if body is not None:
            body.parent = self
        self.results = [Value(n, t, self) for n, t in results]
        self.set_operands(list(operands))

    @property
    def result(self) -> Value:
        return self.results[0]

    @property
    def values(self) -> list[Value]:
        return [o for o in self.operands if isinstance(o, Value)]

    @property
    def weights(self) -> list[WeightRef]:
        return [o for o in self.operands if isinstance(o, WeightRef)]

    def set_operands(self, operands: list[Operand]) -> None:
        for old in self.values:
            old.users.remove(self)
        while operands and operands[-1] is None:
            operands = operands[:-1]
        self.operands = operands
        for new in self.values:
            new.users.append(self)

    def set_operand(self, position: int, new: Operand) -> None:
        operands = list(self.operands) + [None] * (position + 1 - len(self.operands))
        operands[position] = new
        self.set_operands(operands)

    def replace_operand(self, old: Value, new: Operand) -> None:
        self.set_operands([new if o is old else o for o in self.operands])

    def operand(self, position: int) -> Operand:
        """The operand at `position`, None when it is absent."""
        return self.operands[position] if position < len(self.operands) else None

    def value(self, position: int) -> Value:
        """The operand at `position`, which must be a value."""
        found = self.operand(position)
        if not isinstance(found, Value):
            raise TypeError(f"{self.name}: operand {position} is {found}, not a value")
        return found

    def weight(self, position: int) -> WeightRef:
        """The operand at `position`, which must be a weight."""
        found = self.operand(position)
        if not isinstance(found, WeightRef):
            raise TypeError(f"{self.name}: operand {position} is {found}, not a weight")
        return found

    def int_attr(self, key: str, default: int | None = None) -> int:
        found = self.attrs.get(key, default)
        if isinstance(found, Dim):
            return found.const()
        if isinstance(found, int):
            return found
        raise TypeError(f"{self.name}: attribute {key} is {found!r}, not an integer")

    def erase(self) -> None:
        """Remove the op; its results must have no users left."""
        for result in self.results:
            if result.users:
                raise ValueError(f"%{result.name} still has users: {result.users[0].name}")
        if self.body is not None:
            for inner in reversed(self.body.ops):
                inner.set_operands([])
            self.body.set_returns([])
        self.set_operands([])
        if self.block is not None and self in self.block.ops:
            self.block.ops.remove(self)

    def replace_by(self, values: Iterable[Value]) -> None:
        """Let `values` take over every use of the results, then erase the op."""
        for old, new in zip(self.results, list(values), strict=True):
            old.replace_by(new)
        self.erase()

    def __str__(self) -> str:
        from ktgraph.ir.printer import print_op

        return print_op(self)

    __repr__ = __str__


@dataclass
class Function:
    """``func @name(args) -> (types) { ... }``; attrs hold e.g. the phase predicate."""

    name: str
    body: Block = field(default_factory=Block)
    attrs: dict[str, Attr] = field(default_factory=dict[str, Attr])

    @property
    def args(self) -> list[Value]:
        return self.body.args

    def walk(self) -> Iterator[Op]:
        return self.body.walk()

    def fresh_name(self, stem: str) -> str:
        """`stem`, or `stem.1`, `stem.2` … when taken; existing names never change."""
        taken = {v.name for v in self.values()}
        if stem not in taken:
            return stem
        n = 1
        while f"{stem}.{n}" in taken:
            n += 1
        return f"{stem}.{n}"

    def values(self) -> Iterator[Value]:
        yield from self.body.args
        for op in self.walk():
            yield from op.results
            if op.body is not None:
                yield from op.body.args


@dataclass
class Witness:
    """The module's literal integers (in print order) when traced under another binding of names."""

    bindings: dict[str, int]
    literals: list[int]


class Module:
    """Functions, weights, dims and devices; prints itself as canonical `.ktir` text."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.home: str | None = None
        self.target_hash: str | None = None
        self.dims: dict[str, int] = {}
        self.syms: dict[str, tuple[int, int]] = {}
        self.devices: dict[str, dict[str, Attr]] = {}
        self.weights: dict[str, Weight] = {}
        self.functions: dict[str, Function] = {}
        self.witnesses: list[Witness] = []

    def add_weight(self, weight: Weight) -> Weight:
        if weight.name in self.weights:
            raise ValueError(f"weight @{weight.name} is declared twice")
        self.weights[weight.name] = weight
        return weight

    def add_function(self, name: str) -> Function:
        if name in self.functions:
            raise ValueError(f"function @{name} is declared twice")
        self.functions[name] = Function(name)
        return self.functions[name]

    def weight_of(self, ref: WeightRef) -> Weight:
        """The declaration a reference means; raises KeyError when there is none."""
        if ref.name in self.weights:
            return self.weights[ref.name]
        raise KeyError(f"{ref} is not declared")

    def walk(self) -> Iterator[Op]:
        for func in self.functions.values():
            yield from func.walk()

    def function_of(self, op: Op) -> Function:
        """The function an op lies in."""
        block = op.block
        while block is not None and block.parent is not None:
            block = block.parent.block
        for func in self.functions.values():
            if func.body is block:
                return func
        raise ValueError(f"{op.name} lies in no function of @{self.name}")

    def type_of(self, operand: Value | WeightRef) -> Type:
        if isinstance(operand, Value):
            return operand.type
        return self.weight_of(operand).type

    def __str__(self) -> str:
        from ktgraph.ir.printer import print_module

        return print_module(self)

    def clone(self) -> Module:
        """A deep copy that shares nothing with this module."""
        from ktgraph.ir.copying import clone_module

        return clone_module(self)

    def structural_hash(self) -> str:
        """Equal for modules that differ only in value names, locs and comments."""
        from ktgraph.ir.printer import structural_text

        return hashlib.sha256(structural_text(self).encode()).hexdigest()[:16]

    def to_networkx(self) -> MultiDiGraph[str]:
        """The ops as a networkx graph: a node per op (device, bytes, flops), an edge per use."""
        from ktgraph.ir.picture import to_networkx

        return to_networkx(self)

    def rebind(self, **dims: int) -> Module:
        """A copy whose named dims have other values: the miniature that validation runs."""
        from ktgraph.ir.copying import rebind_module

        return rebind_module(self, dims)


def drop_unused_weights(module: Module) -> list[str]:
    """Remove weights that no op and no kept recipe reads; returns their names."""
    live: set[str] = set()
    stack = [ref.name for op in module.walk() for ref in op.weights]
    while stack:
        name = stack.pop()
        if name in live or name not in module.weights:
            continue
        live.add(name)
        recipe = module.weights[name].recipe
        if recipe is not None:
            stack.extend(ref.name for ref in recipe.args)
    dropped = [name for name in module.weights if name not in live]
    for name in dropped:
        del module.weights[name]
    return dropped


def dce(module: Module, has_effect: Callable[[Op], bool] = lambda op: False) -> int:
    """Erase ops whose results nobody reads, innermost last-to-first; returns how many."""
    erased = 0
    for func in module.functions.values():
        erased += _dce_block(func.body, has_effect)
    return erased


def _dce_block(block: Block, has_effect: Callable[[Op], bool]) -> int:
    erased = 0
    for op in reversed(list(block.ops)):
        if op.body is not None:
            erased += _dce_block(op.body, has_effect)
        if has_effect(op) or any(r.users for r in op.results):
            continue
        op.erase()
        erased += 1
    return erased


__all__ = [
    "BATCH",
    "Attr",
    "BatchType",
    "Block",
    "Function",
    "Module",
    "Op",
    "Operand",
    "Recipe",
    "StateType",
    "TensorType",
    "Type",
    "Value",
    "Weight",
    "WeightRef",
    "Witness",
    "attr",
    "dce",
    "drop_unused_weights",
]
