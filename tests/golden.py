"""Golden files: what passes make of `.ktir` text, reviewed as a diff.

    // RUN fuse-norms                a pipeline string; a comment after it is the case's title
    ktgraph.ir 1 …                   the module before
    // EXPECT
    ktgraph.ir 1 …                   the module after; `pytest --update-golden` writes it
    // REFUSE "part of a reason"     some rule says so; without EXPECT the module stays as it is

A file holds any number of cases.  Each one is also verified, run again (nothing may change) and
validated: module before and after give the same results on the miniature.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from ktgraph.ir.graph import Module
from ktgraph.ir.parser import parse_module
from ktgraph.ir.verify import verify
from ktgraph.pass_api import PassContext
from ktgraph.pipeline import Pipeline
from ktgraph.validate import Validator

_RUN = re.compile(r"^// RUN ", re.MULTILINE)
_EXPECT = "// EXPECT\n"
_REFUSE = re.compile(r'^// REFUSE "(.*)"\n', re.MULTILINE)


@dataclass(frozen=True)
class Case:
    """One RUN of a golden file."""

    file: Path
    number: int
    pipeline: str
    title: str
    before: str
    expected: str | None
    refusals: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.number}-{self.title or self.pipeline}".replace(" ", "-")


def golden_cases(file: Path) -> list[Case]:
    """The cases of a golden file, for `pytest.mark.parametrize(…, ids=str)`."""
    return [_case(file, n, part) for n, part in enumerate(_parts(file.read_text())[1:])]


def _parts(text: str) -> list[str]:
    """What stands before the first RUN, then the text of each case without its ``// RUN``."""
    return _RUN.split(text)


def _case(file: Path, number: int, part: str) -> Case:
    head, _, body = part.partition("\n")
    pipeline, _, title = head.partition(" // ")
    refusals = _REFUSE.findall(body)
    before, expect, after = _REFUSE.sub("", body).partition(_EXPECT)
    expected = after.strip() + "\n" if expect else None
    return Case(file, number, pipeline.strip(), title.strip(), before, expected, refusals)


def check_case(case: Case, update: bool = False) -> None:
    """Run a case and compare; with `update`, write what came out into the file instead."""
    before = parse_module(case.before, f"{case.file.name}, case {case.number}")
    verify(before)
    module, context = before.clone(), PassContext()
    _run(case.pipeline, module, context)
    verify(module)
    _check_refusals(case, context)
    if case.expected is None and case.refusals:
        assert str(module) == str(before), f"{case.pipeline} was to refuse, and changed the module"
        return
    _check_results(case, before, module)
    again = module.clone()
    _run(case.pipeline, again, PassContext())
    assert str(again) == str(module), f"{case.pipeline} changes its own output"
    if update:
        _write(case, str(module))
        return
    assert case.expected is not None, "no EXPECT yet: pytest --update-golden writes it"
    assert str(module) == case.expected


def _run(pipeline: str, module: Module, context: PassContext) -> None:
    for step in Pipeline.of(pipeline).steps:
        step.instance.run(module, context)


def _check_refusals(case: Case, context: PassContext) -> None:
    reasons = [e.reason for e in context.events if e.outcome != "matched"]
    for wanted in case.refusals:
        assert any(wanted in reason for reason in reasons), f"no rule says {wanted!r}: {reasons}"


def _check_results(case: Case, before: Module, after: Module) -> None:
    """Equal results on the miniature, within what the least exact pass allows."""
    numerics = [s.instance.numerics for s in Pipeline.of(case.pipeline).steps]
    found = Validator().compare(before, after, max(numerics, key=lambda n: n.tolerance))
    assert not found.fault, found.fault
    assert found.error is not None, found.how


def _write(case: Case, text: str) -> None:
    parts = _parts(case.file.read_text())
    part = parts[case.number + 1]
    refusals = "".join(m.group() for m in _REFUSE.finditer(part))
    kept = _REFUSE.sub("", part).partition(_EXPECT)[0]
    end = "\n" if case.number + 2 < len(parts) else ""
    parts[case.number + 1] = f"{kept}{_EXPECT}{text}{refusals}{end}"
    case.file.write_text("// RUN ".join(parts))


__all__ = ["Case", "check_case", "golden_cases"]
