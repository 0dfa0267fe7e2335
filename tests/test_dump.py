"""Dump folders: what is in them, when it is written, and going on from any file of one."""

import json
import re
from pathlib import Path

import broken_passes as broken
import pytest
from small_models import gqa_moe, mla_moe

from ktgraph.dump import DumpError, DumpFolder, DumpRequest
from ktgraph.ir.parser import parse_file
from ktgraph.pass_api import CompileOptions, PassContext
from ktgraph.pass_manager import PassError, PassManager
from ktgraph.pass_report import PassReport
from ktgraph.recorded import read_recorded
from ktgraph.target import load_target

PASSES = "canonicalize,specialize-phases,merge-linears,fuse-norms,moe-group"


def dumped(root: Path, pipeline=PASSES, module=None, **options) -> Path:
    ctx = PassContext(load_target("rtx4090-24g+xeon"), options=CompileOptions(**options))
    report = PassManager().run(module or mla_moe(), pipeline, ctx, dump=root, validate=1)
    assert report.folder is not None
    return Path(report.folder)


def test_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = dumped(tmp_path / "ktg_dump")
    assert folder.name == "0001-mla_moe"
    assert capsys.readouterr().err == f"ktgraph: dump in {folder}\n"
    assert {p.name for p in folder.iterdir()} == {
        "README.txt", "summary.txt", "rules.txt", "events.jsonl", "graph.html", "pipeline.txt",
        "target.toml", "00-import.ktir", "02-specialize-phases.ktir", "02-specialize-phases.diff",
        "03-merge-linears.ktir", "03-merge-linears.diff", "04-fuse-norms.ktir",
        "04-fuse-norms.diff", "05-moe-group.ktir", "05-moe-group.diff",
    }  # fmt: skip
    readme = (folder / "README.txt").read_text()
    assert "go on     ktgraph opt 05-moe-group.ktir" in readme
    assert re.search(r"04-fuse-norms.diff +what fuse-norms changed", readme)
    assert len((folder / "summary.txt").read_text().splitlines()) == 7
    assert "add-rms-norm: matched at" in (folder / "rules.txt").read_text()
    assert "+  %l0.x, %l0.h.1 = nn.add_rms_norm" in (folder / "04-fuse-norms.diff").read_text()


def test_events_are_one_object_a_line(tmp_path: Path):
    lines = (dumped(tmp_path) / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert [e["event"] for e in events if e["event"] != "rule"] == [
        "start", *["pass"] * 5, "end",
    ]  # fmt: skip
    fuse = next(e for e in events if e.get("name") == "fuse-norms")
    assert (fuse["changed"], fuse["matched"], fuse["nmse"]) == (True, 8, 0.0)
    assert {e["in_pass"] for e in events if e["event"] == "rule"} >= {"fuse-norms", "moe-group"}


def test_nothing_is_overwritten(tmp_path: Path):
    assert [dumped(tmp_path, "fuse-norms", m()).name for m in (mla_moe, gqa_moe, mla_moe)] == [
        "0001-mla_moe", "0002-gqa_moe", "0003-mla_moe",
    ]  # fmt: skip


def test_every_file_goes_on_to_the_same_end(tmp_path: Path):
    folder = dumped(tmp_path, max_tokens=64)
    end = parse_file(folder / "05-moe-group.ktir").structural_hash()
    for file in sorted(folder.glob("*.ktir")):
        recorded = read_recorded(file)
        assert recorded.rest is not None
        assert recorded.options == CompileOptions(max_tokens=64)
        assert recorded.target == load_target("rtx4090-24g+xeon")
        report = PassManager().run(recorded.module, recorded.rest, recorded.context())
        assert report.module.structural_hash() == end, file.name
    first = (folder / "04-fuse-norms.ktir").read_text().split("\n")[0]
    assert first == "// after: canonicalize,specialize-phases,merge-linears,fuse-norms"


def test_the_default_pipeline_goes_on_from_the_middle(tmp_path: Path):
    """Placement, quantization and lowering make the same choices again, from text alone."""
    folder = dumped(tmp_path, "default", gqa_moe(), max_tokens=64, quantize="experts=int8")
    assert (folder / "placement.txt").exists()
    end = parse_file(folder / "20-lower.ktir").structural_hash()
    for name in ("06-specialize-phases.ktir", "12-place.ktir", "19-plan-memory.ktir"):
        recorded = read_recorded(folder / name)
        assert recorded.rest is not None
        PassManager().run(recorded.module, recorded.rest, recorded.context())
        assert recorded.module.structural_hash() == end, name


def test_artifacts_are_written_when_their_pass_is_done(tmp_path: Path):
    seen: list[bool] = []
    manager = PassManager(after=[lambda r: seen.append(any(tmp_path.glob("*/looked.txt")))])
    manager.run(mla_moe(), [broken.Good(), broken.Nothing()], dump=tmp_path)
    assert seen == [False, True]
    assert next(tmp_path.glob("*/looked.txt")).read_text() == "everywhere\n"


def test_files_are_there_before_the_next_pass(tmp_path: Path):
    seen: list[int] = []
    manager = PassManager(before=[lambda p, m: seen.append(len(list(tmp_path.glob("*/*.ktir"))))])
    manager.run(mla_moe(), PASSES, dump=tmp_path)
    assert seen == [1, 1, 2, 3, 4]


def test_pass_filter(tmp_path: Path):
    request = DumpRequest.parse(f"{tmp_path}:fuse|group")
    report = PassManager().run(mla_moe(), PASSES, dump=request)
    assert report.folder is not None
    assert sorted(p.name for p in Path(report.folder).glob("*.ktir")) == [
        "00-import.ktir", "04-fuse-norms.ktir", "05-moe-group.ktir",
    ]  # fmt: skip
    with pytest.raises(DumpError, match="is no regex"):
        DumpRequest.parse("d:(")


def test_a_failure_leaves_all_that_is_known(tmp_path: Path):
    with pytest.raises(PassError) as error:
        PassManager().run(mla_moe(), [broken.Good(), broken.Untyped()], dump=tmp_path)
    folder = tmp_path.resolve() / "0001-mla_moe"
    assert (error.value.dump, error.value.repro) == (folder, folder / "repro")
    assert {"00-import.ktir", "01-good.ktir", "failure.txt", "repro", "graph.html"} <= {
        p.name for p in folder.iterdir()
    }
    assert "logits.gather" in (folder / "failure.txt").read_text()
    assert '"event": "failure"' in (folder / "events.jsonl").read_text()


def test_no_weights_in_a_dump(tmp_path: Path):
    folder = dumped(tmp_path, "fuse-norms", mla_moe().rebind(D=4096, VOC=100_000))
    assert sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) < 200_000


def test_a_folder_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DumpError, match="cannot dump into"):
        PassManager().run(mla_moe(), "fuse-norms", dump=tmp_path / "file")


def test_reports_know_their_folder(tmp_path: Path):
    report = PassManager().run(mla_moe(), "fuse-norms")
    assert isinstance(report, PassReport)
    assert report.folder is None


def test_a_full_disk_is_one_message(tmp_path: Path):
    (tmp_path / "summary.txt").symlink_to("/dev/full")
    folder = DumpFolder(tmp_path, PassContext(None, None, CompileOptions()))
    with pytest.raises(DumpError, match=r"cannot dump into .*: No space left.*another folder"):
        folder.write("summary.txt", "text")
