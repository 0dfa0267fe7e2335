"""`PartImporter`: from an exported part of a model to IR, a function of tensors alone.

A part is compiled inside a model that stays eager: an MoE block, a region of a dynamo graph.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ktgraph.frontends.errors import UnsupportedModelError
from ktgraph.frontends.fx_import import Importer
from ktgraph.frontends.fx_values import Tensor
from ktgraph.frontends.hf_build import Twin
from ktgraph.frontends.hf_export import Export
from ktgraph.ir.graph import Module, dce, drop_unused_weights
from ktgraph.ir.types import TensorType
from ktgraph.ops.tensor import dtype_name


class PartImporter(Importer):
    """`Importer` for a part whose arguments share leading axes; `axes`: their names and sizes."""

    def __init__(
        self, twin: Twin, export: Export, name: str, axes: Mapping[str, tuple[int, int]]
    ) -> None:
        super().__init__(twin, export, name)
        self.module.syms = dict(axes)

    def run(self) -> Module:
        """The part as @main; its arguments are %x, or %x0, %x1, … where there are several."""
        nodes = list(self.program.graph.nodes)
        inputs = self._user_inputs(nodes)
        for number, node in enumerate(inputs):
            self.node = node
            value = node.meta["val"]
            for name, size in zip(self.module.syms, value.shape, strict=False):
                if not isinstance(size, torch.SymInt):
                    raise UnsupportedModelError(
                        f"{self.module.name}: tracing fixed axis {name} to {size}; the code "
                        "depends on it"
                    )
                self._symbols[str(size.node.expr)] = name
            type = TensorType(dtype_name(value.dtype), self.dims(node))
            arg = self._argument("x" if len(inputs) == 1 else f"x{number}", type)
            self._env[node] = Tensor.of(arg, len(type.dims))
        self._import_all(nodes)
        self.body.set_returns([self._returned(n) for n in nodes[-1].args[0]])
        dce(self.module)
        drop_unused_weights(self.module)
        return self.module


def add_part(module: Module, part: Module, name: str) -> None:
    """Make a part's @main the function `name` of a module; weights of equal names are shared."""
    function = part.functions.pop("main")
    function.name = name
    module.functions[name] = function
    for weight in part.weights.values():
        if weight.name not in module.weights:
            module.add_weight(weight)
    module.syms.update(part.syms)


__all__ = ["PartImporter", "add_part"]
