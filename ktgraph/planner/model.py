"""The model of a plan: its graph, and what people call its size."""

from __future__ import annotations

from dataclasses import dataclass

from ktgraph.ir.graph import Module
from ktgraph.ir.types import StateType
from ktgraph.stages import Traced


@dataclass(frozen=True)
class ModelSize:
    """What a traced model holds.  `chosen` of `experts` work for a token; 0 of 0: it has none."""

    name: str
    weights: int  # numbers, not bytes
    layers: int
    experts: int
    chosen: int

    @staticmethod
    def of(traced: Traced) -> ModelSize:
        module = traced.ir
        read = {ref.name for op in module.walk() for ref in op.weights}
        count = sum(_count(module, name) for name in read)
        dims = module.dims
        return ModelSize(
            traced.given.card.name, count, _layers(module), dims.get("E", 0), dims.get("K", 0)
        )

    def __str__(self) -> str:
        many, unit = (1e9, "billion") if self.weights >= 1e9 else (1e6, "million")
        text = f"{self.name}: {self.weights / many:.4g} {unit} weights, {self.layers} layers"
        return f"{text}, {self.chosen} of {self.experts} experts a token" if self.experts else text


def _count(module: Module, name: str) -> int:
    weight = module.weights[name]
    count = weight.members
    for dim in weight.type.dims:
        count *= dim.at(module.dims)
    return count


def _layers(module: Module) -> int:
    """Those that the cache has rows for."""
    values = [a.type for f in module.functions.values() for a in f.args]
    return max((t.layers.const() for t in values if isinstance(t, StateType)), default=0)


__all__ = ["ModelSize"]
