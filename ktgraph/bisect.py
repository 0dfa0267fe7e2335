"""Bisection: the first pass of a pipeline that goes wrong, then the first rewrite inside it.

Nothing is kept between calls: the module, the pipeline and `PassContext.limit` are all there is.
By default a pass goes wrong when one of its checks fails or when its output differs from its input
on the miniature.  With a `check`, prefixes of the pipeline are searched for the first one whose
module fails it; passes are never skipped, and a pass that is required runs without a limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ktgraph.ir.graph import Module
from ktgraph.ops.registry import Refusal
from ktgraph.pass_api import Numerics, Pass, PassContext, RuleEvent
from ktgraph.pass_step import StepError, apply_step
from ktgraph.pipeline import Pipeline, Step
from ktgraph.recorded import read_recorded
from ktgraph.repro import MODULE_FILE, read_repro
from ktgraph.validate import Validator

Check = Callable[[Module], bool | Refusal]  # True, or no("why the module is wrong")
_Judge = Callable[[Module, Numerics], str]  # why the module is wrong, or an empty string


@dataclass(frozen=True)
class BadRewrite:
    """The first rewrite of a pass that makes its output wrong."""

    number: int  # from 1
    total: int
    event: RuleEvent
    reason: str

    def __str__(self) -> str:
        where = f"{self.event.rule} at: {self.event.where}"
        return f"first bad rewrite: {self.number} of {self.total}, {where}"


@dataclass(frozen=True)
class Culprit:
    """The first pass that goes wrong; `rewrite` is None when no single rewrite is to blame."""

    number: int  # place in the pipeline, from 1
    step: str
    reason: str
    rewrite: BadRewrite | None

    def __str__(self) -> str:
        lines = [f"first bad pass: {self.number} {self.step}: {self.reason}"]
        return "\n".join(lines + ([f"  {self.rewrite}"] if self.rewrite else []))


def bisect(
    what: Module | str | Path,
    pipeline: str | Pipeline | Sequence[Pass] | None = None,
    ctx: PassContext | None = None,
    *,
    check: Check | None = None,
    seed: int = 0,
) -> Culprit | None:
    """Find the first bad pass and rewrite; None when nothing goes wrong.

    `what`: a module, a `.ktir` file, or a repro folder, which brings its own pipeline and context.
    """
    module, steps, own = _load(what, pipeline)
    context = ctx or own
    if check is not None:
        return _Search(steps, context, check).culprit(module)
    return _first_wrong(module, steps, context, _validator(what, seed))


def _load(
    what: Module | str | Path, pipeline: str | Pipeline | Sequence[Pass] | None
) -> tuple[Module, Pipeline, PassContext]:
    if isinstance(what, Module):
        return what.clone(), Pipeline.of(pipeline or "default"), PassContext()
    found = read_recorded(Path(what) / MODULE_FILE if Path(what).is_dir() else what)
    given = Pipeline.of(pipeline) if pipeline is not None else found.rest
    return found.module, given or Pipeline.of("default"), found.context()


def _validator(what: Module | str | Path, seed: int) -> Validator:
    if isinstance(what, Module) or not Path(what).is_dir():
        return Validator(seed)
    repro = read_repro(what)
    return Validator(repro.seed, repro.trace)


def _first_wrong(
    module: Module, pipeline: Pipeline, ctx: PassContext, validator: Validator
) -> Culprit | None:
    """Validate pass by pass."""
    for number, step in enumerate(pipeline.steps, start=1):
        before = module.clone()

        def judge(after: Module, numerics: Numerics, before: Module = before) -> str:
            return validator.compare(before, after, numerics).fault

        reason = _reason(step, module, ctx, judge)
        if reason:
            return Culprit(number, str(step), reason, first_bad_rewrite(step, before, ctx, judge))
    return None


def _reason(step: Step, module: Module, ctx: PassContext, judge: _Judge) -> str:
    try:
        done = apply_step(step, module, ctx)
    except StepError as error:
        return f"{error.stage}: {error}"
    return judge(module, done.numerics) if done.changed else ""


def first_bad_rewrite(
    step: Step, before: Module, ctx: PassContext, judge: _Judge
) -> BadRewrite | None:
    """The first rewrite of a failing pass that makes it fail, by halving the limit.

    None when the pass counts no rewrites, is required, or fails with none.
    """
    if step.instance.required:
        return None
    reason, events = _limited(step, before, ctx, judge, None)
    total = len(events)
    if not reason or not total or _limited(step, before, ctx, judge, 0)[0]:
        return None
    good, bad = 0, total
    while bad - good > 1:
        middle = (good + bad) // 2
        found, _ = _limited(step, before, ctx, judge, middle)
        good, bad = (good, middle) if found else (middle, bad)
    reason, events = _limited(step, before, ctx, judge, bad)
    return BadRewrite(bad, total, events[bad - 1], reason)


def _limited(
    step: Step, before: Module, ctx: PassContext, judge: _Judge, limit: int | None
) -> tuple[str, list[RuleEvent]]:
    """Run the pass on a copy with at most `limit` rewrites: what is wrong, and its rewrites."""
    own = replace(ctx, events=[], notes=[], artifacts={}, limit=limit, rewrites=0)
    reason = _reason(step, before.clone(), own, judge)
    return reason, [e for e in own.events if e.outcome == "matched"]


class _Search:
    """Binary search over prefixes of a pipeline with a user's check."""

    def __init__(self, pipeline: Pipeline, ctx: PassContext, check: Check) -> None:
        self.steps = pipeline.steps
        self.ctx = ctx
        self.check = check

    def culprit(self, module: Module) -> Culprit | None:
        states, crash = self._states(module)
        if self._wrong(states[0]):
            raise ValueError("the check fails before any pass: there is nothing to bisect")
        last = len(states) - 1
        if not self._wrong(states[last]):
            return crash
        good, bad = 0, last
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (good, middle) if self._wrong(states[middle]) else (middle, bad)
        step = self.steps[bad - 1]
        rewrite = first_bad_rewrite(step, states[bad - 1], self.ctx, self._judge)
        return Culprit(bad, str(step), self._wrong(states[bad]), rewrite)

    def _states(self, module: Module) -> tuple[list[Module], Culprit | None]:
        """The module before and after every pass, and the pass that fails a check of its own."""
        states = [module.clone()]
        for number, step in enumerate(self.steps, start=1):
            reason = _reason(step, module, self.ctx, lambda after, numerics: "")
            if reason:
                rewrite = first_bad_rewrite(step, states[-1], self.ctx, lambda a, n: "")
                return states, Culprit(number, str(step), reason, rewrite)
            states.append(module.clone())
        return states, None

    def _judge(self, module: Module, numerics: Numerics) -> str:
        return self._wrong(module)

    def _wrong(self, module: Module) -> str:
        answer = self.check(module)
        if answer:
            return ""
        return answer.reason if isinstance(answer, Refusal) else "the check fails"


__all__ = ["BadRewrite", "Check", "Culprit", "bisect", "first_bad_rewrite"]
