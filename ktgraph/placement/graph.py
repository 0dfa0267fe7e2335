"""A function as the placement sees it: blocks of sites (ops with a price on each device).

A `repeat` is one region, priced once and counted by its layers; the rest of a function is another.
Tensors that a repeat carries, arguments and results lie on the home device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from ktgraph.cost import Call, Encodings, OpCost, op_cost, operand_nbytes, type_nbytes
from ktgraph.ir.graph import Block, Function, Module, Op, Value, WeightRef
from ktgraph.ir.types import Encoding, StateType, TensorType
from ktgraph.ops.registry import op_def
from ktgraph.placement.schedule import Task, list_schedule
from ktgraph.runtime.weight_forms import is_cpu, kernel_reads
from ktgraph.runtime.weight_views import VIEWS
from ktgraph.target import Target

CPU = "cpu"
# Seconds that an op on the CPU costs besides its own when no mailbox starts it: the GPU's graph
# ends there, the host waits, and starts the next one (two launches and a wait: docs/placement.md).
HOST_TURN = 100e-6
GPU_WORKSPACE = 1 << 30  # bytes kept free on a GPU for what kernels, graphs and libraries take
EXPERTS = frozenset({"moe.grouped_mlp", "moe.experts"})  # ops over routed experts
STREAM = "stream"  # runs at home, weights lie in host memory and cross the link for each call
HOT = "hot"  # of rules: some experts of a layer in slots at home, the others on the host
STREAM_BUFFERS = 2  # the next layer's copy runs behind this layer's work
ON_HOST = frozenset({"torch.call"})  # ops that only the CPU runs: what they call lives there
Assign = Mapping[int, str]  # site number -> a device, or STREAM
Shares = Mapping[int, float]  # site number -> share of its choices, or bytes, that is hot


@dataclass(frozen=True)
class Machine:
    """The target's two sides: `home` is its GPU where it has one; `host` is the CPU."""

    target: Target
    home: str
    devices: tuple[str, ...]

    @staticmethod
    def of(target: Target) -> Machine:
        names = [d.name for d in target.devices]
        gpus = [g.name for g in target.gpus]
        home = target.home if target.home in gpus or not gpus else gpus[0]
        kept = [n for n in (home, CPU) if n in names]
        return Machine(target, home, tuple(dict.fromkeys(kept)))

    @property
    def is_hybrid(self) -> bool:
        return len(self.devices) == 2

    def transfer(self, src: str, dst: str, nbytes: float) -> float:
        return self.target.link(src, dst).seconds(nbytes)


@dataclass(frozen=True)
class Site:
    """One op of a block.  `weights` are (reference, bytes of one member) as they will be stored."""

    op: Op
    number: int
    cost: OpCost
    seconds: Mapping[str, float]
    weights: tuple[tuple[WeightRef, float], ...]
    is_view: bool
    has_state: bool
    is_barrier: bool  # a repeat: its body is a region of its own
    matrices: frozenset[str] = frozenset()  # its weights of two or more axes, by name
    # bytes on the host of weights that must lie dense on one of both devices (`dequantize`)
    on_host: Mapping[str, float] = field(default_factory=dict[str, float])
    late: float = 0.0  # share of its work that is not waited for, where the host computes it

    @property
    def is_experts(self) -> bool:
        return self.op.name in EXPERTS

    @property
    def is_heavy(self) -> bool:
        """Whether it applies a matrix (or a stack): its weights are what a budget is about."""
        return bool(self.heavy_weights)

    @property
    def heavy_weights(self) -> list[tuple[WeightRef, float]]:
        return [(r, n) for r, n in self.weights if r.name in self.matrices]

    def nbytes_on(self, device: str, ref: WeightRef, at_home: float) -> float:
        """Bytes of one of its weights where it lies."""
        return self.on_host.get(ref.name, at_home) if device == CPU else at_home

    @property
    def can_stream(self) -> bool:
        """Whether its matrices can cross as they lie on the host."""
        return not any(name in self.matrices for name in self.on_host)

    @property
    def streamed_bytes(self) -> float:
        return sum(n for _, n in self.heavy_weights)


@dataclass
class Region:
    """A block with its sites; `layers` are the values of the repeat's index, or (None,)."""

    number: int
    func: Function
    block: Block
    repeat: Op | None
    layers: tuple[int | None, ...]
    call: Call
    sites: list[Site] = field(default_factory=list[Site])
    sizes: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def index(self) -> str:
        return str(self.repeat.attrs["index"]) if self.repeat is not None else ""

    def nbytes(self, value: Value) -> float:
        return type_nbytes(value.type, self.sizes)


def regions_of(
    module: Module,
    machine: Machine,
    calls: Mapping[str, Call],
    encodings: Encodings | None = None,
    by_rule: Mapping[Op, Encoding | str] | None = None,
) -> list[Region]:
    """The regions of every function, each priced at its function's call.

    `encodings`: how weights will be stored, by name; `by_rule` comes first, for single ops ("keep":
    as they are).
    """
    views = frozenset[str]() if machine.home == CPU else views_on_gpu(module)
    prices = _Encodings(module, encodings or {}, by_rule or {}, views)
    found: list[Region] = []
    for func in module.functions.values():
        pending: list[tuple[Block, Op | None]] = [(func.body, None)]
        while pending:
            block, repeat = pending.pop(0)
            region = _region(module, machine, func, block, repeat, calls[func.name], prices)
            region.number = len(found)
            found.append(region)
            pending += [(op.body, op) for op in block.ops if op.body is not None]
    return found


def views_on_gpu(module: Module) -> frozenset[str]:
    """Weights that a GPU reads out of others that it holds: the halves of MLA's kv_b."""
    read = {ref.name for op in module.walk() for ref in op.weights}
    made = [w for w in module.weights.values() if w.recipe is not None and w.recipe.kind in VIEWS]
    return frozenset(w.name for w in made if w.recipe and w.recipe.args[0].name in read)


@dataclass(frozen=True)
class _Encodings:
    module: Module
    by_name: Encodings
    by_op: Mapping[Op, Encoding | str]
    views: frozenset[str]  # weights that take no bytes of their own on the home device

    def of(self, op: Op) -> Encodings:
        """Encodings of an op's weights that will differ from what they are now."""
        said = self.by_op.get(op)
        if said is None:
            return self.by_name
        if isinstance(said, str):
            return {}
        matrices = [r.name for r in op.weights if self.module.weight_of(r).type.rank >= 2]
        return dict.fromkeys(matrices, said)


def _region(
    module: Module,
    machine: Machine,
    func: Function,
    block: Block,
    repeat: Op | None,
    call: Call,
    prices: _Encodings,
) -> Region:
    layers: tuple[int | None, ...] = (None,)
    if repeat is not None:
        layers = tuple(range(repeat.int_attr("lo"), repeat.int_attr("hi") + 1))
    region = Region(0, func, block, repeat, layers, call, sizes=call.bindings(module))
    for number, op in enumerate(block.ops):
        found = prices.of(op)
        region.sites.append(_site(module, machine, region, number, op, found, prices.views))
    return region


def _site(
    module: Module,
    machine: Machine,
    region: Region,
    number: int,
    op: Op,
    encodings: Encodings | None,
    views: frozenset[str],
) -> Site:
    if op.body is not None:
        nothing = OpCost(op, op.name, 1, machine.home, "f32", 0.0, 0.0, 0.0, 0.0, True)
        seconds = dict.fromkeys(machine.devices, 0.0)
        return Site(op, number, nothing, seconds, (), False, False, True)
    repeats = len(region.layers)
    price = partial(op_cost, module, op, region.call, region.sizes, repeats, machine.home)
    here, there = (_as_read(module, op, d, encodings or {}) for d in (machine.home, CPU))
    cost = price(here)
    on_host = cost if here == there else price(there)
    is_view = op_def(op.name).is_view
    seconds = {
        d: 0.0
        if is_view
        else (on_host if d == CPU else cost).seconds(machine.target, d, fallback=True)
        for d in machine.devices
    }
    refs = [o for o in op.operands if isinstance(o, WeightRef)]
    weights = [
        (r, 0.0 if r.name in views else operand_nbytes(module, r, region.sizes, here)) for r in refs
    ]
    stored = {
        r.name: operand_nbytes(module, r, region.sizes, there)
        for r in refs
        if here.get(r.name) != there.get(r.name) and r.name not in views
    }
    matrices = frozenset(r.name for r, _ in weights if module.weight_of(r).type.rank >= 2)
    types = [v.type for v in (*op.values, *op.results)]
    has_state = any(isinstance(t, StateType) for t in types)
    return Site(
        op, number, cost, seconds, tuple(weights), is_view, has_state, False, matrices, stored
    )  # fmt: skip


def _as_read(module: Module, op: Op, device: str, encodings: Encodings) -> dict[str, Encoding]:
    """Encodings of an op's weights on a device: dense where no kernel reads what is stored."""
    found = dict(encodings)
    for position, operand in enumerate(op.operands):
        if not isinstance(operand, WeightRef):
            continue
        type = module.weight_of(operand).type
        stored = encodings.get(operand.name, type.encoding)
        if stored and not kernel_reads(op.name, position, stored, on_cpu=is_cpu(device)):
            found[operand.name] = Encoding(type.dtype)
    return found


def is_light(site: Site) -> bool:
    """Ops without matrices and state: they go where their neighbours make it cheapest."""
    return not (site.is_heavy or site.has_state or site.is_barrier)


# -- tasks of a region under an assignment ---------------------------------------------------------
@dataclass
class RegionTasks:
    """Tasks of one execution of a region, and the task of each site.

    late: seconds that the host works behind the next execution's tasks (expert-deferral).
    """

    tasks: list[Task] = field(default_factory=list[Task])
    of_site: dict[int, int] = field(default_factory=dict[int, int])
    late: float = 0.0

    @property
    def makespan(self) -> float:
        """Seconds of one execution of many: late work delays them only once the host is busy."""
        host = sum(t.seconds for t in self.tasks if t.lane == CPU)
        return max(list_schedule(self.tasks).makespan, host + self.late if self.late else 0.0)


def region_tasks(
    region: Region, machine: Machine, assign: Assign, state: str, shares: Shares | None = None
) -> RegionTasks:
    """Ops as tasks on their device's lane; values that cross, and streamed weights, on a link's.

    Operands of one op that come from the same device cross together; a value crosses once.
    shares: by site, of experts on the host the share of choices whose experts have slots at home,
    of streamed ones the share of bytes.
    """
    return _Builder(region, machine, assign, state, shares or {}).build()


class _Builder:
    def __init__(
        self, region: Region, machine: Machine, assign: Assign, state: str, shares: Shares
    ) -> None:
        self.region = region
        self.machine = machine
        self.assign = assign
        self.state = state
        self.shares = shares
        self.out = RegionTasks()
        self.at: dict[Value, str] = {}  # where a value was made
        self.made: dict[Value, int] = {}  # the task that made it
        self.copies: dict[tuple[Value, str], int] = {}

    def build(self) -> RegionTasks:
        for site in self.region.sites:
            self._site(site)
        ends = [v for v in self.region.block.returns if isinstance(v.type, TensorType)]
        self._bring(ends, self.machine.home)
        return self.out

    def device(self, site: Site) -> str:
        if site.is_barrier:
            return self.machine.home
        if site.has_state:
            return self.state
        if site.is_view:
            return self._where(site.op.values[0]) if site.op.values else self.machine.home
        chosen = self.assign.get(site.number, self.machine.home)
        return self.machine.home if chosen == STREAM else chosen

    def _where(self, value: Value) -> str:
        if isinstance(value.type, StateType):
            return self.state
        return self.at.get(value, self.machine.home)

    def _site(self, site: Site) -> None:
        device = self.device(site)
        values = [v for v in site.op.values if isinstance(v.type, (TensorType, StateType))]
        after = self._bring([v for v in values if isinstance(v.type, TensorType)], device)
        after += [self.made[v] for v in values if v in self.made and self._where(v) == device]
        if self.assign.get(site.number) == STREAM and device != CPU:
            nbytes = site.streamed_bytes * (1.0 - self.shares.get(site.number, 0.0))
            seconds = self.machine.transfer(CPU, device, nbytes)
            after.append(self._add(f"stream {_name(site.op)}", _link(CPU, device), seconds, ()))
        seconds = site.seconds.get(device, 0.0)
        if device == CPU != self.machine.home and not (site.is_experts or site.is_view):
            seconds += HOST_TURN
        share = self.shares.get(site.number, 0.0) if device == CPU else 0.0
        late = site.late if device == CPU else 0.0
        seconds *= 1.0 - share
        self.out.late += seconds * late
        number = self._add(_name(site.op), device, seconds * (1.0 - late), after)
        self.out.of_site[site.number] = number
        for result in site.op.results:
            self.at[result], self.made[result] = device, number
        if share:
            self._hot(site, share)

    def _hot(self, site: Site, share: float) -> None:
        """The hot experts run at home meanwhile; the sum waits for both."""
        home = self.machine.home
        values = [v for v in site.op.values if isinstance(v.type, TensorType)]
        after = self._bring(values, home)
        after += [self.made[v] for v in values if v in self.made and self._where(v) == home]
        hot = self._add(f"hot {_name(site.op)}", home, site.seconds[home] * share, after)
        answers = self._bring(list(site.op.results), home)
        launch = self.machine.target.device(home).launch
        total = self._add(f"sum {_name(site.op)}", home, 2 * launch, [hot, *answers])
        for result in site.op.results:
            self.at[result], self.made[result] = home, total

    def _bring(self, values: Sequence[Value], device: str) -> list[int]:
        """Tasks that bring values made elsewhere to the device; those already there are reused."""
        found: list[int] = []
        wanted: dict[str, list[Value]] = {}
        for value in dict.fromkeys(values):
            src = self._where(value)
            if src == device:
                continue
            if (value, device) in self.copies:
                found.append(self.copies[value, device])
            else:
                wanted.setdefault(src, []).append(value)
        for src, group in wanted.items():
            seconds = self.machine.transfer(src, device, sum(map(self.region.nbytes, group)))
            after = [self.made[v] for v in group if v in self.made]
            name = f"copy {', '.join('%' + v.name for v in group)}"
            number = self._add(name, _link(src, device), seconds, after)
            self.copies.update({(v, device): number for v in group})
            found.append(number)
        return found

    def _add(self, name: str, lane: str, seconds: float, after: Sequence[int]) -> int:
        self.out.tasks.append(Task(name, lane, seconds, tuple(dict.fromkeys(after))))
        return len(self.out.tasks) - 1


def _link(src: str, dst: str) -> str:
    return f"{src} -> {dst}"


def _name(op: Op) -> str:
    return f"%{op.results[0].name}" if op.results else op.name


__all__ = [
    "CPU",
    "EXPERTS",
    "GPU_WORKSPACE",
    "HOST_TURN",
    "HOT",
    "STREAM",
    "STREAM_BUFFERS",
    "Assign",
    "Machine",
    "Region",
    "RegionTasks",
    "Shares",
    "Site",
    "is_light",
    "region_tasks",
    "regions_of",
]
