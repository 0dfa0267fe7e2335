"""Regions of a graph of torch dynamo that compute token by token, each as a function of IR.

A region is made of linears, activations, sums and products of activations; its tensors differ in
the last axis only, so the leading axes are one axis T and a region serves every batch and length.
Everything else stays in the graph and runs eagerly.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor as TorchTensor
from torch import fx, nn
from torch._guards import tracing
from torch.export import Dim
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner, Partition

from ktgraph.frontends.errors import UnsupportedModelError, export_failed
from ktgraph.frontends.fx_token_wise import LINEARS, TokenWise, mutated_values, shape_of
from ktgraph.frontends.hf_build import Twin
from ktgraph.frontends.hf_export import Export, quiet
from ktgraph.frontends.hf_leaves import LeafReport
from ktgraph.frontends.naming import weight_name
from ktgraph.frontends.part_import import PartImporter, add_part
from ktgraph.ir.graph import Module, Weight, WeightRef
from ktgraph.ir.types import TensorType
from ktgraph.ir.verify import verify
from ktgraph.ops.tensor import dtype_name

_TOKENS = (1, 1 << 20)  # sizes of the axis T
_EXAMPLE = 3


@dataclass
class Lifted:
    """A graph whose regions are calls of the modules `region_0`, `region_1`, …

    module: a function of the same name for each.  weights: by the names it reads them under.
    reads: names of the weights of each region.  inputs: of each region, positions in its call of
    the tensors that are no weights.
    eager: operators that stay, by place.  failed: regions that stay as well, and why.
    """

    graph: fx.GraphModule
    module: Module
    weights: dict[str, TorchTensor] = field(default_factory=dict[str, TorchTensor])
    reads: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    inputs: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    eager: dict[str, Counter[str]] = field(default_factory=dict[str, "Counter[str]"])
    failed: dict[str, str] = field(default_factory=dict[str, str])
    compiled: int = 0  # operators that regions hold


def lift_regions(graph: fx.GraphModule, examples: list[Any]) -> Lifted:
    """Fuse the regions of a dynamo graph and trace each; `examples` are its inputs."""
    given = [n for n in graph.graph.nodes if n.op == "placeholder"]
    weights = {n: x for n, x in zip(given, examples, strict=True) if _is_weight(n, x)}
    support = TokenWise(weights, mutated_values(graph))
    partitioner = CapabilityBasedPartitioner(graph, support, allows_single_node_partition=True)
    parts = [part for p in partitioner.propose_partitions() for part in _by_lead(p)]
    fused = partitioner.fuse_partitions(parts, prefix="region_")
    found = Lifted(fused, Module("regions"))
    found.module.syms = {"T": _TOKENS}
    known: dict[str, Export] = {}
    by_name = {n.name: x for n, x in weights.items()}
    for call in [n for n in fused.graph.nodes if n.op == "call_module"]:
        try:
            _lift(found, call, by_name, known)
        except UnsupportedModelError as error:
            found.failed[str(call.target)] = str(error)
    _note_eager(found)
    verify(found.module)
    return found


def _is_weight(node: fx.Node, example: object) -> bool:
    """Parameters and buffers, which dynamo hands in as inputs that never change."""
    described = node.meta.get("tensor_dict") or {}
    return isinstance(example, TorchTensor) and "_dynamo_static_input_type" in described


def _by_lead(part: Partition) -> list[Partition]:
    """A partition cut by leading axes, which its operators keep; only parts with a linear stay."""
    groups: dict[tuple[str, ...], list[fx.Node]] = {}
    for node in part.nodes:
        groups.setdefault(shape_of(node)[:-1], []).append(node)
    kept = [nodes for nodes in groups.values() if any(n.target in LINEARS for n in nodes)]
    return [Partition(nodes=nodes) for nodes in kept]


# ---- tracing a region


def _lift(
    found: Lifted, call: fx.Node, weights: Mapping[str, TorchTensor], known: dict[str, Export]
) -> None:
    name = str(call.target)
    body = cast("fx.GraphModule", found.graph.get_submodule(name))
    inner = [n for n in body.graph.nodes if n.op == "placeholder"]
    pairs = list(zip(inner, cast("list[fx.Node]", list(call.args)), strict=True))
    stored = {n.name: outer for n, outer in pairs if outer.name in weights}
    given = [(n, outer) for n, outer in pairs if outer.name not in weights]
    region = _with_weights(body, {n: weights[o.name] for n, o in stored.items()})
    examples = tuple(_example(outer) for _, outer in given)
    key = f"{region.code}\n{[(x.shape, x.dtype) for x in (*examples, *region.parameters())]}"
    if key not in known:
        known[key] = _export(region, examples)
    values = {f"w{k}": weights[o.name] for k, o in enumerate(stored.values())}
    names = [_source_name(o) for o in stored.values()]
    sources = {w: _unique(n, values[w], found.weights) for w, n in zip(values, names, strict=True)}
    part = RegionImporter(region, known[key], sources, values, name).run()
    add_part(found.module, part, name)
    found.reads[name] = list(sources.values())
    found.compiled += sum(n.op == "call_function" for n in body.graph.nodes)
    found.inputs[name] = [k for k, (_, outer) in enumerate(pairs) if outer.name not in weights]


def _example(node: fx.Node) -> TorchTensor:
    value = node.meta["example_value"]
    return torch.zeros(_EXAMPLE, value.shape[-1], dtype=value.dtype, device="meta")


def _with_weights(body: fx.GraphModule, stored: Mapping[str, TorchTensor]) -> fx.GraphModule:
    """A copy on the meta device that holds its weights, as w0, w1, …"""
    graph = fx.Graph()
    graph.output(graph.graph_copy(body.graph, {}))
    region = fx.GraphModule(nn.Module(), graph)
    for node in [n for n in graph.nodes if n.op == "placeholder" and n.name in stored]:
        name = f"w{list(stored).index(node.name)}"
        empty = torch.empty_like(stored[node.name], device="meta")
        region.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        with graph.inserting_before(node):
            node.replace_all_uses_with(graph.get_attr(name))
        graph.erase_node(node)
    region.recompile()
    return region


def _export(region: fx.GraphModule, examples: tuple[TorchTensor, ...]) -> Export:
    tokens = Dim("T", min=_TOKENS[0], max=_TOKENS[1])
    # an export inside dynamo's own compile: its guards are not those of the graph around it
    with quiet(), torch.no_grad(), tracing(None):
        try:
            program = torch.export.export(
                region, examples, dynamic_shapes=[{0: tokens} for _ in examples], strict=False
            )
        except Exception as error:
            raise export_failed(error, region) from error
    return Export(program, LeafReport())


def _source_name(node: fx.Node) -> str:
    """``model.layers.0.mlp.up_proj.weight`` of the place where dynamo found the tensor."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    name: Any = getattr(source, "name", "")
    parts = re.findall(r"\['([^']+)'\]", str(name() if callable(name) else name))
    return ".".join(parts[1:]) or node.name


def _unique(name: str, tensor: TorchTensor, taken: dict[str, TorchTensor]) -> str:
    """The name, with a number where another tensor has it: parts of two models in one graph."""
    number, found = 0, name
    while taken.setdefault(found, tensor) is not tensor:
        number += 1
        found = f"{name}.{number}"
    return found


class RegionImporter(PartImporter):
    """`PartImporter` for a region: tensors [T, …], and weights under the names of the model."""

    def __init__(
        self,
        region: fx.GraphModule,
        export: Export,
        sources: Mapping[str, str],
        values: Mapping[str, TorchTensor],
        name: str,
    ) -> None:
        super().__init__(Twin(cast("Any", region), {}, {}), export, name, {"T": _TOKENS})
        self.sources = sources
        self.values = values

    def _weight(self, fqn: str) -> WeightRef:
        source, value = self.sources[fqn], self.values[fqn]
        name = weight_name(source)
        if name not in self.module.weights:
            type = TensorType.of(dtype_name(value.dtype), *value.shape)
            self.module.add_weight(Weight(name, type, source=source))
        return WeightRef(name)

    def path(self, node: fx.Node) -> str:
        """A region has no module path of its own."""
        return ""


# ---- what stays


def _note_eager(found: Lifted) -> None:
    for node in found.graph.graph.nodes:
        is_ours = str(node.target).startswith("ktgraph.")  # a patched block
        if node.op not in ("call_function", "call_method") or is_ours:
            continue
        if node.target is not operator.getitem:
            place = _place(node)
            found.eager.setdefault(place, Counter())[_operator(node.target)] += 1


def _operator(target: Any) -> str:
    return target if isinstance(target, str) else str(getattr(target, "__name__", target))


def _place(node: fx.Node) -> str:
    """Classes of the modules that an operator stands in, innermost last; layers count as one."""
    stack: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
    classes = [c if isinstance(c, str) else c.__name__ for _, c in stack.values()]
    return classes[-1].rsplit(".", 1)[-1] if classes else "the function itself"


__all__ = ["Lifted", "lift_regions"]
