"""The pass manager: runs a pipeline, checks every pass, and reports.

Around each pass: requires → run → structural hash → verify → ensures → validate → record → dump.
Verification is always on.  Validation (`ktgraph/validate.py`) is level 0, 1 or 2.  The first pass
that goes wrong raises one PassError that names it, the first bad rewrite in it where that can be
told, a repro folder, and the command that shows it again.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ktgraph.bisect import BadRewrite, first_bad_rewrite
from ktgraph.dump import DumpFolder, DumpRequest
from ktgraph.errors import KtgraphError
from ktgraph.ir.graph import Module
from ktgraph.kernel_check import check_kernels, gpu_kernels, why_no_gpu_kernels
from ktgraph.miniature import MiniatureError
from ktgraph.pass_api import Numerics, Pass, PassContext
from ktgraph.pass_report import PassRecord, PassReport
from ktgraph.pass_step import Applied, StepError, apply_step
from ktgraph.pipeline import Pipeline, Step
from ktgraph.properties import PROPERTIES, register_property
from ktgraph.repro import read_repro, write_repro
from ktgraph.runtime.plan import is_on_gpu
from ktgraph.validate import Validation, Validator

VARIABLE = "KTGRAPH_VALIDATE"
Before = Callable[[Pass, Module], None]
After = Callable[[PassRecord], None]


class PassError(KtgraphError, RuntimeError):
    """A pass went wrong.  `stage`: requires, run, verify, ensures, exact, validate or kernels."""

    def __init__(
        self, number: int, step: str, stage: str, reason: str, rewrite: BadRewrite | None
    ) -> None:
        super().__init__(reason)
        self.number = number
        self.step = step
        self.stage = stage
        self.reason = reason
        self.rewrite = rewrite
        self.report: PassReport | None = None  # of the passes before it
        self.dump: Path | None = None
        self.repro: Path | None = None

    @property
    def replay(self) -> str:
        """The command that shows the failure again."""
        return f"ktgraph replay {self.repro}"

    def __str__(self) -> str:
        lines = [f"pass {self.number} {self.step!r} failed ({self.stage}): {self.reason}"]
        lines += [f"  {self.rewrite}"] if self.rewrite else []
        lines += [f"  dump: {self.dump}"] if self.dump else []
        lines += [f"  show it again: {self.replay}"] if self.repro else []
        return "\n".join(lines)


@dataclass
class PassManager:
    """Runs pipelines.  Instruments are plain callables: before(pass, module), after(record)."""

    before: list[Before] = field(default_factory=list[Before])
    after: list[After] = field(default_factory=list[After])

    def run(
        self,
        module: Module,
        pipeline: str | Pipeline | Sequence[Pass] = "default",
        ctx: PassContext | None = None,
        *,
        validate: int | None = None,
        dump: str | Path | DumpRequest | None = None,
        applied: Sequence[str] = (),
        validator: Validator | None = None,
    ) -> PassReport:
        """Run the steps on the module, in place.

        `validate` and `dump` default to KTGRAPH_VALIDATE and KTGRAPH_DUMP; `applied` names passes
        that the module has already seen, so that steps and files are numbered on from there.
        Raises PassError for the first pass that goes wrong, PipelineError for a malformed pipeline.
        """
        steps = Pipeline.of(pipeline)
        context = ctx or PassContext()
        level = validation_level() if validate is None else validate
        folder = _open_dump(dump, module, steps, context, applied)
        report = PassReport(module, str(module))
        report.folder = str(folder.path) if folder is not None else None
        run = _Run(self, module, context, level, folder, report, validator or Validator())
        names = list(applied)
        for number, step in enumerate(steps.steps, start=len(applied) + 1):
            names.append(step.name)
            run.step(number, step, names)
        if folder is not None:
            folder.close(module)
        return report


def validation_level() -> int:
    """KTGRAPH_VALIDATE as 0, 1 or 2; raises KtgraphError for anything else."""
    text = os.environ.get(VARIABLE, "0")
    if text not in ("0", "1", "2"):
        raise KtgraphError(f"{VARIABLE}={text}: expected 0, 1 or 2")
    return int(text)


def _open_dump(
    dump: str | Path | DumpRequest | None,
    module: Module,
    pipeline: Pipeline,
    ctx: PassContext,
    applied: Sequence[str],
) -> DumpFolder | None:
    request = DumpRequest.from_environment() if dump is None else dump
    if request is None:
        return None
    if not isinstance(request, DumpRequest):
        request = DumpRequest(Path(request))
    return DumpFolder.create(request, module, pipeline, ctx, applied)


@dataclass
class _Run:
    """One call of `PassManager.run`."""

    manager: PassManager
    module: Module
    ctx: PassContext
    level: int
    folder: DumpFolder | None
    report: PassReport
    validator: Validator

    def step(self, number: int, step: Step, applied: Sequence[str]) -> None:
        for instrument in self.manager.before:
            instrument(step.instance, self.module)
        before = self.module.clone()
        text = self.report.before if not self.report.records else str(before)
        try:
            done = apply_step(step, self.module, self.ctx)
        except StepError as error:
            raise self._failure(number, step, before, error.stage, str(error)) from error
        start = time.perf_counter()
        found = self._validate(before, done)
        spent = 1e3 * (time.perf_counter() - start)
        if found is not None and found.is_wrong:
            raise self._failure(number, step, before, "validate", found.fault)
        skipped = self._check_kernels(number, step, before, done)
        done = replace(done, notes=(*done.notes, *skipped))
        record = _record(number, step, done, found, spent, self.module)
        self.report.records.append(record)
        if self.folder is not None:
            self.folder.add(record, text, applied)
        for instrument in self.manager.after:
            instrument(record)

    def _validate(self, before: Module, done: Applied) -> Validation | None:
        if self.level < 1 or not done.changed:
            return None
        return self.validator.compare(before, self.module, done.numerics)

    def _check_kernels(self, number: int, step: Step, before: Module, done: Applied) -> list[str]:
        """Level 2: once ops name kernels, run those that can run here; says which could not."""
        skipped: list[str] = []
        if self.level < 2 or not done.changed or not any(op.via for op in self.module.walk()):
            return skipped
        if is_on_gpu(self.module) and (why := why_no_gpu_kernels()):
            skipped.append(f"kernels of the GPU were not checked: {why}")
        try:
            found = check_kernels(self.module, self.validator.seed)
        except MiniatureError as error:
            return [f"kernels were not checked: {error}"]
        for item in (k for k in found if k.is_wrong):
            reason = f"kernel {item.kernel}: NMSE {item.error:.3g} against the reference, "
            reason += f"allowed: {item.bound:g}\n  in: {item.op}"
            raise self._failure(number, step, before, "kernels", reason)
        unmet = gpu_kernels(self.module) - {k.kernel for k in found}
        if unmet and not skipped:
            names = ", ".join(sorted(unmet))
            skipped.append(f"not checked, as they do not take the miniature's sizes: {names}")
        return skipped

    def _failure(
        self, number: int, step: Step, before: Module, stage: str, reason: str
    ) -> PassError:
        rewrite = self._bad_rewrite(step, before, stage)
        error = PassError(number, str(step), stage, reason, rewrite)
        where = self.folder.path / "repro" if self.folder is not None else _temporary()
        error.report = self.report
        error.dump = self.folder.path if self.folder is not None else None
        error.repro = write_repro(
            where,
            before,
            step,
            self.ctx,
            level=self.level,
            seed=self.validator.seed,
            failure=str(error),
        )
        if self.folder is not None:
            self.folder.fail(str(error), error.repro, self.module)
        return error

    def _bad_rewrite(self, step: Step, before: Module, stage: str) -> BadRewrite | None:
        if stage in ("requires", "exact", "kernels"):
            return None

        def judge(after: Module, numerics: Numerics) -> str:
            if stage != "validate":
                return ""
            return self.validator.compare(before, after, numerics).fault

        return first_bad_rewrite(step, before, self.ctx, judge)


def _temporary() -> Path:
    return Path(tempfile.mkdtemp(prefix="ktgraph-repro-"))


def _record(
    number: int,
    step: Step,
    done: Applied,
    found: Validation | None,
    spent: float,
    module: Module,
) -> PassRecord:
    return PassRecord(
        number, step.name, str(step), done.changed, done.ops_before, done.ops_after,
        done.ms, done.verify_ms, done.numerics, done.events, done.notes,
        text=str(module) if done.changed else None,
        error=found.error if found is not None else None,
        how=found.how if found is not None else "",
        validate_ms=spent,
    )  # fmt: skip


def replay(folder: str | Path, validate: int | None = None) -> PassReport:
    """Run a repro folder's pass again; raises the PassError it shows, or returns a report."""
    repro = read_repro(folder)
    return PassManager().run(
        repro.recorded.module,
        repro.pipeline,
        repro.recorded.context(),
        validate=repro.level if validate is None else validate,
        validator=Validator(repro.seed, repro.trace),
    )


__all__ = [
    "PROPERTIES",
    "After",
    "Before",
    "PassError",
    "PassManager",
    "PassRecord",
    "PassReport",
    "register_property",
    "replay",
    "validation_level",
]
