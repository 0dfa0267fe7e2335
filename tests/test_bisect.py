"""Bisection and repro folders: the first bad pass, the first bad rewrite, shown again elsewhere."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import broken_passes as broken
import pytest
from small_models import mla_moe

from ktgraph.bisect import bisect
from ktgraph.ops.registry import no
from ktgraph.pass_api import PassContext
from ktgraph.pass_manager import PassError, PassManager, replay
from ktgraph.pipeline import Pipeline
from ktgraph.repro import ReproError, read_repro
from ktgraph.target import load_target

PLUGIN = Path(broken.__file__)


@pytest.fixture(autouse=True)
def repro_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def pipeline() -> str:
    return f"merge-linears,{PLUGIN}:good,{PLUGIN}:one-bad-rule,fuse-norms"


def test_the_first_bad_pass_and_rewrite():
    found = bisect(mla_moe(), pipeline())
    assert found is not None
    assert (found.number, found.step.split(":")[-1]) == (3, "one-bad-rule")
    assert found.rewrite is not None
    assert found.rewrite.event.rule == "drops-eps"
    assert "%h = nn.rms_norm %l1.y, @norm" in str(found)


def test_nothing_wrong_is_none():
    assert bisect(mla_moe(), "merge-linears,fuse-norms") is None


def test_invalid_ir_and_crashes_are_found_too():
    found = bisect(mla_moe(), [broken.Good(), broken.Untyped()])
    assert found is not None
    assert (found.number, found.rewrite) == (2, None)
    assert found.reason.startswith("verify:")
    found = bisect(mla_moe(), [broken.Crashes()])
    assert found is not None
    assert found.rewrite is not None
    assert found.rewrite.number == 3


def test_a_check_of_ones_own():
    """The epsilon of the last norm: no run of the model is needed."""

    def check(module):
        norms = [op for op in module.walk() if op.name.endswith("rms_norm")]
        return norms[-1].attrs["eps"] == 1e-6 or no("the last norm has another epsilon")

    found = bisect(mla_moe(), pipeline(), check=check)
    assert found is not None
    assert (found.number, found.reason) == (3, "the last norm has another epsilon")
    assert found.rewrite is not None
    assert found.rewrite.event.rule == "drops-eps"
    with pytest.raises(ValueError, match="fails before any pass"):
        bisect(mla_moe(), pipeline(), check=lambda module: no("never"))
    assert bisect(mla_moe(), "fuse-norms", check=check) is None


def failing() -> Path:
    ctx = PassContext(target=load_target("rtx4090-24g+xeon"))
    with pytest.raises(PassError) as error:
        PassManager().run(mla_moe(), pipeline(), ctx, validate=1)
    assert error.value.repro is not None
    return error.value.repro


def test_a_repro_folder_shows_the_same_failure_again():
    folder = failing()
    names = {p.name for p in folder.iterdir()}
    assert names == {
        "module.ktir", "pipeline.txt", "target.toml", "inputs.safetensors", "env.json", "run.sh",
    }  # fmt: skip
    env = json.loads((folder / "env.json").read_text())
    assert env["validate"] == 1
    assert {"python", "torch", "ktgraph"} <= env["versions"].keys()
    repro = read_repro(folder)
    assert repro.pipeline.names == ("one-bad-rule",)
    assert repro.recorded.target == load_target("rtx4090-24g+xeon")
    with pytest.raises(PassError) as again:
        replay(folder)
    assert "first bad rewrite" in repro.failure
    assert again.value.reason in repro.failure
    found = bisect(folder)
    assert found is not None
    assert found.rewrite is not None
    assert found.rewrite.event.rule == "drops-eps"


def test_no_weights_in_a_repro_folder():
    assert sum(p.stat().st_size for p in failing().iterdir()) < 40_000


def test_run_sh_in_another_process(tmp_path: Path):
    folder = failing()
    command = tmp_path / "bin" / "ktgraph"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m ktgraph.cli "$@"\n')
    command.chmod(0o755)
    env = os.environ | {"PATH": f"{command.parent}:{os.environ['PATH']}"}
    done = subprocess.run([folder / "run.sh"], env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert "one-bad-rule' failed (validate)" in done.stderr
    assert "drops-eps at: %h = nn.rms_norm" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_repaired_pass_replays_quietly(tmp_path: Path):
    folder = failing()
    settings = (folder / "pipeline.txt").read_text()
    (folder / "pipeline.txt").write_text(settings.replace(":one-bad-rule", ":good"))
    assert isinstance(replay(folder).records[0].changed, bool)


def test_what_is_no_repro_folder(tmp_path: Path):
    with pytest.raises(ReproError, match=r"module.ktir is missing"):
        read_repro(tmp_path)


def test_the_recorded_pipeline_of_a_file_is_bisected(tmp_path: Path):
    report = PassManager().run(mla_moe(), pipeline(), validate=0, dump=tmp_path / "d")
    assert report.folder is not None
    found = bisect(Path(report.folder) / "02-good.ktir")
    assert found is not None
    assert found.step.endswith("one-bad-rule")
    assert Pipeline.of(pipeline()).names[1] == "good"
