"""`ktgraph run` and `ktgraph dump` on a trained model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ktgraph.cli import main


@pytest.fixture
def reference(tiny_qwen: Path, tmp_path: Path) -> Path:
    """One prompt of the model's reference, a few tokens long."""
    data = json.loads((tiny_qwen / "reference.json").read_text())
    entry = data["greedy_float32"][0]
    path = tmp_path / "reference.json"
    path.write_text(json.dumps({"greedy_float32": [{**entry, "ids": entry["ids"][:12]}]}))
    return path


def test_run_streams_checks_and_dumps(
    tiny_qwen: Path, reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, dump = str(tiny_qwen), str(tmp_path / "dump")
    command = ["run", model, "The sea", "--max-new-tokens", "6", "--target", "cpu", "--dump", dump]
    assert main([*command, "--check", str(reference)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("The sea")
    assert out.endswith("\n")
    assert len(out) > len("The sea") + 6
    lines = err.splitlines()
    assert lines[1].startswith("needs ")
    assert any(line.startswith("prefill ") and "; decode 5 tokens in " in line for line in lines)
    assert "check: prompt 0 equal to the reference in all 12 tokens" in lines
    assert any("pack-weights" in line and "yes" in line for line in lines)
    assert lines[-1] == f"dump: {Path(dump).resolve() / '0001-qwen3_moe'}"


def test_check_says_where_it_differs(
    tiny_qwen: Path, reference: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = json.loads(reference.read_text())
    ids = data["greedy_float32"][0]["ids"]
    ours, ids[7] = ids[7], 44
    reference.write_text(json.dumps(data))
    assert main(["run", str(tiny_qwen), "--target", "cpu", "--check", str(reference)]) == 1
    (line,) = [ln for ln in capsys.readouterr().err.splitlines() if ln.startswith("check")]
    assert line.startswith(f"check: prompt 0 differs from the reference at token 7 of 12: {ours} ")


def test_check_wants_a_reference_file(tiny_qwen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = tiny_qwen / "config.json"
    assert main(["run", str(tiny_qwen), "--check", str(wrong)]) == 2
    assert capsys.readouterr().err.startswith(f"ktgraph run: {wrong}: not a reference file: ")


def test_dump_writes_every_pass_without_loading(
    tiny_qwen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dump", str(tiny_qwen), "--target", "cpu", "--dump", str(tmp_path)]) == 0
    folder = Path(capsys.readouterr().out.splitlines()[-1])
    assert folder.parent == tmp_path.resolve()
    assert {"README.txt", "summary.txt", "plan.txt"} <= {p.name for p in folder.iterdir()}
