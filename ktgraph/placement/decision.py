"""What `place` was asked for, and what it decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ktgraph.cost import Call
from ktgraph.ir.types import Encoding
from ktgraph.pass_api import CompileOptions
from ktgraph.placement.graph import Assign, Machine, Region, Shares, Site
from ktgraph.placement.hot import HotLayer
from ktgraph.placement.partition import Cell, Config, Pricer
from ktgraph.placement.popularity import Popularity
from ktgraph.placement.rules import Rule


@dataclass(frozen=True)
class Settings:
    """What place was asked for; sizes of the calls that are priced."""

    options: CompileOptions
    gpu_memory: int | None = None
    rules: tuple[Rule, ...] = ()
    context: int = 4096
    batch: int = 1
    popularity: Popularity | None = None


@dataclass(frozen=True)
class Term:
    """Bytes on a device; `kind` is weights, kv, activations, workspace or pinned."""

    device: str
    kind: str
    name: str
    nbytes: float


@dataclass(frozen=True)
class Run:
    """Consecutive layers of a region with one assignment.

    slots, shares: of sites with hot experts, how many, and their share of choices; of streamed
    sites their share of bytes.
    """

    layers: tuple[int | None, ...]
    cell: Cell
    config: Config
    assign: Assign
    seconds: float
    slots: Mapping[int, int] = field(default_factory=dict[int, int])
    shares: Shares = field(default_factory=dict[int, float])


@dataclass
class Decision:
    """The outcome; `rules` gives the rule that held for (region, site, layer)."""

    machine: Machine
    settings: Settings
    calls: dict[str, Call]
    weights_of_calls: dict[str, float]
    encodings: dict[str, Encoding]
    regions: list[Region]
    runs: dict[int, list[Run]]
    state: str
    streams: bool
    cache_rows: int
    terms: list[Term]
    room: float  # bytes at home for matrices
    pricer: Pricer
    rules: dict[tuple[int, int, int | None], Rule] = field(
        default_factory=dict[tuple[int, int, "int | None"], Rule]
    )
    hot: dict[str, HotLayer] = field(default_factory=dict[str, HotLayer])  # by stack of experts

    def seconds(self, func: str) -> float:
        """Predicted seconds of one call of a function."""
        return sum(
            run.seconds * len(run.layers)
            for region in self.regions
            if region.func.name == func
            for run in self.runs[region.number]
        )

    @property
    def request_seconds(self) -> float:
        """Predicted seconds of a typical request."""
        return sum(n * self.seconds(name) for name, n in self.weights_of_calls.items())

    def device(self, region: Region, run: Run, site: Site) -> str:
        """The device of a site that computes, or STREAM."""
        if site.has_state:
            return self.state
        return run.assign.get(site.number, self.machine.home)

    def used(self, device: str) -> float:
        return sum(t.nbytes for t in self.terms if t.device == device)


__all__ = ["Decision", "Run", "Settings", "Term"]
