"""Running a plan on a GPU and the CPU together: memory on both, mailboxes, and bound phases."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from math import prod
from typing import Any

import torch

from ktgraph.ir.types import TensorType
from ktgraph.ops.sample import most_needed, seen_words
from ktgraph.ops.tensor import torch_dtype
from ktgraph.runtime.arena import slot_nbytes
from ktgraph.runtime.cache import CacheShape, InPlaceState, Ints
from ktgraph.runtime.errors import ExecutionError
from ktgraph.runtime.executor import TraceEvent, logits_as_f32
from ktgraph.runtime.flat import View
from ktgraph.runtime.gpu import phase as phases
from ktgraph.runtime.gpu.device import GpuDevice, Step
from ktgraph.runtime.gpu.flights import Flight, Flights
from ktgraph.runtime.gpu.inputs import Inputs, Sizes
from ktgraph.runtime.gpu.mailboxes import Mailboxes
from ktgraph.runtime.gpu.ordering import faults
from ktgraph.runtime.gpu.parts import cut
from ktgraph.runtime.gpu.phase import BoundPhase
from ktgraph.runtime.gpu.residency import Residency
from ktgraph.runtime.gpu.seen import SeenTokens
from ktgraph.runtime.gpu.streaming import BUFFERS, buffer_nbytes, streamed
from ktgraph.runtime.native_binding import NativeBinding, start_engine
from ktgraph.runtime.operands import TensorRef, WeightUse
from ktgraph.runtime.packed import LoadedWeights
from ktgraph.runtime.plan import PhasePlan, Plan, argument_slots, ids_slot, op_line, takes_batch
from ktgraph.runtime.router_counts import RouterCounts, is_route
from ktgraph.runtime.steps import StepArrays

log = logging.getLogger("ktgraph")


class GpuExecutor:
    """A plan bound to its weights, caches, a GPU and the CPU's threads."""

    def __init__(
        self,
        plan: Plan,
        device: GpuDevice,
        weights: LoadedWeights,
        states: Sequence[InPlaceState],
        shape: CacheShape,
        threads: int,
        *,
        capture: bool = True,
    ) -> None:
        self.plan = plan
        self.device = device
        self.weights = weights
        self.states = list(states)
        self.shape = shape
        self.capture = capture
        self.trace: list[TraceEvent] | None = None
        self.counts: RouterCounts | None = None  # of chosen experts, while they are counted
        self.samples = False  # whether the GPU chooses tokens itself
        self._is_closed = False
        self._is_under_way = False
        self.arenas = {
            plan.home: device.empty(plan.arena_nbytes(plan.home) + 256),
            "cpu": device.host(plan.arena_nbytes("cpu") + 256),
        }
        self.parts = {p.name: cut(p) for p in plan.phases}
        if device.checks_order:
            self._check_order()
        self.buffers = [device.empty(n) for n in [buffer_nbytes(plan)] * BUFFERS if n]
        _pin_streamed(plan, device, weights)
        self.residency = Residency(plan, device, weights)
        has_native = any(i.is_native for p in plan.phases for i in p.instructions)
        self.engine: Any = start_engine(threads) if has_native else None
        self.binding = NativeBinding(self.engine, self.arenas["cpu"], weights, self.states, shape)
        self.mailboxes = Mailboxes(
            device, self.engine, sum(len(p.boxes) for p in self.parts.values())
        )
        width, windows = shape.pages_for(shape.sequence_rows), [w for w, _ in shape.windows]
        self._inputs = Inputs(device, self._most(), width, windows)
        self._flights = Flights(device, self._most().sequences)
        self._arguments = {p.name: self._staged(p) for p in plan.phases}
        first = 0
        self._phases: dict[str, BoundPhase] = {}
        for phase in plan.phases:
            bound = BoundPhase(self, phase, self.parts[phase.name], first)
            self._phases[phase.name] = bound
            first += len(bound.parts.boxes)
        self.samples = all(phase.samples for phase in self._phases.values())
        device.catch_up()
        self.mailboxes.start()

    def _check_order(self) -> None:
        found = [
            fault
            for phase in self.plan.phases
            for fault in faults(self.plan.module, phase, self.parts[phase.name])
        ]
        if found:
            raise ExecutionError("\n".join(found))

    def _most(self) -> Sizes:
        sizes = [p.arena.sizes for p in self.plan.phases]
        return Sizes(
            max(s.tokens for s in sizes), max(s.rows for s in sizes), max(s.batch for s in sizes)
        )

    @property
    def threads(self) -> int:
        return int(self.engine.threads) if self.engine is not None else 1

    @property
    def inputs(self) -> Inputs:
        return self._inputs

    def call(self, phase: str, ids: list[int], step: StepArrays) -> torch.Tensor:
        """Run one phase on a call; f32[rows, VOC] in host memory of its own.

        Raises ExecutionError when an op fails, on the CPU or the GPU, or when the GPU does not end.
        """
        (logits,) = self._call(phase, ids, step)
        return logits_as_f32(logits)

    def call_tensors(
        self, phase: str, inputs: Sequence[torch.Tensor], step: StepArrays
    ) -> list[torch.Tensor]:
        """Run one phase of a plain module on its arguments; results in host memory of their own.

        Raises ExecutionError as `call` does.
        """
        plan = self.plan.phase(phase)
        bound = {"T": step.tokens, "O": step.rows}
        for (slot, staged), value in zip(self._arguments[phase].items(), inputs, strict=True):
            _as_shaped(staged, plan.layouts.views[slot], bound).copy_(value)
        return [r.clone() for r in self._call(phase, [], step)]

    def _call(self, phase: str, ids: list[int], step: StepArrays) -> list[torch.Tensor]:
        self.settle()
        with self._guarded():
            upload = self._inputs.set(ids, step)
            self.mailboxes.set_sizes(step.tokens, step.rows)
            self._enter_experts()
            found = self._phases[phase].run(step, upload)
            self.residency.called()
            return found

    def _enter_experts(self) -> None:
        """In front of a call: experts whose copies are done get their slots."""
        if self.residency.changes:
            self.device.run(self.residency.due())

    @contextmanager
    def _guarded(self) -> Generator[None]:
        """After any failure inside, Ctrl-C too, the executor is as new; what runs is lost."""
        self._make_ready()
        self._is_under_way = True
        try:
            yield
        except BaseException as error:
            try:
                self._recover()
            except RuntimeError as lasting:  # of a GPU that is lost to this process
                raise error from lasting
            raise
        self._is_under_way = False

    def _make_ready(self) -> None:
        """In front of whatever uses the GPU; raises ExecutionError where that is over."""
        if self._is_closed:
            raise ExecutionError("this executor was closed: load the plan again")
        if not self._is_under_way:
            return
        try:  # an interrupt during recovery, as by a second Ctrl-C
            self._recover()
        except RuntimeError as error:
            raise ExecutionError(
                f"the GPU did not recover from an earlier failure ({error}): what runs on it needs "
                "a new process"
            ) from error

    # -- steps that choose tokens -----------------------------------------------------------------
    def can_overlap(self, phase: str) -> bool:
        """Whether a step may be started while another runs.

        The host has no part in it, counts no choices of routers, and moves no experts.
        """
        alone = self.counts is not None or bool(self.residency.changes)
        return self.parts[phase].can_capture and not alone

    @cached_property
    def seen(self) -> SeenTokens:
        """Where the tokens that a penalty is for are marked; made when first needed."""
        returned = (slot.type for slot in self.plan.phases[0].flat.returns)
        logits = next(t for t in returned if isinstance(t, TensorType))
        words = seen_words(logits.dims[-1].at(self.plan.module.dims))
        return SeenTokens(self.device, self._most().sequences, words)

    def start(
        self,
        phase: str,
        ids: list[int] | None,
        step: StepArrays,
        how: Ints,
        seen: Ints | None = None,
    ) -> Flight:
        """Start a call that chooses a token for every row.

        ids: None takes the tokens that the flight before chose, as `goes_on` allows.
        how: i32[rows, 8].  seen: i32[rows, words] where a row has a penalty (see `sample.tokens`).
        Raises ExecutionError as `call` does.
        """
        if ids is not None:
            self.settle()
        with self._guarded():
            uploads = [self._inputs.set(ids, step, how)]
            uploads += [] if seen is None else [self.seen.set(seen)]
            self.mailboxes.set_sizes(step.tokens, step.rows)
            self._enter_experts()
            flight = self._flights.begin(phase, step.tokens, step.rows)
            self._phases[phase].start(step, uploads, most_needed(how), seen is not None)
            self.device.run([self.device.copy(self._inputs.ids[: step.rows], flight.where)])
            flight.end = self.device.mark()
            return flight

    def goes_on(self, flight: Flight) -> bool:
        """Whether a call of the flight's tokens, one each, may be started now.

        Nothing may have run since, for it reads those tokens where they were left, and mailboxes
        know the sizes of one call only.
        """
        same = flight.taken == flight.rows or not self.mailboxes.boxes
        return self._flights.under_way == [flight] and same

    def land(self, flight: Flight) -> list[int]:
        """The tokens of a started call, once it has ended; raises ExecutionError as `call` does."""
        if flight.lost:
            raise ExecutionError(f"this step of @{flight.phase} was lost by a failure after it")
        if flight.tokens is None:
            with self._guarded():
                self._phases[flight.phase].land(flight.end)
                self._flights.landed(flight)
                self.residency.called()
        assert flight.tokens is not None
        return flight.tokens

    def settle(self) -> None:
        """Let everything that was started end; its tokens are kept for who asks."""
        for flight in list(self._flights.under_way):
            self.land(flight)

    def set_residency(self, layer: int, experts: Sequence[int]) -> None:
        """Give a layer's slots to these experts from the second call on; nothing is captured again.

        Their bytes are copied behind the first.  Raises UnsupportedInputError for experts that are
        not there, given twice or too many.
        """
        self._make_ready()
        self.residency.check(layer, experts)
        self.settle()
        with self._guarded():
            self.residency.change(layer, experts)

    def settle_residency(self) -> None:
        """Wait until every change of slots is done."""
        if not self.residency.changes:
            return
        self._make_ready()
        self.residency.settle()
        if not self.device.finish(lambda: None, phases.PATIENCE):
            raise ExecutionError("copies of hot experts did not end in time")

    def count_experts(self, on: bool) -> RouterCounts | None:
        """Count which experts are chosen in the calls to come, or no longer.

        Decode steps are captured anew.  Raises ExecutionError where a router runs on the host.
        """
        away = [
            op_line(p, i)
            for p in self.plan.phases
            for i in p.instructions
            if is_route(p, i) and (i.is_fallback or not i.on_gpu)
        ]
        if on and away:
            raise ExecutionError(f"a router on the host is not counted beside a GPU:\n  {away[0]}")
        if not self._is_closed:
            self._make_ready()  # what runs still may write to the counts of before
            self.settle()
        self.counts = RouterCounts(self.plan, self.device.torch_device) if on else None
        for phase in self._phases.values():
            phase.forget_steps()
        self.device.catch_up()
        return self.counts

    def close(self) -> None:
        """Stop the threads that watch mailboxes."""
        try:
            if not self._is_closed:
                with suppress(ExecutionError):  # of a step whose tokens nobody waits for
                    self._make_ready()  # a stream that waits for the CPU would wait forever
                    self.settle()
                self.settle_residency()  # memory must not be given back below a copy
        finally:
            self._is_closed = True
            self.mailboxes.close()

    def __del__(self) -> None:
        """Threads and streams let go of the memory before it is given back, in whatever order."""
        with suppress(Exception):  # of one that was never whole, or at the end of the process
            self.close()

    def _recover(self) -> None:
        """After a failure: nothing is under way any more, and the mailboxes are as new."""
        self._flights.lose_all()
        self.device.drain(self.mailboxes.release, phases.PATIENCE)
        self.mailboxes.reset()
        self.residency.restart()
        self.device.catch_up()
        self._is_under_way = False

    # -- where things lie ---------------------------------------------------------------------
    def arena(self, device: str | None) -> torch.Tensor:
        return self.arenas[device or self.plan.home]

    def tensor(self, phase: PhasePlan, ref: TensorRef, sizes: dict[str, int]) -> torch.Tensor:
        """A view of the arena of the value's device at the sizes of a call."""
        view: View = ref.view
        dtype = torch_dtype(ref.dtype)
        if view.root.name == self._ids_name(phase):
            storage, start = self._inputs.ids, 0
        else:
            arena = self.arena(view.root.type.device)
            start = phase.arena.offset(view.root.name)
            storage = arena[start : arena.numel() // 256 * 256].view(dtype)
        at = storage.storage_offset() + view.offset.at(sizes)
        shape = [d.at(sizes) for d in view.dims]
        return storage.as_strided(shape, [s.at(sizes) for s in view.strides], at)

    @staticmethod
    def _ids_name(phase: PhasePlan) -> str:
        """The argument that `Inputs` brings; "" for a plain module, whose arguments are staged."""
        return ids_slot(phase).name if takes_batch(phase) else ""

    def _staged(self, phase: PhasePlan) -> dict[str, torch.Tensor]:
        """Host memory for the arguments of a plain module, by slot."""
        if takes_batch(phase):
            return {}
        most = phase.arena.sizes.bindings(self.plan.module)
        slots = argument_slots(phase)[0]
        return {s.name: self.device.host(slot_nbytes(s, most)) for s in slots}

    def uploads(self, phase: PhasePlan, sizes: Sizes) -> list[Step]:
        """Steps that bring a plain module's arguments to the GPU."""
        bound = {"T": sizes.tokens, "O": sizes.rows}
        steps: list[Step] = []
        for slot in argument_slots(phase)[0]:
            if slot.name not in self._arguments[phase.name]:
                continue
            assert isinstance(slot.type, TensorType)
            view = phase.layouts.view(slot)
            target = self.tensor(phase, TensorRef(slot.type.dtype, view), bound)
            source = _as_shaped(self._arguments[phase.name][slot.name], view, bound)
            steps.append(self.device.copy(source, target))
        return steps


def _as_shaped(staged: torch.Tensor, view: View, sizes: dict[str, int]) -> torch.Tensor:
    """The dense tensor of an argument at the sizes of a call, in its staging memory."""
    assert isinstance(view.root.type, TensorType)
    shape = [d.at(sizes) for d in view.dims]
    dtype = torch_dtype(view.root.type.dtype)
    return staged[: prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _pin_streamed(plan: Plan, device: GpuDevice, weights: LoadedWeights) -> None:
    """Make the host's copy of streamed weights fit for copies at the link's rate."""
    keys = {
        o.key
        for p in plan.phases
        for i in streamed(p)
        for o in i.operands
        if isinstance(o, WeightUse)
    }
    for key in sorted(keys):
        refused = device.pin(weights.tensors[key])
        if refused:
            log.warning(
                "ktgraph: @%s cannot be pinned (%s): streaming it will be slow, several times "
                "below the link's rate",
                key,
                refused,
            )
            return


__all__ = ["GpuExecutor"]
