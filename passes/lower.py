"""lower: choose the kernel of every op, and write it behind the op as `via`.

Why: what runs is part of the text.  The first kernel that supports the op is taken, best first;
every refusal keeps its reason.  View ops cost nothing where strides can express them; an op without
a kernel runs on its torch reference, and says so.

    %h = nn.rms_norm %x, @norm : f32[T, D]
 -> %h = nn.rms_norm %x, @norm : f32[T, D] via cpu.rms_norm
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from ktgraph.ir.graph import Function, Module, Op
from ktgraph.ir.printer import print_op
from ktgraph.ops.registry import KernelDef, Refusal, kernels_for
from ktgraph.pass_api import Numerics, Pass, PassContext, exact, register_pass
from ktgraph.placement.graph import CPU
from ktgraph.placement.lanes import crossing, op_device
from ktgraph.runtime import kernels_gpu
from ktgraph.runtime.flat import FlatOp, Layouts, flatten
from ktgraph.runtime.kernels_cpu import REFERENCE, VIEW, register_all
from ktgraph.runtime.many_rows import many_rows_key, tile_of, write_many_rows
from ktgraph.runtime.native import Trial, engine_level
from ktgraph.runtime.plan import Plan, PlanError, instructions_of


@register_pass
@dataclass(frozen=True)
class Lower(Pass):
    name: ClassVar[str] = "lower"
    numerics: ClassVar[Numerics] = exact()
    required: ClassVar[bool] = True

    def run(self, module: Module, ctx: PassContext) -> None:
        register_all()  # ops may have been declared since
        if module.home not in (None, "cpu") or any(d != "cpu" for d in module.devices):
            kernels_gpu.register_all()
        ctx.fallbacks.clear()
        _freeze_many_rows(module, ctx)
        for func in module.functions.values():
            _Lowering(module, func, ctx).run()
        is_whole = all(op.via for op in module.walk() if op.body is None)
        ctx.artifacts["plan.txt"] = (
            Plan.build(module).text() if is_whole else "some ops have no kernel: see rules.txt\n"
        )


def _freeze_many_rows(module: Module, ctx: PassContext) -> None:
    """Write down the target's row counts for the formats that CPU ops read."""
    cpus = [d for d in ctx.target.devices if d.kind == "cpu"] if ctx.target is not None else []
    measured = cpus[0].many_rows_at(engine_level()) if cpus else dict[str, int]()
    ops = [op for op in module.walk() if op.body is None and op_device(module, op) == CPU]
    used = {many_rows_key(tile_of(module, ref)) for op in ops for ref in op.weights}
    rows = {name: count for name, count in measured.items() if name in used}
    write_many_rows(module, rows)
    if rows:
        shown = ", ".join(f"{name} {count}" for name, count in rows.items())
        ctx.note(f"rows from which kernels take their path for many, measured: {shown}")


class _Lowering:
    def __init__(self, module: Module, func: Function, ctx: PassContext) -> None:
        self.module = module
        self.func = func
        self.ctx = ctx
        self.trial: Trial | None = None  # made when the first native kernel asks
        self.layouts = Layouts(flatten(module, func))
        self.steps: dict[int, list[FlatOp]] = {}
        for step in self.layouts.flat.ops:
            self.steps.setdefault(id(step.op), []).append(step)

    def run(self) -> None:
        chosen: Counter[str] = Counter()
        open_ones: Counter[str] = Counter()
        for op in self.func.walk():
            if op.body is not None:
                continue
            op.via = VIEW if self.layouts.is_view(op) else self._kernel(op)
            if op.via is None:
                open_ones[op.name] += 1
            else:
                chosen[op.via] += 1
        shown = ", ".join(f"{name} x {count}" for name, count in sorted(chosen.items()))
        self.ctx.note(f"@{self.func.name}: {shown}")
        if chosen[REFERENCE]:
            self.ctx.note(
                f"@{self.func.name}: {chosen[REFERENCE]} op(s) run on their torch reference, slowly"
            )

        if open_ones:
            shown = ", ".join(f"{name} x {count}" for name, count in sorted(open_ones.items()))
            self.ctx.note(f"@{self.func.name}: planned, without a kernel to run them yet: {shown}")

    def _kernel(self, op: Op) -> str | None:
        """The best kernel; once bisect's limit is reached, the reference."""
        device, link = op_device(self.module, op), crossing(self.module, op)
        if link and "cpu" in link.split(" -> "):
            return kernels_gpu.crossing_kernel(op, self.module)
        if link:
            self.ctx.refused("choose-kernel", op, f"no kernel crosses {link} yet")
            return None
        if not self.ctx.may_rewrite("choose-kernel", op):
            return REFERENCE
        refusals: dict[str, str] = {}
        for kernel in kernels_for(op.name, device):
            reason = self._refusal(op, kernel)
            if kernel.name == REFERENCE and not reason:
                self.ctx.fallbacks.setdefault(op.name, {}).update(refusals)
            if not reason:
                return kernel.name
            refusals[kernel.name] = reason
            self.ctx.refused(kernel.name, op, reason)
        raise PlanError(
            f"{op.name} has no kernel on {device}: place it elsewhere, or register one\n"
            f"  in: {print_op(op)}"
        )

    def _refusal(self, op: Op, kernel: KernelDef) -> str:
        found = kernel.supports(op, self.module)
        if isinstance(found, Refusal):
            return found.reason
        if not found:
            return "supports() said no"
        runs_in_python = kernel.launch is not None or kernel.into is not None
        return "" if runs_in_python else self._native_refusal(op, kernel)

    def _native_refusal(self, op: Op, kernel: KernelDef) -> str:
        """What the native engine says to the op's instructions, in every iteration."""
        self.trial = self.trial or Trial()
        before, op.via = op.via, kernel.name
        try:
            for step in self.steps[id(op)]:
                items = instructions_of(self.module, self.layouts, step, -1)
                reason = self.trial.refusal(items, step.bindings)
                if reason:
                    return reason
        finally:
            op.via = before
        return ""


__all__ = ["Lower"]
