"""The pass manager: change by hash, checks around every pass, records, one telling error."""

import re
import tempfile
from pathlib import Path

import broken_passes as broken
import pytest
from small_models import gqa_moe, mla_moe

from ktgraph.errors import KtgraphError
from ktgraph.ir.graph import Module
from ktgraph.pass_api import CompileOptions, PassContext
from ktgraph.pass_manager import PassError, PassManager, register_property, validation_level
from ktgraph.pass_report import UnknownStepError
from ktgraph.properties import PROPERTIES


@pytest.fixture(autouse=True)
def repro_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def fails(module: Module, *passes, ctx: PassContext | None = None, **how) -> PassError:
    with pytest.raises(PassError) as error:
        PassManager().run(module, list(passes), ctx, **how)
    return error.value


def test_records_say_what_each_pass_did():
    report = PassManager().run(mla_moe(), "moe-group,fuse-norms,fuse-norms", validate=1)
    group, fuse, again = report.records
    assert (group.changed, fuse.changed, again.changed) == (True, True, False)
    assert fuse.count("matched") == 4
    assert fuse.ops_after == fuse.ops_before - 4
    assert (fuse.error, fuse.how, again.error) == (0.0, "named dims", None)
    assert again.text is None
    row = next(line for line in str(report).split("\n") if line.startswith("2 "))
    assert re.search(r"fuse-norms\s+yes\s+4/0\s+\d+ → \d+\s+[\d.]+\s+[\d.]+\s+0\s+exact", row)


def test_change_is_decided_by_hash_and_not_by_names():
    report = PassManager().run(mla_moe(), [broken.Renames(), broken.Nothing()])
    assert [r.changed for r in report.records] == [False, False]
    assert "nothing: looked around" in str(report)


def test_questions_to_a_report():
    module = mla_moe()
    report = PassManager().run(module, "merge-linears,fuse-norms")
    assert report.ir_after("fuse-norms").structural_hash() == module.structural_hash()
    assert report.ir_after("merge-linears").structural_hash() != module.structural_hash()
    assert "+  %l0.x, %l0.h.1 = nn.add_rms_norm" in report.diff("fuse-norms")
    assert "%l1.h.1" in report.why_not("fuse-norms", layer=1)
    assert "%l0.h.1" not in report.why_not("fuse-norms", layer=1)
    assert report.why_not("fuse-norms", layer=7).endswith("not even in part at layer 7")
    with pytest.raises(UnknownStepError, match="no pass 'place' ran; those that did: merge"):
        report.diff("place")
    with pytest.raises(UnknownStepError, match=r"did you mean fuse-norms\?"):
        report.why_not("fuse-norm")


def test_events_inside_a_repeat_belong_to_every_layer():
    report = PassManager().run(gqa_moe(), "moe-group")
    assert "matched" in report.why_not("moe-group", layer=1)


def test_instruments_are_plain_callables():
    seen: list[str] = []
    manager = PassManager(
        before=[lambda p, module: seen.append(f"before {p.name}")],
        after=[lambda record: seen.append(f"after {record.name} {record.changed}")],
    )
    manager.run(mla_moe(), "fuse-norms")
    assert seen == ["before fuse-norms", "after fuse-norms True"]


def test_invalid_ir_names_the_pass_and_the_op():
    error = fails(mla_moe(), broken.Good(), broken.Untyped())
    assert (error.number, error.stage) == (2, "verify")
    assert "%rows = logits.gather %h, %batch" in str(error)
    assert f"show it again: ktgraph replay {error.repro}" in str(error)


def test_requires_and_ensures():
    assert "needs 'placed', but the module has no home device" in str(
        fails(mla_moe(), broken.Needs())
    )
    error = fails(mla_moe(), broken.Promises())
    assert error.stage == "ensures"
    assert "promises 'lowered', but no kernel was chosen" in str(error)


def test_properties_can_be_added(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ktgraph.properties.PROPERTIES", PROPERTIES)
    monkeypatch.setitem(PROPERTIES, "placed", PROPERTIES["placed"])
    register_property("placed", lambda module: True)
    PassManager().run(mla_moe(), [broken.Needs()])


def test_exact_refuses_a_lossy_pass_that_changes_something():
    exact = PassContext(options=CompileOptions(exact=True))
    PassManager().run(mla_moe(), [broken.Nothing()], exact)
    error = fails(mla_moe(), broken.Halves(), ctx=exact)
    assert "it is lossy (requant(nmse=0.0001)), and exact=True allows no loss" in str(error)


def test_a_crash_names_the_rewrite():
    error = fails(mla_moe(), broken.Crashes())
    assert (error.stage, error.reason) == ("run", "KeyError: 'lost'")
    assert error.rewrite is not None
    assert (error.rewrite.number, error.rewrite.total) == (3, 3)
    assert "mark at: %l0.attn = nn.linear" in str(error)


def test_validation_names_the_first_bad_rewrite():
    error = fails(mla_moe(), broken.Good(), broken.OneBadRule(), validate=1)
    assert (error.number, error.stage) == (2, "validate")
    assert error.rewrite is not None
    assert error.rewrite.event.rule == "drops-eps"
    assert (error.rewrite.number, error.rewrite.total) == (4, 4)
    assert "%h = nn.rms_norm %l1.y, @norm" in str(error)
    assert "results differ: NMSE" in str(error)
    assert error.report is not None
    assert [r.name for r in error.report.records] == ["good"]


def test_without_validation_a_wrong_pass_goes_through():
    PassManager().run(mla_moe(), [broken.OneBadRule()], validate=0)


def test_a_declared_loss_is_allowed_up_to_its_bound():
    report = PassManager().run(mla_moe(), [broken.Halves()], validate=1)
    assert report.records[0].error == pytest.approx(1e-6, rel=0.01)


def test_limit_counts_over_the_whole_run():
    ctx = PassContext(limit=3)
    report = PassManager().run(mla_moe(), "merge-linears,fuse-norms", ctx)
    assert [r.count("matched") for r in report.records] == [3, 0]


def test_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("KTGRAPH_VALIDATE", "1")
    monkeypatch.setenv("KTGRAPH_DUMP", f"{tmp_path}/d:fuse.*")
    report = PassManager().run(mla_moe(), "moe-group,fuse-norms")
    assert [r.error for r in report.records] == [0.0, 0.0]
    assert report.folder is not None
    written = {p.name for p in Path(report.folder).glob("*.ktir")}
    assert written == {"00-import.ktir", "02-fuse-norms.ktir"}
    monkeypatch.setenv("KTGRAPH_VALIDATE", "yes")
    with pytest.raises(KtgraphError, match="KTGRAPH_VALIDATE=yes: expected 0, 1 or 2"):
        validation_level()
