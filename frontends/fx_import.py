"""From an exported fx graph with leaf ops to an IR module, in the model's own ``[b, s]`` form.

One pass over the live nodes, one rule per operator (``aten_rules.py``, ``leaf_rules.py``).  Shapes
come from the op table and are checked against what torch.export saw.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx

from ktgraph.frontends.errors import UnsupportedModelError
from ktgraph.frontends.file_forms import Made, shapes_and_attrs
from ktgraph.frontends.fx_values import (
    Buffer,
    BufferSlice,
    Imported,
    Positions,
    Rows,
    Tables,
    Tensor,
)
from ktgraph.frontends.hf_build import Twin
from ktgraph.frontends.hf_export import AXES, Export
from ktgraph.frontends.naming import (
    Names,
    path_stem,
    piece_name,
    place_of,
    source_line,
    source_stems,
    value_stem,
    weight_name,
)
from ktgraph.ir.dims import Dim
from ktgraph.ir.graph import (
    Attr,
    Module,
    Operand,
    Recipe,
    Value,
    Weight,
    WeightRef,
    attr,
    dce,
    drop_unused_weights,
)
from ktgraph.ir.types import BATCH, Encoding, StateType, TensorType
from ktgraph.ops import SignatureError, build
from ktgraph.ops.tensor import dtype_name, torch_dtype
from ktgraph.weights.recipes import recipe_type

Rule = Callable[["Importer", fx.Node], Imported]
Dims = tuple[Dim, ...]
SYM_RANGES = {**AXES, "C": (1, 1 << 24)}
_ROOT = "model."  # the exported step holds the model under this name


def import_graph(twin: Twin, export: Export, name: str) -> Module:
    """The IR module of one exported step; UnsupportedModelError names op and source line."""
    return Importer(twin, export, name).run()


class Importer:
    """State of one import; rules use the methods below `run`."""

    def __init__(self, twin: Twin, export: Export, name: str) -> None:
        self.twin = twin
        self.program = export.program
        self.module = Module(name)
        self.module.syms = dict(SYM_RANGES)
        self.body = self.module.add_function("main").body
        self.names = Names()
        self.node: fx.Node | None = None  # the node being imported
        self._env: dict[fx.Node, Imported] = {}
        self._symbols: dict[str, str] = {}
        self._weights: dict[int, WeightRef] = {}  # by identity of the parameter: ties stay tied
        self._reshaped: dict[tuple[int, Dims], Value] = {}
        self._rows: dict[tuple[Value, int], list[Value]] = {}
        self._leaf_paths: dict[str, bool] = {}

    def run(self) -> Module:
        nodes = list(self.program.graph.nodes)
        inputs = self._user_inputs(nodes)
        self._name_symbols(inputs)
        ids = self._argument("ids", TensorType.of("i64", "b", "s"))
        self.batch = self._argument("batch", BATCH)
        state = self._argument("kv", self._state_type(nodes))
        self._env.update(zip(inputs, (Tensor.of(ids, 2), Positions(), state), strict=True))
        self._import_all(nodes)
        logits, last = nodes[-1].args[0]
        self.body.set_returns([self._returned(logits), self.state(last)])
        dce(self.module)
        drop_unused_weights(self.module)
        return self.module

    # ------------------------------------------------------------ inputs

    def _argument(self, name: str, type: Any) -> Value:
        return self.body.add_arg(self.names.fresh(name), type)

    def _user_inputs(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        """Placeholders of input_ids, positions, state; parameters go into the environment."""
        signature = self.program.graph_signature
        lifted = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        found = []
        made = signature.inputs_to_lifted_tensor_constants
        found: list[fx.Node] = []
        for node in (n for n in nodes if n.op == "placeholder"):
            self.node = node
            if node.name in signature.user_inputs:
                found.append(node)
                continue
            if node.name in lifted:
                weight = self._weight(lifted[node.name].removeprefix(_ROOT))
            else:
                weight = self._constant(made.get(node.name, node.name))
            self._env[node] = Tensor.of(weight, len(self._declared(weight).dims))
        return found

    def _constant(self, name: str) -> WeightRef:
        """A tensor that the model's code makes of constants."""
        raise self.unsupported("the model's code makes a tensor constant while it runs")

    def _name_symbols(self, inputs: Sequence[fx.Node]) -> None:
        ids, _, state = (n.meta["val"] for n in inputs)
        for name, size in (("b", ids.shape[0]), ("s", ids.shape[1]), ("t", state.shape[1])):
            if not isinstance(size, torch.SymInt):
                raise UnsupportedModelError(
                    f"{self.module.name}: tracing fixed axis {name} to {size}; the model's code "
                    "depends on it"
                )
            self._symbols[str(size.node.expr)] = name

    def _state_type(self, nodes: Sequence[fx.Node]) -> StateType:
        """One part for keys and one for values; every layer must cache rows of the same shape."""
        rows: dict[Any, Dims] = {}
        layers = 0
        for node in (n for n in nodes if n.target == torch.ops.ktg.kv_append.default):
            given = arguments(node)
            for part in ("k", "v"):
                val = given[part].meta["val"]
                row = Dim.of("C"), self.dim(val.shape[1]), self.dim(val.shape[3])
                if rows.setdefault((part, dtype_name(val.dtype)), row) != row:
                    raise UnsupportedModelError(
                        f"{self.path(node)}: layers cache rows of different shapes, which one "
                        "paged cache cannot hold"
                    )
            layers = max(layers, int(given["layer"]) + 1)
        parts = tuple(TensorType(dtype, row) for (_, dtype), row in sorted(rows.items()))
        return StateType(Dim.of(layers), parts)

    def _weight(self, fqn: str) -> WeightRef:
        """Declare a parameter or buffer, once per tensor: tied weights keep the first name."""
        model = self.twin.model
        owner, _, leaf = fqn.rpartition(".")
        tensor = getattr(model.get_submodule(owner), leaf)
        if id(tensor) in self._weights:
            return self._weights[id(tensor)]
        name = weight_name(fqn)
        name = fqn if name in self.module.weights else name
        type = TensorType.of(dtype_name(tensor.dtype), *tensor.shape)
        files = self.twin.files
        made = files.made.get(fqn)
        if made is not None:
            self._declare_made(name, made, type)
        else:
            source = files.names.get(fqn, fqn)
            encoded = files.encodings.get(source)
            encoded = encoded or _stored(self.twin.stored_dtype(fqn), tensor.dtype)
            self.module.add_weight(Weight(name, type.encoded(encoded), source=source))
        self._weights[id(tensor)] = WeightRef(name)
        return self._weights[id(tensor)]

    def _declare_made(self, name: str, made: Made, type: TensorType) -> None:
        """A parameter that the files hold in other pieces, or in another order."""
        files = self.twin.files
        shapes, attrs = shapes_and_attrs(made, type.dims, self.twin.config)
        refs: list[WeightRef] = []
        for source, dims in zip(made.sources, shapes, strict=True):
            encoding = files.encodings.get(source)
            encoding = encoding or _stored(files.dtypes.get(source), torch_dtype(type.dtype))
            stored = TensorType(type.dtype, dims, encoding)
            piece = Weight(piece_name(source), stored, source=source)
            self.module.add_weight(piece)
            refs.append(piece.ref())
        recipe = Recipe(made.kind, tuple(refs), tuple((k, attr(v)) for k, v in attrs.items()))
        whole = Weight(name, type, recipe=recipe)
        self.module.add_weight(replace(whole, type=recipe_type(self.module, whole)))

    def _declared(self, ref: WeightRef) -> TensorType:
        return self.module.weights[ref.name].type

    def derived_weight(
        self, ref: WeightRef, suffix: str, kind: str, type: TensorType, **attrs: Attr
    ) -> WeightRef:
        """A weight made from another by a recipe; what is transposed twice is the weight itself."""
        made = self.module.weights[ref.name].recipe
        twice = kind == "transpose" and made is not None and made.kind == kind
        if twice and made is not None and not made.attrs and not attrs:
            return made.args[0]
        name = f"{ref.name}.{suffix}"
        if name not in self.module.weights:
            recipe = Recipe(kind, (ref,), tuple(attrs.items()))
            self.module.add_weight(Weight(name, type, recipe=recipe))
        return WeightRef(name)

    # ------------------------------------------------------------ nodes

    def _import_all(self, nodes: Sequence[fx.Node]) -> None:
        """Import what the outputs need, in order."""
        live = _live(nodes)
        for node in nodes:
            if node in live and node.op == "call_function":
                self._import(node)

    def _import(self, node: fx.Node) -> None:
        self.node = node
        rule = RULES.get(node.target)
        if rule is None:
            raise self.unsupported(f"the operator {node.target} has no import rule")
        try:
            self._env[node] = result = rule(self, node)
        except SignatureError as error:
            raise self.unsupported(str(error)) from error
        if isinstance(result, Tensor):
            self._check(node, result)

    def _check(self, node: fx.Node, result: Tensor) -> None:
        """Our shape rules against torch's."""
        want, got = self.dims(node), self.dims_of(result)
        if want != got:
            raise self.unsupported(f"import made {_show(got)} where torch has {_show(want)}")

    def unsupported(self, why: str) -> UnsupportedModelError:
        """An error that names the module path, its class and the source line of the node."""
        assert self.node is not None
        path, cls = self._module(self.node)
        line = source_line(self.node.meta.get("stack_trace") or "")
        return UnsupportedModelError(
            f"{path or 'the model'} ({cls}){line}: {why}.\n"
            f"  node: {self.node.format_node()}\n"
            "  next: add a rule in ktgraph/frontends/aten_rules.py, or a leaf op in "
            "ktgraph/frontends/hf_leaves.py if a norm, router or rope was not recognised"
        )

    def _returned(self, node: fx.Node) -> Value:
        found = self.value(node)
        assert isinstance(found, Value)
        return found

    # ------------------------------------------------------------ what rules use

    def get(self, node: object) -> Imported:
        """What an argument node stands for."""
        assert isinstance(node, fx.Node)
        return self._env[node]

    def state(self, node: object) -> Value:
        found = self.get(node)
        assert isinstance(found, Value)
        return found

    def tensor(self, node: object) -> Tensor:
        """An argument as a tensor; cached rows are read, filled buffers joined."""
        found = self.get(node)
        if isinstance(found, Rows):
            return self._read(found)
        if isinstance(found, Buffer):
            return self._joined(found)
        if not isinstance(found, Tensor):
            raise self.unsupported(f"{type(found).__name__} is used as a tensor")
        return found

    def value(self, node: object, order: Iterable[int] | None = None) -> Operand:
        """An argument as an operand, with its axes in `order`."""
        tensor = self.tensor(node)
        return self.place(tensor if order is None else tensor.permuted(tuple(order)))

    def optional(self, node: object) -> Operand:
        return None if node is None else self.value(node)

    def place(self, tensor: Tensor) -> Operand:
        """The operand with exactly the tensor's axes: a reshape if only unit axes move."""
        if tensor.is_plain:
            return tensor.base
        if self.moves_units_only(tensor):
            return self.reshape(tensor.base, self.dims_of(tensor))
        stems = [value_stem(tensor.base)]
        return self.emit("tensor.permute", [tensor.base], {"order": tensor.order}, stems)[0]

    def moves_units_only(self, tensor: Tensor) -> bool:
        dims = self.base_dims(tensor.base)
        wide = [axis for axis in tensor.order if dims[axis] != 1]
        return wide == sorted(wide)

    def reshape(self, base: Operand, shape: Dims, stems: Sequence[str] | None = None) -> Value:
        """tensor.reshape of `base`, skipping reshapes on the way and reusing equal ones."""
        if isinstance(base, Value) and base.producer and base.producer.name == "tensor.reshape":
            base = base.producer.operand(0)
        assert base is not None
        if self.base_dims(base) == shape and isinstance(base, Value):
            return base
        key = (id(base), shape)
        if key not in self._reshaped:
            stems = stems or [value_stem(base)]
            self._reshaped[key] = self.emit("tensor.reshape", [base], {"shape": shape}, stems)[0]
        return self._reshaped[key]

    def _read(self, rows: Rows) -> Tensor:
        key = (rows.state, rows.layer)
        if key not in self._rows:
            attrs = {"layer": rows.layer, "rows": (Dim.of("b"), Dim.of("t"))}
            stems = ["k.rows", "v.rows"]
            self._rows[key] = self.emit("kv.read", [rows.state, self.batch], attrs, stems)
        return Tensor(self._rows[key][rows.part], (0, 2, 1, 3))

    def _joined(self, buffer: Buffer) -> Tensor:
        """Pieces that cover a buffer, in order, become a concat."""
        pieces = [buffer.pieces[start] for start in sorted(buffer.pieces)]
        starts = [Dim.of(0)]
        for size, _ in pieces:
            starts.append(starts[-1] + size)
        if buffer.axis is None or starts[:-1] != [Dim.of(s) for s in sorted(buffer.pieces)]:
            raise self.unsupported("a tensor is read before its pieces cover it without gaps")
        return self.concat([piece for _, piece in pieces], buffer.axis, ["joined"])

    def concat(
        self, pieces: Sequence[Tensor], axis: int, stems: Sequence[str] | None = None
    ) -> Tensor:
        """Along a logical axis; pieces of one axis order need no permute."""
        order = pieces[0].order
        if any(p.order != order for p in pieces):
            order = tuple(range(len(order)))
            pieces = [Tensor.of(_some(self.place(p)), len(order)) for p in pieces]
        rank = len(order)
        at = order[axis % rank] - rank
        out = self.emit("tensor.concat", [p.base for p in pieces], {"axis": at}, stems)
        return Tensor(out[0], order)

    def emit(
        self,
        name: str,
        operands: Sequence[Operand],
        attrs: Mapping[str, object] | None = None,
        stems: Sequence[str] | None = None,
    ) -> list[Value]:
        """Append an op at the current node; results are named by `stems` or by the source line."""
        assert self.node is not None
        path = self.path(self.node)
        count = 2 if name in _TWO_RESULTS else len(stems or ["x"])
        names = [self._fresh(stem, path) for stem in self._stems(stems, count, path)]
        op = build(self.module, name, operands, names, attrs, loc=path or None)
        return self.body.append(op).results

    def _fresh(self, stem: str, path: str) -> str:
        layer = place_of(path).layer
        return self.names.fresh(stem if layer is None else f"l{layer}.{stem}")

    def _stems(self, given: Sequence[str] | None, count: int, path: str) -> Sequence[str]:
        if given is not None:
            return given
        assert self.node is not None
        if self._is_leaf(path) and count == 1:
            return [path_stem(path)]
        found = source_stems(self.node.meta.get("stack_trace") or "")
        stem = found[0] if found else path_stem(path)
        return found[:count] if len(found) >= count else [stem] * count

    def stems(self, count: int) -> Sequence[str]:
        """Names for `count` results from the current node's source line."""
        assert self.node is not None
        return self._stems(None, count, self.path(self.node))

    def source_stem(self) -> Sequence[str] | None:
        """The name that the current node's source line gives its result, None for leaf modules."""
        assert self.node is not None
        if self._is_leaf(self.path(self.node)):
            return None
        return source_stems(self.node.meta.get("stack_trace") or "")[:1] or None

    def _is_leaf(self, path: str) -> bool:
        if path not in self._leaf_paths:
            children = self.twin.model.get_submodule(path).children()
            self._leaf_paths[path] = next(iter(children), None) is None
        return self._leaf_paths[path]

    def path(self, node: fx.Node) -> str:
        """Module path of a node, from the model's root."""
        return self._module(node)[0]

    def _module(self, node: fx.Node) -> tuple[str, str]:
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        path, cls = stack[-1] if stack else ("", type(self.twin.model))
        path = re.sub(r"@\d+$", "", path)
        path = "" if path == _ROOT.rstrip(".") else path.removeprefix(_ROOT)
        return path, str(cls if isinstance(cls, str) else cls.__name__).rsplit(".", 1)[-1]

    # ------------------------------------------------------------ dims

    def dims(self, node: object) -> Dims:
        """The shape torch.export saw."""
        assert isinstance(node, fx.Node)
        return tuple(self.dim(size) for size in node.meta["val"].shape)

    def dim(self, size: object) -> Dim:
        if isinstance(size, fx.Node):
            size = size.meta["val"]
        if isinstance(size, torch.SymInt):
            return self._dim(size.node.expr)
        assert isinstance(size, int)
        return Dim.of(size)

    def _dim(self, expr: Any) -> Dim:
        if expr.is_Integer:
            return Dim.of(int(expr))
        if expr.is_Symbol and str(expr) in self._symbols:
            return Dim.of(self._symbols[str(expr)])
        if isinstance(expr, (sympy.Add, sympy.Mul)):
            out = self._dim(expr.args[0])
            for arg in expr.args[1:]:
                other = self._dim(arg)
                out = out + other if isinstance(expr, sympy.Add) else out * other
            return out
        raise self.unsupported(f"the size {expr} is no polynomial of b, s and t")

    def base_dims(self, base: Operand) -> Dims:
        assert base is not None
        type = self.module.type_of(base)
        assert isinstance(type, TensorType)
        return type.dims

    def dims_of(self, tensor: Tensor) -> Dims:
        dims = self.base_dims(tensor.base)
        return tuple(dims[axis] for axis in tensor.order)


_TWO_RESULTS = frozenset({"nn.rope", "moe.route", "kv.read"})
RULES: dict[Any, Rule] = {}


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    """Register a rule for operator overloads."""

    def register(function: Rule) -> Rule:
        for target in targets:
            RULES[target] = function
        return function

    return register


def arguments(node: fx.Node) -> dict[str, Any]:
    """Arguments by the names of the operator's schema, defaults filled in."""
    schema = node.target._schema.arguments  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]
    given = {a.name: a.default_value for a in schema if a.has_default_value()}
    given.update(zip((a.name for a in schema), node.args, strict=False))
    return {**given, **node.kwargs}


def _live(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Nodes that the outputs need; also those that write into a tensor which they read."""
    writes: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        if any(alias is not None and alias.is_write for alias in _aliases(node)):
            writes.setdefault(_root(node), []).append(node)
    live: set[fx.Node] = set()
    stack = list(nodes[-1].all_input_nodes)
    while stack:
        node = stack.pop()
        if node in live:
            continue
        live.add(node)
        stack += [*node.all_input_nodes, *writes.get(node, [])]
    return live


def _root(node: Any) -> fx.Node:
    """The tensor that a view shows, or that an in-place operator writes into."""
    while node.target is operator.getitem or any(_aliases(node)[:1]):
        node = node.args[0]
    return node


def _aliases(node: fx.Node) -> list[Any]:
    """For each argument of an operator: how results share its memory, None where they do not."""
    schema = getattr(node.target, "_schema", None)
    return [] if schema is None else [a.alias_info for a in schema.arguments]


def _stored(stored: torch.dtype | None, computed: torch.dtype) -> Encoding | None:
    """The encoding of a weight that is stored narrower than it computes."""
    if stored is None or stored == computed or not stored.is_floating_point:
        return None
    return Encoding(dtype_name(stored)) if stored.itemsize < computed.itemsize else None


def _some(operand: Operand) -> Any:
    assert operand is not None
    return operand


def _show(dims: Dims) -> str:
    return f"[{', '.join(map(str, dims))}]"


from ktgraph.frontends import aten_rules as aten_rules  # noqa: E402  (rules register themselves)
from ktgraph.frontends import leaf_rules as leaf_rules  # noqa: E402

__all__ = ["BufferSlice", "Importer", "Tables", "arguments", "import_graph", "rule"]
