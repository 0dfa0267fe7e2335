"""Where each class of weights lies, and where each phase computes with it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ktgraph.ir.graph import Module
from ktgraph.placement.graph import EXPERTS
from ktgraph.placement.lanes import CROSSING, op_device
from ktgraph.runtime.flat import FlatOp
from ktgraph.runtime.operands import WeightUse
from ktgraph.runtime.packed import use_nbytes
from ktgraph.runtime.plan import PhasePlan, Plan
from ktgraph.weights.encodings import Tile

ROUTED = "routed experts"
_ORDER = (
    ROUTED, "shared experts", "dense MLP", "attention", "router", "embedding", "output head",
    "norms and tables",
)  # fmt: skip


@dataclass(frozen=True)
class Holding:
    """Weights of one class that lie on one device and are computed with in the same places.

    runs: for each phase, devices in words: "cpu", "streamed to cuda:0".
    """

    what: str
    layers: tuple[int, ...]  # ascending; empty outside layers
    device: str
    nbytes: int
    encodings: tuple[str, ...]
    runs: tuple[tuple[str, str], ...]

    @property
    def span(self) -> str:
        """Layers as ``0, 4..59``, or ``-``."""
        return spans(self.layers)


@dataclass
class _Weight:
    what: str
    nbytes: int
    encoding: str
    layer: int | None
    device: str
    runs: dict[str, str] = field(default_factory=dict[str, str])


def holdings(plan: Plan) -> list[Holding]:
    """Every class of weights of a plan, largest classes of the model's body first."""
    held = {u.key for u in plan.held()}
    found: dict[str, _Weight] = {}
    for phase in plan.phases:
        for step, use, where in _uses(plan, phase):
            weight = found.setdefault(use.key, _weight(plan.module, step, use, held))
            weight.runs[phase.name] = where
    groups: dict[tuple[str, str, tuple[tuple[str, str], ...]], list[_Weight]] = {}
    for weight in found.values():
        key = (weight.what, weight.device, tuple(weight.runs.items()))
        if key[0] != ROUTED:  # what differs between phases matters for experts alone
            key = (weight.what, weight.device, ())
        groups.setdefault(key, []).append(weight)
    rows = [_holding(*key, members) for key, members in groups.items()]
    return sorted(rows, key=lambda r: (_ORDER.index(r.what), r.device == "cpu", r.layers))


def _uses(plan: Plan, phase: PhasePlan) -> Iterator[tuple[FlatOp, WeightUse, str]]:
    """Every weight that a phase reads, by which op, and where that runs."""
    for item in phase.instructions:
        step = phase.step(item)
        device = op_device(plan.module, step.op)
        where = f"streamed to {device}" if step.op.name in CROSSING else device
        for operand in item.operands:
            if isinstance(operand, WeightUse):
                yield step, operand, where


def _weight(module: Module, step: FlatOp, use: WeightUse, held: set[str]) -> _Weight:
    nbytes = use_nbytes(use) if use.key in held else 0  # views of others take nothing
    tile = Tile.of(use.type.encoding)
    encoding = str(use.type.encoding or use.type.dtype)
    if tile is not None:
        encoding = f"{tile.format}(group={tile.group})" if tile.group else tile.format
    return _Weight(_class(module, step, use), nbytes, encoding, _layer(use), use.device)


def _layer(use: WeightUse) -> int | None:
    """Of a member of a family, or of a weight that stands alone as ``layers[0].q_proj``."""
    alone = re.search(r"\[(\d+)\]", use.ref.name)
    return int(alone[1]) if use.index is None and alone is not None else use.index


def _class(module: Module, step: FlatOp, use: WeightUse) -> str:
    """By op, then by the path of the module that the op came from."""
    op = step.op
    name = f"{op.loc or ''} {use.ref.name}".lower()
    if op.name in EXPERTS or op.name in CROSSING:
        return ROUTED
    if op.name == "moe.route":
        return "router"
    if op.name == "nn.embedding":
        return "embedding"
    if use.type.rank < 2:
        return "norms and tables"
    if op.name == "nn.linear" and _layer(use) is None:
        return "output head"
    if "shared" in name:
        return "shared experts"
    is_mlp = any(word in name for word in ("mlp", "ffn", "feed_forward"))
    return "dense MLP" if is_mlp or op.name == "nn.swiglu" else "attention"


def _holding(
    what: str, device: str, runs: tuple[tuple[str, str], ...], members: Sequence[_Weight]
) -> Holding:
    layers = sorted({w.layer for w in members if w.layer is not None})
    sizes: dict[str, int] = {}
    for weight in members:
        sizes[weight.encoding] = sizes.get(weight.encoding, 0) + weight.nbytes
    encodings = sorted(sizes, key=lambda e: -sizes[e])
    return Holding(
        what, tuple(layers), device, sum(sizes.values()), tuple(encodings), runs
    )  # fmt: skip


def spans(numbers: Sequence[int]) -> str:
    """Ascending numbers as ``0, 4..59``; ``-`` for none."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    shown = [str(p[0]) if len(p) == 1 else f"{p[0]}..{p[-1]}" for p in parts]
    return ", ".join(shown) or "-"


__all__ = ["ROUTED", "Holding", "holdings", "spans"]
