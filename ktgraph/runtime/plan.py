"""`Plan`: what runs, as flat lists of instructions over planned buffers, one list per phase.

A plan is made from the final IR alone: no weights, no memory, no threads.  Consecutive native
instructions form one *segment*, a single call into the native engine; a kernel in Python, such as
the fallback `torch.reference`, ends a segment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ktgraph.ir.graph import Function, Module, Op
from ktgraph.ir.printer import print_op
from ktgraph.ir.types import BatchType, StateType, TensorType
from ktgraph.ops.registry import KernelDef, kernels_for
from ktgraph.placement.graph import CPU
from ktgraph.placement.lanes import CROSSING, op_device
from ktgraph.runtime import kernels_gpu
from ktgraph.runtime.arena import (
    ALIGN,
    Arena,
    PlanError,
    max_q,
    read_arena,
    slot_nbytes,
)
from ktgraph.runtime.flat import FlatFunction, FlatOp, FlatWeight, Layouts, Slot, flatten
from ktgraph.runtime.hot_slots import hot_stacks
from ktgraph.runtime.kernels_cpu import VIEW, emitter
from ktgraph.runtime.operands import (
    BatchUse,
    Instruction,
    OperandRef,
    Operands,
    StateUse,
    TensorRef,
    WeightForm,
    WeightUse,
)
from ktgraph.runtime.weight_views import WeightView, weight_views
from ktgraph.weights.encodings import Tile


@dataclass(frozen=True)
class PhasePlan:
    """One function: its instructions in order, and the arena they work in."""

    name: str
    max_q: int | None  # most new tokens of one sequence; None: no bound
    flat: FlatFunction
    layouts: Layouts
    arena: Arena
    instructions: tuple[Instruction, ...]

    @property
    def segments(self) -> list[tuple[Instruction, ...]]:
        """Runs of native instructions, and single calls of Python kernels.

        A run holds one batch: instructions with the batch of another window begin the next one.
        """
        found: list[list[Instruction]] = []
        for item in self.instructions:
            fits = found and item.is_native and found[-1][-1].is_native
            if fits and len(batch_windows([*found[-1], item])) <= 1:
                found[-1].append(item)
            else:
                found.append([item])
        return [tuple(s) for s in found]

    @property
    def fallbacks(self) -> list[Instruction]:
        """Instructions that run an op's torch reference."""
        return [i for i in self.instructions if i.is_fallback]

    @property
    def uses_gpu(self) -> bool:
        """Whether any of it runs on a GPU."""
        return any(i.on_gpu for i in self.instructions)

    @property
    def is_native(self) -> bool:
        """Whether all of it runs in the native engine."""
        return all(i.is_native for i in self.instructions)

    def step(self, item: Instruction) -> FlatOp:
        return self.flat.ops[item.step]

    def uses(self) -> Iterator[WeightUse]:
        for item in self.instructions:
            yield from (o for o in item.operands if isinstance(o, WeightUse))


@dataclass(frozen=True)
class Plan:
    """The phases of a module."""

    module: Module
    phases: tuple[PhasePlan, ...]

    @staticmethod
    def build(module: Module) -> Plan:
        """Plan every function of a lowered module.

        Raises PlanError naming the op when plan-memory or lower has not run, and for an op that
        has no kernel where it is placed.
        """
        return Plan(module, tuple(plan_phase(module, f) for f in module.functions.values()))

    def phase(self, name: str) -> PhasePlan:
        for phase in self.phases:
            if phase.name == name:
                return phase
        known = ", ".join(p.name for p in self.phases)
        raise PlanError(f"the plan has no phase @{name} (phases: {known})")

    def uses(self) -> list[WeightUse]:
        """Every weight in every form that a phase reads, each once, in order of first use."""
        found: dict[str, WeightUse] = {}
        for phase in self.phases:
            for use in phase.uses():
                found.setdefault(use.key, use)
        return list(found.values())

    @cached_property
    def views(self) -> dict[str, WeightView]:
        """By key, the weights that are views of others and take no memory."""
        return weight_views(self.module, self.uses())

    def held(self) -> list[WeightUse]:
        """`uses` without the views: what takes memory."""
        return [u for u in self.uses() if u.key not in self.views]

    def loaded(self) -> list[WeightUse]:
        """What is read from the checkpoint and kept in files: not slots that the host fills."""
        held = self.held()
        filled = {s.slots.key for s in hot_stacks(self.module, held) if s.is_filled}
        return [u for u in held if u.key not in filled]

    @property
    def states(self) -> list[StateType]:
        """Types of the caches, as the first phase takes them; dims are numbers, C is left."""
        return [a.type for a in self.phases[0].flat.args if isinstance(a.type, StateType)]

    @property
    def home(self) -> str:
        """The device of what the IR prints no device for."""
        return self.module.home or "cpu"

    @property
    def uses_gpu(self) -> bool:
        """Whether any phase runs on a GPU, wholly or in part."""
        return any(p.uses_gpu for p in self.phases)

    def arena_nbytes(self, device: str) -> int:
        """The phases run one at a time and share one arena on each device."""
        sizes = [
            p.arena.nbytes if device == self.home else p.arena.away.get(device, 0)
            for p in self.phases
        ]
        return max(sizes, default=0)

    def text(self) -> str:
        """Every instruction with its operands' places: the file plan.txt of a dump."""
        return "\n".join(line for phase in self.phases for line in _phase_lines(phase)) + "\n"


def batch_windows(items: Sequence[Instruction]) -> set[int]:
    """Windows of the batches that instructions read; 0: of caches with every row."""
    return {o.window for i in items for o in i.operands if isinstance(o, BatchUse)}


def is_on_gpu(module: Module) -> bool:
    """Whether any op is placed on another device than the CPU."""
    return any(op_device(module, op) != CPU for op in module.walk() if op.body is None)


def plan_phase(module: Module, func: Function) -> PhasePlan:
    """The instructions of one function."""
    arena = read_arena(func)
    flat = flatten(module, func)
    layouts = Layouts(flat)
    items: list[Instruction] = []
    for position, step in enumerate(flat.ops):
        items += instructions_of(module, layouts, step, position)
    _check_places(module, func, layouts, arena)
    return PhasePlan(func.name, max_q(func), flat, layouts, arena, tuple(items))


def instructions_of(
    module: Module, layouts: Layouts, step: FlatOp, position: int
) -> list[Instruction]:
    """What an op's kernel (`via`) does; nothing for a view."""
    via = step.op.via
    if via is None:
        raise PlanError(f"no kernel was chosen: run the pass lower\n  in: {step.op}")
    if via == VIEW:
        if position not in layouts.aliases:
            raise PlanError(f"the strides do not allow a view\n  in: {step.op}")
        return []
    device = op_device(module, step.op)
    if step.op.name in CROSSING:  # takes its turn on the GPU's stream; streamed weights lie here
        crossing = Operands(module, layouts, step, CPU)
        return [_call(crossing, via, position, module.home or CPU)]
    operands = Operands(module, layouts, step, device)
    kernel = kernel_of(step.op, via, device)
    if kernel.launch is not None:  # in Python, on the host
        return [_call(Operands(module, layouts, step, CPU), via, position, device)]
    if kernel.into is not None:
        return [_call(operands, via, position, device)]
    emit = emitter(step.op.name, via)
    return [
        Instruction(via, tuple(given), attrs, position, True) for given, attrs in emit(operands)
    ]


def kernel_of(op: Op, via: str, device: str) -> KernelDef:
    """The registered kernel of an op on a device; raises PlanError where there is none."""
    if device != CPU:
        kernels_gpu.register_all()
    for kernel in kernels_for(op.name, device):
        if kernel.name == via:
            return kernel
    raise PlanError(
        f"kernel {via} is not registered for {op.name} on {device}: was the plan made by another "
        f"version, or is a plug-in missing?\n  in: {op}"
    )


def _call(operands: Operands, via: str, position: int, device: str) -> Instruction:
    """A call with the op's operands, then its results; weights as they are stored, on a GPU."""
    step = operands.step
    given = [operands.weight(i, _form(operands, i)) for i in range(len(step.operands))]
    results = [operands.result(i) for i in range(len(step.results))]
    return Instruction(via, (*given, *results), {}, position, False, device)


def _form(operands: Operands, position: int) -> WeightForm:
    found = operands.step.operand(position)
    is_reference = operands.device == CPU and operands.step.op.name not in CROSSING
    if is_reference or not isinstance(found, FlatWeight):
        return "value"
    encoding = operands.module.weight_of(found.ref).type.encoding
    return "stored" if Tile.of(encoding) is None else "tile"


def _check_places(module: Module, func: Function, layouts: Layouts, arena: Arena) -> None:
    """Every storage has a place, large enough for the largest call and inside the arena.

    The text may have been edited by hand or come from a file: native code trusts these numbers.
    """
    roots = {v.root.name: v.root for v in layouts.views.values() if layouts.is_value(v.root)}
    bindings = arena.sizes.bindings(module)
    for name, slot in sorted(roots.items()):
        place = arena.places.get(arena.owner.get(name, name))
        if place is None:
            raise PlanError(
                f"@{func.name}: %{name} has no buffer: run plan-memory after the last rewrite"
            )
        needed = slot_nbytes(slot, bindings)
        at_home = (slot.type.device or module.home) == module.home
        total = arena.nbytes if at_home else arena.away.get(slot.type.device or "", 0)
        inside = place.offset >= 0 and place.offset + needed <= total
        if not inside or place.offset % ALIGN or place.nbytes < needed:
            raise PlanError(
                f"@{func.name}: %{name} needs {needed} bytes, but its buffer is {place.nbytes} "
                f"bytes at {place.offset} of an arena of {total}: run plan-memory again"
            )


# -- text -----------------------------------------------------------------------------------------
def _phase_lines(phase: PhasePlan) -> list[str]:
    segments = phase.segments
    native = sum(s[0].is_native for s in segments)
    counts = Counter(i.kernel for i in phase.instructions)
    sizes = phase.arena.sizes
    lines = [
        f"@{phase.name}: {len(phase.instructions)} instructions, {native} native segment(s), "
        f"{len(segments) - native} Python call(s), {len(phase.fallbacks)} of them fallbacks, "
        f"arena {phase.arena.nbytes} bytes, "
        f"at most {sizes.tokens} tokens of {sizes.batch} sequences",
        "  " + ", ".join(f"{name} x {count}" for name, count in sorted(counts.items())),
    ]
    for number, segment in enumerate(segments):
        lines.append(f"  segment {number}: {'native' if segment[0].is_native else 'Python'}")
        lines += [f"    {_instruction_text(phase, item)}" for item in segment]
    return [*lines, ""]


def _instruction_text(phase: PhasePlan, item: Instruction) -> str:
    op = phase.step(item).op
    shown = ", ".join(_operand_text(phase, o) for o in item.operands)
    attrs = " ".join(f"{k}={v}" for k, v in item.attrs.items())
    name = item.kernel if item.is_native else f"{item.kernel} {op.name}"
    place = f"  // {op.loc}" if op.loc else ""
    return f"{name} {shown} {attrs}".rstrip() + place


def _operand_text(phase: PhasePlan, ref: OperandRef) -> str:
    if ref is None:
        return "_"
    if isinstance(ref, WeightUse):
        return f"@{ref.key}" + (f"(many_rows={ref.many_rows})" if ref.many_rows else "")
    if isinstance(ref, StateUse):
        return f"state{ref.argument}"
    if isinstance(ref, BatchUse):
        return "batch"
    shape = ", ".join(map(str, ref.view.dims))
    if not phase.layouts.is_value(ref.view.root):
        return f"%{ref.view.root.name}:{ref.view.root.type}"
    at = phase.arena.offset(ref.view.root.name)
    inner = "" if ref.view.offset == 0 else f"+{ref.view.offset}"
    return f"%{ref.view.root.name}{inner}@{at}:{ref.dtype}[{shape}]"


def op_line(phase: PhasePlan, item: Instruction) -> str:
    """The op's line in the IR, for error messages and timelines."""
    return print_op(phase.step(item).op).split("\n")[0]


def argument_slots(phase: PhasePlan) -> tuple[list[Slot], list[int], list[int]]:
    """A function's tensor arguments, and the positions of its states and of its batch."""
    args = phase.flat.args
    tensors = [a for a in args if isinstance(a.type, TensorType)]
    states = [i for i, a in enumerate(args) if isinstance(a.type, StateType)]
    batches = [i for i, a in enumerate(args) if isinstance(a.type, BatchType)]
    return tensors, states, batches


def takes_batch(phase: PhasePlan) -> bool:
    """Whether a phase is a causal language model's, and not a plain module's."""
    return any(isinstance(a.type, BatchType) for a in phase.flat.args)


def ids_slot(phase: PhasePlan) -> Slot:
    """The token ids of a causal language model; raises PlanError for anything else."""
    tensors, states, batches = argument_slots(phase)
    ids = [s for s in tensors if isinstance(s.type, TensorType) and s.type.dtype in ("i32", "i64")]
    if len(tensors) == len(ids) == 1 and batches and states:
        return ids[0]
    shown = ", ".join(f"%{a.name}: {a.type}" for a in phase.flat.args)
    raise PlanError(
        f"@{phase.name}({shown}) is no causal language model: expected token ids, a batch and "
        "caches. Run it with the interpreter"
    )


__all__ = [
    "PhasePlan",
    "Plan",
    "PlanError",
    "TensorRef",
    "argument_slots",
    "batch_windows",
    "ids_slot",
    "instructions_of",
    "is_on_gpu",
    "kernel_of",
    "op_line",
    "plan_phase",
    "takes_batch",
]
