"""`ktgraph quantize`: packed once, whole or not at all, and every start from it is the same."""

from __future__ import annotations

import errno
import fcntl
import json
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import ktgraph as kt
import ktgraph.packed_folder as packed_folder_module
from ktgraph.cli import main
from ktgraph.errors import UnsupportedInputError
from ktgraph.packed_folder import PLAN, write_folder
from ktgraph.runtime import packed, planfile_write
from ktgraph.runtime.plan import Plan
from ktgraph.runtime.planfile import PlanFileError
from ktgraph.runtime.planfile_draft import Draft
from ktgraph.runtime.planfile_write import DiskSpaceError

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def lowered(talking_model: Path) -> kt.Lowered:
    return kt.trace(talking_model).lower("cpu")


@pytest.fixture(scope="module")
def compiled(talking_model: Path) -> kt.Compiled:
    return kt.compile(talking_model, "cpu", quantize="int8", max_batch=2)


def small_file(folder: Path, tmp_path: Path) -> Path:
    """A copy that tests may spoil."""
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def test_a_start_gives_the_same_bits(packed_folder: Path, compiled: kt.Compiled) -> None:
    ids = [list(range(3, 40)), [5, 6]]
    for exe in (kt.compile(packed_folder), kt.load(packed_folder), kt.load(packed_folder / PLAN)):
        for got, want in zip(exe(ids), compiled(ids), strict=True):
            assert torch.equal(got, want)
    assert exe.generate(PROMPT, 8) == compiled.generate(PROMPT, 8)
    assert exe.made.options == compiled.made.options


def test_a_start_neither_traces_nor_packs(
    packed_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("work of packing was done again")

    monkeypatch.setattr("ktgraph.weights.encodings.pack_matrix", work)
    monkeypatch.setattr("ktgraph.frontends.hf.trace_hf", work)
    assert kt.compile(packed_folder).generate(PROMPT, 2)


def test_what_the_folder_holds(packed_folder: Path) -> None:
    assert {p.name for p in packed_folder.iterdir()} >= {PLAN, "quantize.txt", "memory.txt"}
    assert "int8" in (packed_folder / "quantize.txt").read_text()
    assert [p.name for p in packed_folder.parent.iterdir()] == [packed_folder.name]


def test_weights_are_packed_one_after_another(
    lowered: kt.Lowered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight is written, and let go, before the one behind the next few is made."""
    written, made = list[int](), list[int]()
    bytes_of, made_of = planfile_write._bytes_of, packed._made

    def write(tensor: torch.Tensor) -> Any:
        written.append(tensor.nbytes)
        assert len(made) - len(written) <= packed._WORKERS
        return bytes_of(tensor)

    def make(evaluator: Any, use: Any) -> torch.Tensor:
        made.append(1)
        return made_of(evaluator, use)

    monkeypatch.setattr(planfile_write, "_bytes_of", write)
    monkeypatch.setattr(packed, "_made", make)
    lowered.save(tmp_path / PLAN)
    nbytes, packing = lowered.packing()
    assert sum(written) == nbytes
    assert packing < nbytes
    assert kt.load(tmp_path / PLAN).generate([4, 5], 3, eos=())


def test_a_plan_for_a_gpu_is_packed_without_one(talking_model: Path, tmp_path: Path) -> None:
    lowered = kt.trace(talking_model).lower(kt.hybrid(gpu="simulated"), quantize="int8")
    write_folder(lowered, tmp_path / "m")
    found = kt.load(tmp_path / "m").generate([4, 5, 6], 4, eos=())
    assert found == lowered.compile().generate([4, 5, 6], 4, eos=())


def test_run_starts_from_it(packed_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(packed_folder), PROMPT, "--max-new-tokens", "4"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(PROMPT)
    assert err.splitlines()[0] == f"weights packed already: {packed_folder / PLAN}"


def test_what_may_change_at_a_start(packed_folder: Path) -> None:
    exe = kt.compile(packed_folder, context=64, cache_rows=96, threads=1)
    assert (exe.limits.context, exe.limits.cache_rows, exe.runner.executor.threads) == (64, 96, 1)
    with pytest.raises(UnsupportedInputError, match="was made for 1024 positions"):
        kt.load(packed_folder, context=5000)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"quantize": "int4p(group=32)"}, "quantize='int4p.group=32.'"),
        ({"target": "hybrid", "max_batch": 4}, "max_batch=4, target='hybrid'"),
        ({"dtype": "bf16"}, "dtype='bf16'"),
    ],
)
def test_what_may_not_change(packed_folder: Path, given: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedInputError, match=f"{named} cannot change now.*ktgraph quantize"):
        kt.compile(packed_folder, **given)


def test_it_cannot_be_traced(packed_folder: Path) -> None:
    for path in (packed_folder, packed_folder / PLAN):
        with pytest.raises(UnsupportedInputError, match="needs the checkpoint that it was made"):
            kt.trace(path)


def test_another_machine_is_told(packed_folder: Path, tmp_path: Path) -> None:
    folder = small_file(packed_folder, tmp_path)
    with zipfile.ZipFile(folder / PLAN) as archive:
        members = {i.filename: archive.read(i) for i in archive.infolist()}
    env = json.loads(members["env.json"])
    members["env.json"] = json.dumps({**env, "isa": "avx9"}).encode()
    with zipfile.ZipFile(folder / PLAN, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    with pytest.raises(PlanFileError) as caught:
        kt.compile(folder)
    assert "made for the instruction set avx9, this machine uses" in str(caught.value)
    assert f"ktgraph quantize MODEL -o {folder}" in str(caught.value)


@pytest.mark.parametrize("what", ["error", "interrupt"])
def test_nothing_half_written_is_left(
    lowered: kt.Lowered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    error = KeyboardInterrupt if what == "interrupt" else OSError

    def fail(*args: Any) -> None:
        raise error

    monkeypatch.setattr(planfile_write, "_bytes_of", fail)
    with pytest.raises(error):
        write_folder(lowered, tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


# -- going on after an interrupt -------------------------------------------------------------------
STOP = 5  # weights that are finished when it is interrupted


@pytest.fixture
def stopped(lowered: kt.Lowered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that was to be written; its draft holds some weights."""
    stop(lowered, tmp_path / "m", monkeypatch, KeyboardInterrupt())
    return tmp_path / "m"


def stop(
    lowered: kt.Lowered,
    folder: Path,
    patch: pytest.MonkeyPatch,
    error: BaseException,
    seen_as: type[BaseException] | None = None,
) -> list[str]:
    told: list[str] = []
    seen: list[int] = []
    bytes_of = planfile_write._bytes_of

    def write(tensor: torch.Tensor) -> Any:
        seen.append(tensor.nbytes)
        if len(seen) > STOP:
            raise error
        return bytes_of(tensor)

    with patch.context() as patched:
        patched.setattr(planfile_write, "_bytes_of", write)
        with pytest.raises(seen_as or type(error)):
            write_folder(lowered, folder, say=told.append)
    return told


def count_made(patch: pytest.MonkeyPatch) -> list[str]:
    """A list that grows by every weight that is packed."""
    made: list[str] = []
    made_of = packed._made

    def make(evaluator: Any, use: Any) -> torch.Tensor:
        made.append(use.key)
        return made_of(evaluator, use)

    patch.setattr(packed, "_made", make)
    return made


def members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        return {i.filename: archive.read(i) for i in archive.infolist()}


def test_it_goes_on_behind_finished_weights(
    lowered: kt.Lowered, stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [p.name for p in tmp_path.iterdir()] == [".m.part"]
    assert not stopped.exists()
    made, told = count_made(monkeypatch), list[str]()
    write_folder(lowered, stopped, say=told.append)
    uses = Plan.build(lowered.module).loaded()
    assert sorted(made) == sorted(u.key for u in uses[STOP:])
    assert told == [f"goes on where it stopped: {STOP} of {len(uses)} weights are packed already"]
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    assert PLAN in {p.name for p in stopped.iterdir()}
    assert not [p for p in stopped.iterdir() if p.name.startswith(".")]
    lowered.save(tmp_path / "whole.ktplan")
    assert members(stopped / PLAN) == members(tmp_path / "whole.ktplan")
    assert kt.load(stopped).generate([4, 5], 3, eos=())


def test_a_kill_before_the_folder_has_its_name_costs_nothing(
    lowered: kt.Lowered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(packed_folder_module, "_put", killed)
        with pytest.raises(KeyboardInterrupt):
            write_folder(lowered, tmp_path / "m")
    assert [p.name for p in tmp_path.iterdir()] == [".m.part"]
    (tmp_path / ".m.part" / f".{PLAN}.part.done").write_text("x")  # killed a moment earlier
    made, told = count_made(monkeypatch), list[str]()
    write_folder(lowered, tmp_path / "m", say=told.append)
    assert made == []
    assert re.fullmatch(r"goes on where it stopped: all \d+ weights are packed already", told[0])
    assert not [p for p in (tmp_path / "m").iterdir() if p.name.startswith(".")]
    assert kt.load(tmp_path / "m").generate([4, 5], 3, eos=())


def test_a_whole_file_of_other_options_is_packed_anew(
    talking_model: Path, lowered: kt.Lowered, tmp_path: Path
) -> None:
    lowered.save(tmp_path / PLAN)
    other = kt.trace(talking_model).lower("cpu", quantize="int8")
    other.save(tmp_path / PLAN, resume=True)
    assert kt.load(tmp_path / PLAN).made.options.quantize == "int8"


def test_a_file_without_weights_is_not_whole(lowered: kt.Lowered, tmp_path: Path) -> None:
    """It has the texts of one with weights."""
    lowered.compile().save(tmp_path / PLAN, weights=False)
    lowered.save(tmp_path / PLAN, resume=True)
    assert kt.load(tmp_path / PLAN).generate([4, 5], 3, eos=())


def test_a_disk_that_fills_up_is_told_and_keeps_what_is_finished(
    lowered: kt.Lowered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    told = stop(lowered, tmp_path / "m", monkeypatch, full, seen_as=DiskSpaceError)
    assert told[0].startswith("stopped: the same command goes on from here")
    assert write_folder(lowered, tmp_path / "m") == tmp_path / "m"


def test_where_it_stopped_is_told(
    lowered: kt.Lowered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = stop(lowered, tmp_path / "m", monkeypatch, KeyboardInterrupt())
    assert len(told) == 1
    assert "the same command goes on from here" in told[0]
    assert str(tmp_path / ".m.part") in told[0]


@pytest.mark.parametrize("spoilt", ["a byte", "the end", "the journal's last line", "the journal"])
def test_a_draft_that_is_not_as_it_was_is_packed_anew(
    spoilt: str, lowered: kt.Lowered, stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = stopped.with_name(".m.part") / f".{PLAN}.part"
    journal = draft.with_name(f"{draft.name}.done")
    data, lines = bytearray(draft.read_bytes()), journal.read_text()
    if spoilt == "a byte":
        data[len(data) // 2] ^= 1
    if spoilt == "the end":
        del data[len(data) * 3 // 4 :]
    draft.write_bytes(data)
    journal.write_text(
        {"the journal": "x", "the journal's last line": lines[:-3]}.get(spoilt, lines)
    )
    made = count_made(monkeypatch)
    write_folder(lowered, stopped)
    count = len(Plan.build(lowered.module).loaded())
    assert len(made) == (count - STOP + 1 if "line" in spoilt else count)
    lowered.save(stopped / "whole.ktplan")
    assert members(stopped / PLAN) == members(stopped / "whole.ktplan")


def test_other_options_begin_anew(
    talking_model: Path, stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = kt.trace(talking_model).lower("cpu", quantize="int8")
    made = count_made(monkeypatch)
    write_folder(other, stopped)
    assert len(made) == len(Plan.build(other.module).loaded())
    assert kt.load(stopped).made.options.quantize == "int8"


def test_an_error_of_the_checkpoint_leaves_nothing(
    lowered: kt.Lowered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be there again."""
    told = stop(lowered, tmp_path / "m", monkeypatch, UnsupportedInputError("stopped"))
    assert (told, list(tmp_path.iterdir())) == ([], [])


def test_one_process_writes_at_a_time(lowered: kt.Lowered, stopped: Path) -> None:
    draft, told = stopped.with_name(".m.part") / f".{PLAN}.part", list[str]()
    with draft.open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(PlanFileError, match="another process writes it now"):
            write_folder(lowered, stopped, say=told.append)
    assert told == []  # nothing of the other's is to be deleted
    assert {p.name for p in draft.parent.iterdir()} == {draft.name, f"{draft.name}.done"}


def test_a_draft_that_becomes_the_file_is_not_written_into(tmp_path: Path) -> None:
    """Its owner ends between the moment that another opens it and the moment that it locks it."""
    draft = Draft(tmp_path / PLAN, "key")
    with draft.file.open("w+b") as file:
        draft._lock(file)
        draft.file.rename(draft.path)
        with pytest.raises(PlanFileError, match="another process writes it now"):
            draft._lock(file)
        draft.file.touch()  # a third one's
        with pytest.raises(PlanFileError, match="another process writes it now"):
            draft._lock(file)


def test_the_disk_is_asked_first(
    lowered: kt.Lowered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(DiskSpaceError, match=r"this writes \d+.* MiB, and its disk has 1 MiB free"):
        lowered.save(tmp_path / PLAN)
    assert list(tmp_path.iterdir()) == []


def test_where_it_may_write(
    packed_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("x")
    places = {
        packed_folder: "holds a packed model: give another name, or replace it with --overwrite",
        tmp_path: "holds other files, and no model.ktplan",
        tmp_path / "file": "is a file",
        tmp_path / "no" / "where": "there is no folder",
    }
    for place, message in places.items():
        assert main(["quantize", "nowhere", "-o", str(place)]) == 2
        assert message in capsys.readouterr().err


def test_overwrite_replaces_when_all_is_written(
    packed_folder: Path, lowered: kt.Lowered, tmp_path: Path
) -> None:
    folder = small_file(packed_folder, tmp_path)
    (folder / "old").write_text("x")
    write_folder(lowered, folder, overwrite=True)
    assert not (folder / "old").exists()
    assert kt.load(folder).made.options.quantize is None
    assert [p.name for p in tmp_path.iterdir()] == [folder.name]
