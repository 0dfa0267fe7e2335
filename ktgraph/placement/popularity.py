"""Popularity: how often each router chose each of its experts, and the file that keeps it.

`ktgraph profile MODEL prompts.txt -o popularity.json` and `Compiled.popularity` count; the compile
option `popularity` lets `place` give the hottest experts of each layer slots on the GPU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ktgraph.errors import UnsupportedInputError
from ktgraph.ir.graph import Module, Op, WeightRef

_FORMAT = "ktgraph.popularity 1"
SAME_EXPERTS = ("identity", "quantize", "pack", "dequantize")  # recipes that keep a stack's experts


class PopularityError(UnsupportedInputError):
    """A popularity file that cannot be read, or that was made with another model."""


@dataclass(frozen=True)
class Popularity:
    """`counts[router][e]`: how often expert e was chosen, by router as the IR names its gate."""

    model: str
    tokens: int
    counts: Mapping[str, Sequence[int]]
    path: str = "the profile"

    def save(self, path: str | Path) -> None:
        """Write the file; raises OSError."""
        head = {"format": _FORMAT, "model": self.model, "tokens": self.tokens}
        lines = [f"{json.dumps(k)}: {json.dumps(v)}," for k, v in head.items()]
        rows = [f" {json.dumps(k)}: {json.dumps(list(v))}" for k, v in self.counts.items()]
        text = "\n".join(["{", *lines, '"counts": {', ",\n".join(rows), "}}"])
        Path(path).write_text(text + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Popularity:
        """Read a file; raises PopularityError."""
        given: Any = None
        try:
            given = json.loads(Path(path).read_text(encoding="utf-8"))
            fault = _fault(given)
        except OSError as error:
            fault = error.strerror or str(error)
        except ValueError as error:  # no text, or no JSON
            fault = f"it is no popularity profile ({error})"
        if fault:
            raise PopularityError(
                f"popularity file {path}: {fault}; `ktgraph profile MODEL prompts.txt -o FILE` "
                "makes one"
            )
        return Popularity(given["model"], given["tokens"], given["counts"], str(path))

    def hottest(self, router: str, experts: int, count: int) -> list[int]:
        """The experts that a router of `experts` chose most, lower numbers first among equals."""
        counts = self.of(router, experts)
        return sorted(range(experts), key=lambda e: (-counts[e], e))[:count]

    def share(self, router: str, experts: int, hot: Sequence[int]) -> float:
        """Share of a router's choices that some experts got; their number's where it chose none."""
        counts = self.of(router, experts)
        total = sum(counts)
        return sum(counts[e] for e in hot) / total if total else len(hot) / experts

    def of(self, router: str, experts: int) -> Sequence[int]:
        """A router's counts; raises PopularityError where the profile has none that fit."""
        found = self.counts.get(router)
        if found is not None and len(found) == experts:
            return found
        has = f"{len(found)} experts there" if found is not None else "no such router"
        raise PopularityError(
            f"{self.path} was made with another model ({self.model}): @{router} chooses among "
            f"{experts} experts here, and the profile has {has}; `ktgraph profile MODEL "
            "prompts.txt -o FILE` makes one for this model"
        )


def _fault(given: Any) -> str:
    """What is wrong with a file's content; an empty string when nothing is."""
    if not isinstance(given, dict):
        return "it is no popularity profile"
    held = cast("dict[str, Any]", given)
    if held.get("format") != _FORMAT:
        return f"its format is {held.get('format')!r}, expected {_FORMAT!r}"
    if not isinstance(held.get("model"), str) or not isinstance(held.get("tokens"), int):
        return "model or tokens is missing"
    counts = held.get("counts")
    if not isinstance(counts, dict):
        return "counts is missing"
    for router, numbers in cast("dict[str, Any]", counts).items():
        fits = isinstance(numbers, list) and all(
            type(n) is int and n >= 0 for n in cast("list[Any]", numbers)
        )
        if not fits:
            return f"the counts of {router} are no list of whole numbers"
    return ""


def router_name(module: Module, route: Op, bindings: Mapping[str, int]) -> str:
    """The gate of a `moe.route`, as it is named before `place` made twins: layers[3].mlp.gate."""
    ref = route.weight(1)
    index = None if ref.index is None else ref.index.at(bindings)
    return weight_name(*original(module, ref, index))


def original(
    module: Module, ref: WeightRef, index: int | None, kinds: Sequence[str] = ("identity",)
) -> tuple[WeightRef, int | None]:
    """What a weight is, below recipes of the kinds given; index None: of a family as a whole."""
    weight = module.weights[ref.name]
    while weight.recipe is not None and weight.recipe.kind in kinds:
        ref = weight.recipe.args[0]
        if ref.index is not None and (index is not None or not weight.is_family):
            index = ref.index.at({} if index is None else {weight.var: index})
        weight = module.weights[ref.name]
    return WeightRef(ref.name), index if weight.is_family else None


def weight_name(ref: WeightRef, index: int | None) -> str:
    """``layers[3].mlp.gate``"""
    return ref.name if index is None else ref.name.replace("[]", f"[{index}]", 1)


__all__ = [
    "SAME_EXPERTS",
    "Popularity",
    "PopularityError",
    "original",
    "router_name",
    "weight_name",
]
