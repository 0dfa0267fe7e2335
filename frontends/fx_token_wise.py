"""Which operators of a graph of torch dynamo compute token by token, and keep clear of writes."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.passes.operator_support import OperatorSupportBase

_nn: Any = cast("Any", torch)._C._nn  # where dynamo finds some of the functions
LINEARS = frozenset({F.linear, _nn.linear})
_ACTS = frozenset({F.silu, F.relu, torch.relu, F.gelu, _nn.gelu, torch.sigmoid, F.sigmoid})
_SUMS = frozenset({operator.add, torch.add})
_PRODUCTS = frozenset({operator.mul, torch.mul})
_DTYPES = (torch.float32, torch.bfloat16)


class TokenWise(OperatorSupportBase):
    """Linears with stored weights, activations, sums and products of floats on the CPU."""

    def __init__(self, weights: Mapping[fx.Node, Tensor], mutated: set[fx.Node]) -> None:
        self.weights = weights
        self.mutated = mutated

    def is_node_supported(self, submodules: Mapping[str, nn.Module], node: fx.Node) -> bool:
        if node in self.mutated or any(n in self.mutated for n in node.all_input_nodes):
            return False
        if node.op != "call_function" or not _is_activation(node):
            return False
        if node.target in LINEARS:
            return self._is_linear(node)
        if node.target in _ACTS:
            return self._is_given(node.args[0])
        if node.target in _SUMS or node.target in _PRODUCTS:
            return not node.kwargs and self._is_pair(node)
        return False

    def _is_linear(self, node: fx.Node) -> bool:
        x, *rest = (*node.args, *node.kwargs.values())
        weights = [w for w in rest if w is not None]
        return self._is_given(x) and all(w in self.weights for w in weights)

    def _is_pair(self, node: fx.Node) -> bool:
        a, b = node.args[:2]
        if isinstance(b, (int, float)):
            return node.target in _PRODUCTS and self._is_given(a)
        return self._is_given(a) and self._is_given(b) and shape_of(a) == shape_of(b)

    def _is_given(self, node: object) -> bool:
        return isinstance(node, fx.Node) and node not in self.weights and _is_activation(node)


def _is_activation(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    if not isinstance(value, Tensor) or value.ndim < 2 or value.device.type != "cpu":
        return False
    return value.dtype in _DTYPES and isinstance(value.shape[-1], int)


def shape_of(node: Any) -> tuple[str, ...]:
    return tuple(map(str, node.meta["example_value"].shape))


def mutated_values(graph: fx.GraphModule) -> set[fx.Node]:
    """Values that are written to in place, and what may share their memory.

    Regions keep clear of them: running a region later than its nodes stood must change nothing.
    """
    found: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if _is_in_place(node):
            found.add(node)
            for target in [*node.all_input_nodes[:1], node.kwargs.get("out")]:
                found.update(_origin(target) if isinstance(target, fx.Node) else ())
    for node in graph.graph.nodes:  # views of them, in order
        first = next(iter(node.args), None) if node.op.startswith("call_") else None
        if first in found and node.target not in LINEARS | _ACTS | _SUMS | _PRODUCTS:
            found.add(node)
    return found


def _is_in_place(node: fx.Node) -> bool:
    if node.op not in ("call_method", "call_function"):
        return False
    if node.target in _AUGMENTED or node.kwargs.get("inplace") or "out" in node.kwargs:
        return True
    if node.target in _ACTS:
        return True in node.args[1:]  # inplace, by position
    name = str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))
    return name.endswith("_") and not name.endswith("__")


_AUGMENTED = frozenset(
    getattr(operator, f"i{name}")
    for name in ("add", "sub", "mul", "truediv", "floordiv", "pow", "mod", "and", "or", "xor")
) | {operator.setitem}


def _origin(node: fx.Node) -> list[fx.Node]:
    """The node, and what it is a view of: the first argument of everything that is no new value."""
    chain = [node]
    while chain[-1].op.startswith("call_") and chain[-1].target not in LINEARS | _ACTS:
        first = next(iter(chain[-1].args), None)
        if not isinstance(first, fx.Node):
            break
        chain.append(first)
    return chain


__all__ = ["LINEARS", "TokenWise", "mutated_values", "shape_of"]
