"""From the exported program of any module to IR: what has no op becomes a torch.call.

Axes keep the module's own meaning.  Sizes that may vary become syms: `b` and `s` for the first two,
`s` alone where there is one.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor as TorchTensor
from torch import fx, nn

from ktgraph.frontends import module_rules as module_rules  # registers rules
from ktgraph.frontends.errors import UnsupportedModelError
from ktgraph.frontends.fx_import import Importer
from ktgraph.frontends.fx_values import Imported, Tensor
from ktgraph.frontends.hf_build import Twin
from ktgraph.frontends.hf_export import Export
from ktgraph.frontends.hf_leaves import LeafReport
from ktgraph.frontends.module_export import Exported
from ktgraph.ir.dims import Dim
from ktgraph.ir.example import set_example
from ktgraph.ir.graph import Module, Operand, Value, Weight, WeightRef, dce, drop_unused_weights
from ktgraph.ir.types import TensorType
from ktgraph.ops.bound_modules import name_of
from ktgraph.ops.call_args import ArgumentError, ArgumentWriter
from ktgraph.ops.tensor import dtype_name

_SYMS = ("b", "s", "t", "u", "v", "w", "x", "y", "z")
MOST = 1 << 20  # largest size of an axis that varies
_ROOT = "model."


class NotAGraphError(UnsupportedModelError):
    """A node that even torch.call cannot stand for: `path` is the module that holds it.

    of_sizes: because of a size that is no polynomial of those that vary; fixed sizes may do.
    """

    def __init__(self, path: str, where: str, why: str, *, of_sizes: bool = False) -> None:
        super().__init__(f"{where}: {why}")
        self.path = path
        self.where = where
        self.why = why
        self.of_sizes = of_sizes


@dataclass
class ImportedModule:
    """The IR, values of tensors that the model's code makes, and operators left to torch."""

    module: Module
    constants: dict[str, TorchTensor]
    operators: dict[str, list[str]] = field(default_factory=dict[str, list[str]])  # by place
    example: dict[str, int] = field(default_factory=dict[str, int])  # sizes of the syms


def import_module_graph(exported: Exported, model: nn.Module, name: str) -> ImportedModule:
    """The IR of an exported module; raises NotAGraphError."""
    return ModuleImporter(exported, model, name).run_module()


class ModuleImporter(Importer):
    """`Importer` for programs without token ids, positions and cache."""

    def __init__(self, exported: Exported, model: nn.Module, name: str) -> None:
        twin = Twin(cast("Any", model), {}, {})
        super().__init__(twin, Export(exported.program, LeafReport()), name)
        self.exported = exported
        self.root = name_of(model)
        self.constants: dict[str, TorchTensor] = {}
        self.operators: dict[str, list[str]] = {}
        self.example: dict[str, int] = {}
        self.module.syms = {}

    def run_module(self) -> ImportedModule:
        nodes = list(self.program.graph.nodes)
        inputs = self._user_inputs(nodes)
        self._name_sizes(inputs)
        for node in inputs:
            self.node = node
            type = TensorType(self._dtype(node), self.dims(node))
            arg = self.body.add_arg(self.names.fresh(self._argument_stem(len(inputs), node)), type)
            self._env[node] = Tensor.of(arg, len(type.dims))
        self._import_all(nodes)
        self.body.set_returns([self._result(n) for n in nodes[-1].args[0]])
        dce(self.module)
        drop_unused_weights(self.module)
        set_example(self.module.functions["main"], self.example)
        return ImportedModule(self.module, self.constants, self._kept_operators(), self.example)

    # ------------------------------------------------------------ inputs and results

    def _constant(self, name: str) -> WeightRef:
        value: Any = self.program.constants[name]
        own = f"constants.{name.removeprefix(_ROOT)}"
        self.constants[own] = value
        self.module.add_weight(
            Weight(own, TensorType.of(dtype_name(value.dtype), *value.shape), source=own)
        )
        return WeightRef(own)

    def _name_sizes(self, inputs: Sequence[fx.Node]) -> None:
        """Names of the sizes that vary, in order of first use."""
        for node in inputs:
            for size in node.meta["val"].shape:
                if not isinstance(size, torch.SymInt) or not size.node.expr.is_Symbol:
                    continue
                key = str(size.node.expr)
                if key in self._symbols:
                    continue
                if len(self._symbols) == len(_SYMS):
                    raise NotAGraphError("", "the model itself", "more than nine sizes vary")
                self._symbols[key] = _SYMS[len(self._symbols)]
                self.example[self._symbols[key]] = int(size.node.hint)
        self.module.syms = {name: (1, MOST) for name in self._symbols.values()}

    def _argument_stem(self, count: int, node: fx.Node) -> str:
        return "x" if count == 1 else f"x{node.name.rpartition('_')[2]}"

    def _result(self, node: object) -> Value:
        found = self.value(node)
        if isinstance(found, Value):
            return found
        assert isinstance(node, fx.Node)
        self.node = node  # a weight is returned as it is
        shape = self.base_dims(found)
        return self.emit("tensor.reshape", [found], {"shape": shape}, ["result"])[0]

    # ------------------------------------------------------------ nodes

    def _import(self, node: fx.Node) -> None:
        try:
            super()._import(node)
            self._check_dtypes(node)
        except NotAGraphError:
            raise
        except UnsupportedModelError as error:
            self._env[node] = self._call_operator(node, error)

    def _check_dtypes(self, node: fx.Node) -> None:
        """The IR's type rules against torch's promotion."""
        found, val = self._env.get(node), node.meta.get("val")
        if not isinstance(found, Tensor) or not isinstance(val, TorchTensor) or _is_ids(node):
            return
        type = self.module.type_of(found.base)
        if isinstance(type, TensorType) and type.dtype != self._dtype(node):
            raise self.unsupported(f"import made {type.dtype} where torch has {val.dtype}")

    def _dtype(self, node: fx.Node) -> str:
        try:
            return dtype_name(node.meta["val"].dtype)
        except ValueError as error:
            raise self._no_graph(node, str(error)) from error

    def _no_graph(self, node: fx.Node, why: str, *, of_sizes: bool = False) -> NotAGraphError:
        path, _ = self._module(node)
        where = str(self.unsupported(why)).split("\n")[0].split(": ")[0]
        return NotAGraphError(path, where, why, of_sizes=of_sizes)

    def _call_operator(self, node: fx.Node, cause: UnsupportedModelError) -> Imported:
        """The operator itself, by torch.call."""
        name = str(node.target)
        if not isinstance(node.target, torch._ops.OpOverload):
            raise self._no_graph(node, f"{name} has no import rule")
        if name.startswith("ktg."):  # a leaf op of ours, which torch cannot run
            raise self._no_graph(node, _reason(cause))
        if any(
            a.alias_info is not None and a.alias_info.is_write
            for a in node.target._schema.arguments
        ):
            raise self._no_graph(
                node, f"{name} writes into a tensor in a way that stays after export"
            )
        writer = ArgumentWriter(self._operand_of, self._size_of)
        try:
            args = writer.text(node.args, node.kwargs)
        except ArgumentError as error:
            raise self._no_graph(node, f"{name} takes {error}") from error
        place = str(cause).split(": ")[0]
        self.operators.setdefault(place, [])
        if name not in self.operators[place]:
            self.operators[place].append(name)
        return self.torch_call(node, {"op": name, "args": args}, writer)

    def torch_call(
        self, node: fx.Node, attrs: Mapping[str, object], writer: ArgumentWriter
    ) -> Imported:
        """Emit the op with the results that torch.export saw."""
        val = node.meta["val"]
        vals = list(val) if isinstance(val, (list, tuple)) else [val]
        if not vals or not all(isinstance(v, TorchTensor) for v in vals):
            raise self._no_graph(node, f"{node.target} makes something else than tensors")
        try:
            shapes = tuple(tuple(self.dim(n) for n in v.shape) for v in vals)
            dtypes = tuple(dtype_name(v.dtype) for v in vals)
        except ValueError as error:
            if isinstance(error, NotAGraphError):
                raise
            why = f"{node.target} makes a tensor whose size or dtype no type of the IR has"
            raise self._no_graph(node, f"{why} ({_reason(error)})") from error
        full = {**attrs, "sizes": tuple(writer.sizes), "dtypes": dtypes, "shapes": shapes}
        out = self.emit("torch.call", writer.operands, full, self.stems(len(vals)))
        made = tuple(Tensor.of(v, len(s)) for v, s in zip(out, shapes, strict=True))
        return made if isinstance(val, (list, tuple)) else made[0]

    def _operand_of(self, value: object) -> Operand:
        if not isinstance(value, fx.Node) or not isinstance(value.meta.get("val"), TorchTensor):
            return None
        return self.value(value)

    def _size_of(self, value: object) -> Dim | None:
        if isinstance(value, (fx.Node, torch.SymInt)):
            return self.dim(value)
        return None

    def _kept_operators(self) -> dict[str, list[str]]:
        """Those whose results are used."""
        used = {str(op.attrs.get("op")) for op in self.module.walk() if op.name == "torch.call"}
        kept = {p: [o for o in ops if o in used] for p, ops in self.operators.items()}
        return {p: ops for p, ops in kept.items() if ops}

    def dim(self, size: object) -> Dim:
        if isinstance(size, fx.Node) and isinstance(size.meta.get("val"), int):
            return Dim.of(size.meta["val"])
        return super().dim(size)

    def _dim(self, expr: Any) -> Dim:
        known = {str(s) for s in expr.free_symbols} <= self._symbols.keys()
        try:
            return super()._dim(expr)
        except NotAGraphError:
            raise
        except UnsupportedModelError as error:
            assert self.node is not None
            raise self._no_graph(self.node, _reason(error), of_sizes=known) from error


def _is_ids(node: fx.Node) -> bool:
    """Ids of a lifted router, which only its experts read: i32 in the IR, i64 in torch."""
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and source.target is torch.ops.ktg.route.default


def _reason(error: Exception) -> str:
    return str(error).split("\n")[0].rpartition(": ")[2].rstrip(".")


__all__ = ["MOST", "ImportedModule", "ModuleImporter", "NotAGraphError", "import_module_graph"]
