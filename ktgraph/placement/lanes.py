"""A placed function as tasks on lanes: device streams and the directions of links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ktgraph.cost import Call, OpCost, op_cost, type_nbytes
from ktgraph.ir.graph import Function, Module, Op
from ktgraph.ir.types import BatchType, StateType, TensorType
from ktgraph.ops.registry import op_def
from ktgraph.placement.graph import CPU, EXPERTS, HOST_TURN, STREAM_BUFFERS
from ktgraph.placement.schedule import Schedule, Task, in_order
from ktgraph.runtime.flat import FlatFunction, FlatOp, flatten
from ktgraph.target import Disk, Target

CROSSING = frozenset({"xfer.copy", "xfer.post", "xfer.await"})


def op_device(module: Module, op: Op) -> str:
    """Where an op runs: the device of its results, or the module's home."""
    found = next((r.type.device for r in op.results if not isinstance(r.type, BatchType)), None)
    return found or module.home or CPU


def source_device(module: Module, op: Op) -> str:
    """Where the operands of a copy lie."""
    types = [module.type_of(o) for o in op.operands if o is not None]
    return next((t.device for t in types if t.device), None) or module.home or CPU


def crossing(module: Module, op: Op) -> str:
    """``cpu -> cuda:0`` for an op that crosses a link, else an empty string."""
    src, dst = source_device(module, op), op_device(module, op)
    return f"{src} -> {dst}" if op.name in CROSSING and src != dst else ""


def op_lane(module: Module, op: Op) -> str:
    """A device, or a direction of a link for `xfer.copy`.

    `xfer.post` and `xfer.await` take their turn on the stream of the device at home.
    """
    device = op_device(module, op)
    if op.name == "xfer.copy":
        return crossing(module, op) or device
    return source_device(module, op) if op.name == "xfer.post" else device


def is_stream(op: Op) -> bool:
    """Whether the op copies weights to another device for each call."""
    return op.name == "xfer.copy" and bool(op.weights)


@dataclass(frozen=True)
class DiskTier:
    """Routed experts that RAM does not hold: a share of the host's, read from disk at every use.

    Experts are taken to be chosen evenly, so RAM serves the rest of what is touched.  A read
    follows the router and nothing hides it.
    """

    disk: Disk
    share: float  # of the bytes of routed experts that lie on the host

    def seconds(self, nbytes: float) -> float:
        """Time to read what is on disk of `nbytes` of experts."""
        return self.disk.latency + self.share * nbytes / self.disk.bandwidth


class OpTimes:
    """Costs and seconds of the ops of a module at one call, each op once."""

    def __init__(
        self, module: Module, target: Target, call: Call, tier: DiskTier | None = None
    ) -> None:
        self.module = module
        self.target = target
        self.sizes = call.bindings(module)
        self.call = call
        self.tier = tier
        self._costs: dict[int, OpCost] = {}

    def cost(self, op: Op) -> OpCost:
        if id(op) not in self._costs:
            home = self.module.home or CPU
            self._costs[id(op)] = op_cost(self.module, op, self.call, self.sizes, 1, home)
        return self._costs[id(op)]

    def seconds(self, op: Op) -> float:
        """Predicted seconds on its device; of a copy, on its link."""
        return sum(self.parts(op).values())

    def parts(self, op: Op) -> dict[str, float]:
        """`seconds` by what they go to: memory, compute, launch, link or disk."""
        if op_def(op.name).is_view:
            return {}
        device = op_device(self.module, op)
        if op.name in CROSSING:
            parts = self._crossing(op, device)
        else:
            parts = self.cost(op).parts(self.target, device, fallback=True)
            if self._has_host_turn(op, device):
                parts["launch"] += HOST_TURN
        if self.tier is not None and (read := self.host_experts(op)) > 0:
            parts["disk"] = self.tier.seconds(read)
        return parts

    def _crossing(self, op: Op, device: str) -> dict[str, float]:
        src = source_device(self.module, op)
        size = sum(type_nbytes(r.type, self.sizes) for r in op.results)
        return {} if src == device else {"link": self.target.link(src, device).seconds(size)}

    def _has_host_turn(self, op: Op, device: str) -> bool:
        """Whether the host stops the GPU's graph for it: no mailbox starts it."""
        return device == CPU != (self.module.home or CPU) and op.name not in EXPERTS

    def host_experts(self, op: Op) -> float:
        """Bytes of routed experts in host memory that the op touches."""
        if is_stream(op):
            return sum(type_nbytes(r.type, self.sizes) for r in op.results)
        on_host = op.name in EXPERTS and op_device(self.module, op) == CPU
        return self.cost(op).weights if on_host else 0.0


@dataclass(frozen=True)
class FlatSchedule:
    """The predicted run of a function: `steps[n]` is task n of the schedule."""

    flat: FlatFunction
    times: OpTimes
    schedule: Schedule

    @property
    def steps(self) -> Sequence[FlatOp]:
        return self.flat.ops


def predict(
    module: Module, func: Function, target: Target, call: Call, tier: DiskTier | None = None
) -> FlatSchedule:
    """Every op of every layer in program order, each lane in that order."""
    flat = flatten(module, func)
    times = OpTimes(module, target, call, tier)
    return FlatSchedule(flat, times, in_order(flat_tasks(module, flat, times)))


def flat_tasks(module: Module, flat: FlatFunction, times: OpTimes) -> list[Task]:
    """A task for each op, behind its operands and the earlier readers of a state that it takes.

    Streamed weights have STREAM_BUFFERS buffers: a layer's cross once an earlier layer's are
    done with.
    """
    made: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    streamed: list[tuple[set[str], list[int]]] = []  # values of each copy, and their readers
    tasks: list[Task] = []
    for number, step in enumerate(flat.ops):
        after = [made[s.name] for s in step.slots if s.name in made]
        if is_stream(step.op):
            after += streamed[-STREAM_BUFFERS][1] if len(streamed) >= STREAM_BUFFERS else []
            streamed.append(({r.name for r in step.results}, []))
        for values, users in streamed[-STREAM_BUFFERS:]:
            if any(s.name in values for s in step.slots):
                users.append(number)
        takes = any(isinstance(r.type, StateType) for r in step.results)
        for slot in step.slots:
            if isinstance(slot.type, StateType):
                after += readers.get(slot.name, []) if takes else []
                readers.setdefault(slot.name, []).append(number)
        made.update({r.name: number for r in step.results})
        name = f"%{step.results[0].name}" if step.results else step.op.name
        seconds = times.seconds(step.op)
        tasks.append(Task(name, op_lane(module, step.op), seconds, tuple(dict.fromkeys(after))))
    return tasks


def live_peaks(module: Module, flat: FlatFunction, sizes: dict[str, int]) -> dict[str, float]:
    """Most bytes of values alive at once on each device; views are counted with their source."""
    home = module.home or CPU
    last: dict[str, int] = {}
    for number, step in enumerate(flat.ops):
        last.update({s.name: number for s in (*step.slots, *step.results)})
    for slot in flat.returns:
        last[slot.name] = len(flat.ops)
    live: dict[str, float] = {}
    peak: dict[str, float] = {}
    ends: dict[int, list[tuple[str, float]]] = {}
    for number, step in enumerate(flat.ops):
        for result in step.results:
            if not isinstance(result.type, TensorType) or op_def(step.op.name).is_view:
                continue
            if is_stream(step.op):
                continue  # streamed weights: counted as workspace
            device = result.type.device or home
            nbytes = type_nbytes(result.type, sizes)
            live[device] = live.get(device, 0.0) + nbytes
            peak[device] = max(peak.get(device, 0.0), live[device])
            ends.setdefault(last[result.name], []).append((device, nbytes))
        for device, nbytes in ends.pop(number, []):
            live[device] -= nbytes
    return peak


def op_workspace(module: Module, op: Op, sizes: Mapping[str, int]) -> float:
    """Bytes a kernel needs besides operands: hidden rows of experts, rebuilt keys and values."""
    if op.name in EXPERTS:
        ids = op.value(1).tensor
        rows = sum(_matrix_rows(module, op, n, sizes) for n in (3, 4))
        count = 1
        for dim in ids.dims:
            count *= dim.at(sizes)
        return 4.0 * count * rows
    if op.name == "mla.attend_expanded":
        heads, width = op.result.tensor.dims[-2], op.result.tensor.dims[-1]
        rows = min(sizes.get("S", 0), sizes.get("T", 0))
        return 4.0 * rows * heads.at(sizes) * 2 * width.at(sizes)
    return 0.0


def _matrix_rows(module: Module, op: Op, position: int, sizes: Mapping[str, int]) -> int:
    operand = op.operand(position)
    found = module.type_of(operand) if operand is not None else None
    return found.dims[-2].at(sizes) if isinstance(found, TensorType) else 0


__all__ = [
    "CROSSING",
    "DiskTier",
    "FlatSchedule",
    "OpTimes",
    "crossing",
    "flat_tasks",
    "is_stream",
    "live_peaks",
    "op_device",
    "op_lane",
    "op_workspace",
    "predict",
    "source_device",
]
