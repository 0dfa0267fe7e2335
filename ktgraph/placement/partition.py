"""Who holds which matrices: units of weights on the home device or on the host, under its memory.

A *unit* is the ops of one layer, of all phases, that read the same matrices.  Layers with the same
ops are interchangeable, so what is searched is how many layers of a repeat keep which units.
Everything begins at home; units leave in order of least time lost per byte until the rest fits, and
single moves and exchanges then improve the result (`tests/passes/test_place.py` compares it with
every possible choice on small modules).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ktgraph.placement.graph import (
    CPU,
    STREAM,
    Assign,
    Machine,
    Region,
    Shares,
    Site,
    is_light,
    region_tasks,
)

Key = tuple[int, int]  # region number, site number
Config = frozenset[int]  # numbers of the units that lie on the host
Fixed = Mapping[tuple[int, int, int | None], str]  # region, site, layer -> the device of a rule

_LARGE = 150  # sites of a region from which on units leave in the order of the first round
_ROUNDS = 400  # of improvement, at most
_LEAST = 1e-9  # seconds that count as a gain
_SMALL = 2e-3  # share of the room under which a unit leaves only when nothing else fits


class NothingFitsError(ValueError):
    """Even with every unit on the host the home device holds too little."""


@dataclass(frozen=True)
class Unit:
    """Ops that read the same matrices at one layer; `nbytes` of one layer."""

    number: int
    sites: frozenset[Key]
    nbytes: float
    names: tuple[str, ...]


@dataclass
class Cell:
    """Layers with the same regions and the same rules; `pinned` follow the state or a rule."""

    number: int
    regions: list[Region]
    layers: list[int | None]
    fixed: dict[Key, str] = field(default_factory=dict[Key, str])
    units: list[Unit] = field(default_factory=list[Unit])
    pinned_bytes: dict[str, float] = field(default_factory=dict[str, float])  # by device or "state"

    @property
    def is_large(self) -> bool:
        return any(len(r.sites) > _LARGE for r in self.regions)


@dataclass(frozen=True)
class Budget:
    """Bytes for weights at home once caches, activations and workspace are taken off."""

    room: float  # with the state at home
    state_bytes: float
    stream_bytes: float  # the buffer of one streamed layer


@dataclass
class Solution:
    """A choice; `configs` gives for each cell the layers of each configuration."""

    state: str
    streams: bool
    configs: dict[int, dict[Config, list[int | None]]]
    seconds: float  # of the weighted calls
    home_bytes: float  # matrices at home


# -- cells and units -------------------------------------------------------------------------------
def make_cells(regions: Sequence[Region], fixed: Fixed, state_site: str = "state") -> list[Cell]:
    """Group layers that are alike, and the ops of each that read the same matrices."""
    groups: dict[object, list[int | None]] = {}
    members: dict[object, list[Region]] = {}
    for layer in sorted({x for r in regions for x in r.layers}, key=lambda x: (x is not None, x)):
        inside = [r for r in regions if layer in r.layers]
        rules = tuple(
            (r.number, s.number, fixed[r.number, s.number, layer])
            for r in inside
            for s in r.sites
            if (r.number, s.number, layer) in fixed
        )
        key = (tuple(r.number for r in inside), rules)
        groups.setdefault(key, []).append(layer)
        members[key] = inside
    cells: list[Cell] = []
    for key, layers in groups.items():
        cell = Cell(len(cells), members[key], layers)
        layer = layers[0]
        for region in cell.regions:
            for site in region.sites:
                if (region.number, site.number, layer) in fixed:
                    cell.fixed[region.number, site.number] = fixed[
                        region.number, site.number, layer
                    ]
        _find_units(cell, state_site)
        cells.append(cell)
    return cells


def _find_units(cell: Cell, state_site: str) -> None:
    """Ops joined by a matrix that they share; those with the state, or a rule, are pinned."""
    parent: dict[Key, Key] = {}
    owner: dict[str, Key] = {}
    heavy: dict[Key, Site] = {}
    counted: set[tuple[str, str]] = set()
    for region in cell.regions:
        for site in region.sites:
            key = (region.number, site.number)
            if not site.is_heavy or site.is_barrier:
                continue
            device = cell.fixed.get(key)
            if device is not None:
                _pin(cell, site, device, counted)
                continue
            heavy[key], parent[key] = site, key
            for ref, _ in site.heavy_weights:
                other = owner.setdefault(str(ref), key)
                parent[_root(parent, other)] = _root(parent, key)
    joined: dict[Key, list[Key]] = {}
    for key in heavy:
        joined.setdefault(_root(parent, key), []).append(key)
    for keys in joined.values():
        if any(heavy[k].has_state for k in keys):
            for key in keys:
                cell.fixed[key] = state_site
                _pin(cell, heavy[key], state_site, counted)
            continue
        weights = {str(r): (r.name, n) for k in keys for r, n in heavy[k].heavy_weights}
        names = tuple(sorted({name for name, _ in weights.values()}))
        size = sum(n for _, n in weights.values())
        cell.units.append(Unit(len(cell.units), frozenset(keys), size, names))


def _pin(cell: Cell, site: Site, device: str, counted: set[tuple[str, str]]) -> None:
    for ref, nbytes in site.heavy_weights:
        if (str(ref), device) not in counted:
            counted.add((str(ref), device))
            cell.pinned_bytes[device] = cell.pinned_bytes.get(device, 0.0) + nbytes


def _root(parent: dict[Key, Key], key: Key) -> Key:
    while parent[key] != key:
        parent[key] = parent[parent[key]]
        key = parent[key]
    return key


# -- pricing ---------------------------------------------------------------------------------------
class Pricer:
    """Seconds of a region's execution for a configuration, with the best form of its free ops."""

    def __init__(self, machine: Machine, state: str, streams: bool) -> None:
        self.machine = machine
        self.state = state
        self.streams = streams
        self._kept: dict[tuple[int, int, Config], tuple[Assign, float]] = {}

    def best(self, cell: Cell, region: Region, config: Config) -> tuple[Assign, float]:
        """The assignment of every site of a region, and its makespan."""
        key = (cell.number, region.number, config)
        if key not in self._kept:
            self._kept[key] = self._best(cell, region, config)
        return self._kept[key]

    def makespan(self, region: Region, assign: Assign, shares: Shares | None = None) -> float:
        return region_tasks(region, self.machine, assign, self.state, shares).makespan

    def _best(self, cell: Cell, region: Region, config: Config) -> tuple[Assign, float]:
        base = self.heavy(cell, region, config)
        tries = [base]
        experts = [n for n, d in base.items() if d == CPU and region.sites[n].is_experts]
        experts = [n for n in experts if (region.number, n) not in cell.fixed]
        experts = [n for n in experts if region.sites[n].can_stream]
        if self.streams and self.machine.is_hybrid and experts:
            tries.append({**base, **dict.fromkeys(experts, STREAM)})
        found = [self._with_light(cell, region, t) for t in tries]
        return min(found, key=lambda f: f[1])

    def heavy(self, cell: Cell, region: Region, config: Config) -> dict[int, str]:
        """Devices of the ops that a unit, the state or a rule decides."""
        assign: dict[int, str] = {}
        for (number, site), device in cell.fixed.items():
            if number == region.number:
                assign[site] = self.state if device == "state" else device
        for unit in cell.units:
            device = CPU if unit.number in config else self.machine.home
            for number, site in unit.sites:
                if number == region.number:
                    assign[site] = device
        return assign

    def _with_light(
        self, cell: Cell, region: Region, heavy: dict[int, str]
    ) -> tuple[Assign, float]:
        """Ops without matrices begin at home, then move one by one while that helps."""
        free = [
            s.number
            for s in region.sites
            if is_light(s) and not s.is_view and s.number not in heavy
        ]
        assign = {**dict.fromkeys(free, self.machine.home), **heavy}
        time = self.makespan(region, assign)
        on_host = CPU in assign.values() or (self.state == CPU and self.machine.home != CPU)
        if not (self.machine.is_hybrid and on_host) or cell.is_large:
            return assign, time
        gathered = self._gathered(region, assign, free)
        if gathered != assign:
            other = self.makespan(region, gathered)
            assign, time = min([(assign, time), (gathered, other)], key=lambda a: a[1])
        for number in free:
            there = CPU if assign[number] != CPU else self.machine.home
            trial = {**assign, number: there}
            other = self.makespan(region, trial)
            if other < time - _LEAST:
                assign, time = trial, other
        return assign, time

    def _gathered(self, region: Region, assign: Assign, free: Sequence[int]) -> dict[int, str]:
        """Free ops whose inputs all come from the host, or are all read there, go to the host."""
        out = dict(assign)
        for number in [*free, *reversed(free)]:
            site = region.sites[number]
            before = self._devices(region, out, [v.producer for v in site.op.values])
            users = [u for r in site.op.results for u in r.users]
            after = self._devices(region, out, users)
            if before == {CPU} or after == {CPU}:
                out[number] = CPU
        return out

    def _devices(self, region: Region, assign: Assign, ops: Sequence[object]) -> set[str]:
        places = {id(s.op): s for s in region.sites}
        found: set[str] = set()
        for op in ops:
            site = places.get(id(op))
            if site is None:
                found.add(self.machine.home)
            elif site.has_state:
                found.add(self.state)
            elif not site.is_view:
                found.add(assign.get(site.number, self.machine.home))
        return found


# -- search ----------------------------------------------------------------------------------------
class Search:
    """Finds a configuration for every layer under a budget."""

    def __init__(
        self,
        cells: Sequence[Cell],
        pricer: Pricer,
        calls: Mapping[str, float],
        room: float,
        *,
        least: float = 0.0,
    ) -> None:
        self.cells = cells
        self.least = least  # share of the room under which a unit stays at home
        self.pricer = pricer
        self.calls = calls  # how often each function runs in the weighted sum
        self.room = room - self._pinned_at_home()
        self.configs: dict[int, dict[Config, list[int | None]]] = {
            c.number: {frozenset(): list(c.layers)} for c in cells
        }
        self._first: dict[tuple[int, int], float] = {}

    def _pinned_at_home(self) -> float:
        home = self.pricer.machine.home
        names = [home, "state"] if self.pricer.state == home else [home]
        return sum(
            c.pinned_bytes.get(name, 0.0) * len(c.layers) for c in self.cells for name in names
        )

    def run(self) -> Solution:
        """Raises NothingFitsError when the budget is too small for what must be at home."""
        if self.pricer.machine.is_hybrid:
            self._evict()
            self._improve()
        elif self.used() > self.room:
            raise NothingFitsError
        used = self.used()
        return Solution(
            self.pricer.state, self.pricer.streams, self.configs, self.seconds(), used
        )  # fmt: skip

    def time(self, cell: Cell, config: Config) -> float:
        """Weighted seconds of one layer."""
        return sum(
            self.calls[r.func.name] * self.pricer.best(cell, r, config)[1] for r in cell.regions
        )

    def seconds(self) -> float:
        return sum(
            self.time(self.cells[n], config) * len(layers)
            for n, held in self.configs.items()
            for config, layers in held.items()
        )

    def used(self) -> float:
        """Bytes of matrices at home that are not pinned there."""
        return sum(
            u.nbytes * len(layers)
            for n, held in self.configs.items()
            for config, layers in held.items()
            for u in self.cells[n].units
            if u.number not in config
        )

    def _moves(self) -> Iterator[tuple[Cell, Config, Config, float]]:
        """Ways for a layer to give up a unit, or all it still has: bytes that become free."""
        for cell in self.cells:
            for config in list(self.configs[cell.number]):
                left = [u for u in self._mobile(cell) if u.number not in config]
                for unit in left:
                    yield cell, config, config | {unit.number}, unit.nbytes
                if len(left) > 1 and not cell.is_large:
                    every = config | {u.number for u in left}
                    yield cell, config, every, sum(u.nbytes for u in left)

    def _mobile(self, cell: Cell) -> list[Unit]:
        """Units that are worth moving: routers, for one, free too little for what they cost."""
        least = max(self.least * self.room, 1.0)
        return [u for u in cell.units if u.nbytes * len(cell.layers) >= least]

    def _loss(self, cell: Cell, config: Config, to: Config) -> float:
        if not cell.is_large:
            return self.time(cell, to) - self.time(cell, config)
        (unit,) = to - config
        key = (cell.number, unit)
        if key not in self._first:
            self._first[key] = self.time(cell, to) - self.time(cell, config)
        return self._first[key]

    def _evict(self, kept: frozenset[tuple[int, int]] = frozenset()) -> None:
        """Let units leave until the rest fits; `kept` are (cell, unit) that must not."""
        while (excess := self.used() - self.room) > 0:
            moves = [
                (self._loss(cell, config, to) / min(size, excess), n, cell, config, to, size)
                for n, (cell, config, to, size) in enumerate(self._moves())
                if not any((cell.number, unit) in kept for unit in to - config)
            ]
            if not moves:
                raise NothingFitsError
            _, _, cell, config, to, size = min(moves, key=lambda m: m[:2])
            layers = self.configs[cell.number][config]
            self._shift(cell, config, to, min(len(layers), -int(-excess // size)))

    def _shift(self, cell: Cell, config: Config, to: Config, count: int) -> None:
        """Give the last `count` layers of a configuration another one."""
        held = self.configs[cell.number]
        layers = held[config]
        held.setdefault(to, []).extend(layers[len(layers) - count :])
        held[config] = layers[: len(layers) - count]
        if not held[config]:
            del held[config]

    def _improve(self) -> None:
        """One move or exchange at a time, the one that gains most, until none gains."""
        if any(c.is_large for c in self.cells):
            return
        for _ in range(_ROUNDS):
            best = self._best_step(self.room - self.used())
            if best is None and not self._exchange():
                return
            for cell, config, to in best or ():
                self._shift(cell, config, to, 1)

    def _exchange(self) -> bool:
        """Bring one unit home and let others leave for it; whether that gained."""
        now, best = self.seconds(), None
        least, before = now - _LEAST, self.configs
        for cell, config, to, size in list(self._changes()):
            if size <= 0 or not to < config:
                continue
            self.configs = {n: {c: list(x) for c, x in held.items()} for n, held in before.items()}
            self._shift(cell, config, to, 1)
            try:
                self._evict(frozenset((cell.number, unit) for unit in config - to))
            except NothingFitsError:
                continue
            if self.seconds() < least:
                least, best = self.seconds(), self.configs
        self.configs = best or before
        return best is not None

    def _best_step(self, spare: float) -> list[tuple[Cell, Config, Config]] | None:
        changes = [
            (self.time(cell, to) - self.time(cell, config), size, cell, config, to)
            for cell, config, to, size in self._changes()
        ]
        best, gain = None, -_LEAST
        for loss, size, cell, config, to in changes:
            if size <= spare and loss < gain:
                best, gain = [(cell, config, to)], loss
        giving = [c for c in changes if c[1] < 0]
        for first in (c for c in changes if c[1] > 0 and c[0] < 0):
            for second in giving:
                fits = first[1] + second[1] <= spare
                if not fits or first[0] + second[0] >= gain or not self._both(first, second):
                    continue
                best = [(c[2], c[3], c[4]) for c in (first, second)]
                gain = first[0] + second[0]
        return best

    def _both(
        self,
        first: tuple[float, float, Cell, Config, Config],
        second: tuple[float, float, Cell, Config, Config],
    ) -> bool:
        """Whether there are layers for both, or one layer on which the two become one change."""
        if first[2] is not second[2] or first[3] != second[3]:
            return True
        return len(self.configs[first[2].number][first[3]]) > 1

    def _changes(self) -> Iterator[tuple[Cell, Config, Config, float]]:
        """Changes of one layer and the bytes that they take at home (negative: that they free)."""
        for cell, config, to, size in self._moves():
            yield cell, config, to, -size
        for cell in self.cells:
            sizes = {u.number: u.nbytes for u in cell.units}
            for config in list(self.configs[cell.number]):
                for number in sorted(config):
                    yield cell, config, config - {number}, sizes[number]
                for number in sorted(config):  # an exchange within one layer
                    for unit in self._mobile(cell):
                        if unit.number not in config:
                            to = (config - {number}) | {unit.number}
                            yield cell, config, to, sizes[number] - unit.nbytes
                if len(config) > 1:
                    yield cell, config, frozenset(), sum(sizes[n] for n in config)


def solve(
    cells: Sequence[Cell],
    machine: Machine,
    calls: Mapping[str, float],
    budget: Budget,
    states: Sequence[str],
) -> tuple[Solution, Pricer]:
    """The fastest of: cache at home or on the host, experts streamed or never.

    Raises NothingFitsError when none fits.
    """
    tries = [(state, streams) for state in states for streams in (False, True)]
    if not machine.is_hybrid:
        tries = [(states[0], False)]
    found: list[tuple[Solution, Pricer]] = []
    for state, streams in tries:
        room = budget.room + (0.0 if state == machine.home else budget.state_bytes)
        room -= budget.stream_bytes if streams else 0.0
        pricer = Pricer(machine, state, streams)
        for least in (_SMALL, 0.0):
            try:
                found.append((Search(cells, pricer, calls, room, least=least).run(), pricer))
                break
            except NothingFitsError:
                continue
    if not found:
        raise NothingFitsError
    return min(found, key=_seconds)


def _seconds(found: tuple[Solution, Pricer]) -> float:
    return found[0].seconds


def layer_order(config: Config) -> tuple[int, list[int]]:
    """Layers that keep most at home come first."""
    return len(config), sorted(config)


def layer_configs(
    cell: Cell, held: Mapping[Config, Sequence[int | None]]
) -> Iterator[tuple[int | None, Config]]:
    """Every layer of a cell with its configuration, in ascending order of layers."""
    layers = iter(cell.layers)
    for config in sorted(held, key=layer_order):
        for _ in held[config]:
            yield next(layers), config


__all__ = [
    "Budget",
    "Cell",
    "NothingFitsError",
    "Pricer",
    "Search",
    "Solution",
    "Unit",
    "layer_configs",
    "make_cells",
    "solve",
]
