"""One pass, applied with every check around it: requires, run, hash, verify, ensures."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ktgraph.errors import KtgraphError, MemoryBudgetError, UnsupportedInputError
from ktgraph.ir.graph import Module
from ktgraph.ir.verify import verify
from ktgraph.pass_api import Numerics, PassContext, RuleEvent
from ktgraph.pipeline import Step
from ktgraph.properties import missing


class StepError(KtgraphError, RuntimeError):
    """A pass failed one of its checks; `stage` is requires, run, verify, ensures or exact."""

    def __init__(self, stage: str, message: str) -> None:
        super().__init__(message)
        self.stage = stage


@dataclass(frozen=True)
class Applied:
    """What applying a pass did; times in milliseconds."""

    changed: bool
    numerics: Numerics
    events: tuple[RuleEvent, ...]
    notes: tuple[str, ...]
    rewrites: int
    ops_before: int
    ops_after: int
    ms: float
    verify_ms: float


def apply_step(step: Step, module: Module, ctx: PassContext) -> Applied:
    """Run a pass on the module, in place; raises StepError, and leaves the module as it then is.

    `ctx.limit` bounds the rewrites of passes that are not required; `ctx` gets what was reported.
    """
    instance = step.instance
    _has(module, instance.requires, "requires", "it needs")
    hash_before, ops_before = module.structural_hash(), count_ops(module)
    own = _own_context(step, ctx)
    start = time.perf_counter()
    try:
        _run(step, module, own)
    finally:
        ctx.events += own.events
        ctx.notes += own.notes
        ctx.rewrites += 0 if instance.required else own.rewrites
    ran = time.perf_counter()
    numerics = instance.numerics_for(module)  # some passes know only now what they did
    _verify(module)
    verified = time.perf_counter()
    changed = module.structural_hash() != hash_before
    if changed and numerics.is_lossy and ctx.options.exact:
        raise StepError("exact", f"it is lossy ({numerics}), and exact=True allows no loss")
    _has(module, instance.ensures, "ensures", "it promises")
    return Applied(
        changed, numerics, tuple(own.events), tuple(own.notes), own.rewrites,
        ops_before, count_ops(module), 1e3 * (ran - start), 1e3 * (verified - ran),
    )  # fmt: skip


def _own_context(step: Step, ctx: PassContext) -> PassContext:
    """A context for one pass: own events and notes, shared target, options and artifacts."""
    unbound = ctx.limit is None or step.instance.required
    left = None if unbound else max((ctx.limit or 0) - ctx.rewrites, 0)
    return replace(ctx, events=[], notes=[], rewrites=0, limit=left)


def _run(step: Step, module: Module, ctx: PassContext) -> None:
    try:
        step.instance.run(module, ctx)
    except (UnsupportedInputError, MemoryBudgetError):  # what the user gave is wrong, not the pass
        raise
    except Exception as error:
        raise StepError("run", f"{type(error).__name__}: {error}") from error


def _verify(module: Module) -> None:
    try:
        verify(module)
    except ValueError as error:
        raise StepError("verify", str(error)) from error


def _has(module: Module, names: Sequence[str], stage: str, phrase: str) -> None:
    for name in names:
        try:
            reason = missing(module, name)
        except KeyError as error:
            raise StepError(stage, str(error.args[0])) from None
        if reason:
            raise StepError(stage, f"{phrase} {name!r}, but {reason}")


def count_ops(module: Module) -> int:
    """Op lines of all functions, bodies of repeats counted once."""
    return sum(1 for _ in module.walk())


__all__ = ["Applied", "StepError", "apply_step", "count_ops"]
