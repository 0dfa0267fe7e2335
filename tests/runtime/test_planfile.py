"""A .ktplan starts without tracing, passes or packing, and says why it does not fit."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lowered_models import MIXED, Pair, make_pair, prompts

from ktgraph.pass_api import Pass
from ktgraph.runtime import packed, planfile
from ktgraph.runtime.planfile import FORMAT, PlanFileError, load_plan
from ktgraph.runtime.planfile_write import save_plan
from ktgraph.weights import encodings, evaluate
from ktgraph.weights.sources import RandomSource


def save(pair: Pair, path: Path, **more: Any) -> Path:
    print_ = pair.source.fingerprint()
    save_plan(path, pair.runner, pair.options, fingerprint=print_, **more)
    return path


@pytest.fixture
def saved(mla: Pair, tmp_path: Path) -> Path:
    extras = {"tokenizer.json": '{"é": 1}'}
    return save(mla, tmp_path / "m.ktplan", pipeline="a,b", target="x = 1\n", extras=extras)


def logits(runner: Any) -> torch.Tensor:
    seq = runner.open()
    found = [runner.forward([(seq, ids)], "all") for ids in prompts(21, 1, 1)]
    runner.close(seq)
    return torch.cat(found)


def rewrite(path: Path, change: Callable[[dict[str, bytes]], None]) -> None:
    """Change members; packed.bin stays aligned only by luck, so it is moved by its own writer."""
    with zipfile.ZipFile(path) as archive:
        members = {i.filename: archive.read(i) for i in archive.infolist()}
    change(members)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def change_json(path: Path, name: str, **values: Any) -> None:
    def change(members: dict[str, bytes]) -> None:
        members[name] = json.dumps({**json.loads(members[name]), **values}).encode()

    rewrite(path, change)


@pytest.mark.parametrize("name", ["native", "mixed"])
def test_round_trip_gives_the_same_bits(name: str, mla: Pair, tmp_path: Path) -> None:
    pair = mla if name == "native" else make_pair("gqa", MIXED)
    loaded = load_plan(save(pair, tmp_path / "m.ktplan"), pair.source)
    assert str(loaded.module) == str(pair.runner.module)
    assert loaded.options == pair.options
    assert torch.equal(logits(loaded.runner(threads=1)), logits(pair.runner))


def test_what_else_it_holds(saved: Path) -> None:
    loaded = load_plan(saved)
    assert (loaded.pipeline, loaded.target) == ("a,b", "x = 1\n")
    assert loaded.extras == {"tokenizer.json": '{"é": 1}'}
    with zipfile.ZipFile(saved) as archive:
        described = json.loads(archive.read("weights.json"))
        assert {i.compress_type for i in archive.infolist()} == {zipfile.ZIP_STORED}
    lines = " ".join(described["weights"])
    assert 'from "lm_head.weight"' in lines
    assert 'pack(@lm_head) {encoding = "tile.f32"}' in lines


def test_a_second_start_repeats_no_work(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("work of the first start was done again")

    for cls in Pass.__subclasses__():
        monkeypatch.setattr(cls, "run", work)
    monkeypatch.setattr(evaluate.WeightEvaluator, "stored", work)
    monkeypatch.setattr(evaluate.WeightEvaluator, "tensor", work)
    monkeypatch.setattr(encodings, "pack_matrix", work)
    monkeypatch.setattr(packed, "load_weights", work)
    assert logits(load_plan(saved).runner()).shape == (23, 61)


def test_weights_are_mapped_where_they_lie(saved: Path) -> None:
    loaded = load_plan(saved)
    assert loaded.weights is not None
    assert all(t.data_ptr() % 64 == 0 for t in loaded.weights.tensors.values())
    saved.unlink()  # the mapping keeps the bytes
    assert logits(loaded.runner()).isfinite().all()


def test_without_packed_weights(mla: Pair, tmp_path: Path) -> None:
    path = save(mla, tmp_path / "small.ktplan", packed=False)
    assert path.stat().st_size < 60_000
    loaded = load_plan(path, mla.source)
    assert torch.equal(logits(loaded.runner(mla.source)), logits(mla.runner))
    with pytest.raises(PlanFileError, match="give the model they come from"):
        load_plan(path).runner()


def test_every_mismatch_is_listed(saved: Path, mla: Pair) -> None:
    change_json(saved, "env.json", isa="avx2", kernels="0123", ktgraph="9.9")
    other = RandomSource(mla.runner.module, seed=5)
    with pytest.raises(PlanFileError) as caught:
        load_plan(saved, other, {"page_size": 16, "max_batch": 4})
    text = str(caught.value)
    for part in (
        "m.ktplan does not fit",
        "made by ktgraph 9.9",
        "instruction set avx2",
        "KTGRAPH_ISA=avx2",
        "library 0123",
        f"fingerprint {mla.source.fingerprint()}",
        "page_size=16 is asked for, it was made with 4",
    ):
        assert part in text
    assert "max_batch" not in text
    assert text.count("\n  - ") == 5


def test_another_format_is_told_before_anything_else(saved: Path) -> None:
    change_json(saved, "env.json", format="7")
    with pytest.raises(PlanFileError, match=f"reads format {FORMAT}, the file has 7"):
        load_plan(saved)


def _without_weights(members: dict[str, bytes]) -> None:
    del members["weights.json"]


def _no_json(members: dict[str, bytes]) -> None:
    members["options.json"] = b"{"


def _other_ir(members: dict[str, bytes]) -> None:
    members["plan.ktir"] = members["plan.ktir"].replace(b"func @", b"fnuc @", 1)


def _unknown_kernel(members: dict[str, bytes]) -> None:
    members["plan.ktir"] = members["plan.ktir"].replace(b"via cpu.linear", b"via cpu.lin", 1)


def _new_option(members: dict[str, bytes]) -> None:
    members["options.json"] = b'{"warp_speed": 9}'


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_without_weights, "lacks weights.json"),
        (_no_json, "options.json: Expecting"),
        (_other_ir, "plan.ktir cannot be planned"),
        (_unknown_kernel, "kernel cpu.lin is not registered"),
        (_new_option, "unknown option warp_speed"),
    ],
)
def test_a_damaged_member_is_named(saved: Path, change: Any, says: str) -> None:
    rewrite(saved, change)
    with pytest.raises(PlanFileError, match=says):
        load_plan(saved)


@pytest.mark.parametrize("keep", [0, 1, 29, 400, 5000, -20, -1])
def test_a_truncated_file_is_refused(saved: Path, keep: int) -> None:
    data = saved.read_bytes()
    saved.write_bytes(data[:keep])
    with pytest.raises(PlanFileError, match=r"is no whole \.ktplan"):
        load_plan(saved)


def test_a_changed_text_is_refused(saved: Path) -> None:
    data = saved.read_bytes()
    saved.write_bytes(data.replace(b"nn.embedding", b"nn.embeddinG", 1))
    with pytest.raises(PlanFileError, match="Bad CRC-32"):
        load_plan(saved)


@pytest.mark.parametrize("offset", [1 << 30, -64, "0", 64.5])
def test_moved_weights_are_refused(saved: Path, offset: object) -> None:
    with zipfile.ZipFile(saved) as archive:
        described = json.loads(archive.read("weights.json"))
    described["packed"][3]["offset"] = offset
    change_json(saved, "weights.json", **described)
    with pytest.raises(PlanFileError, match=r"weights.json does not hold @"):
        load_plan(saved)


def test_changed_weights_are_refused(saved: Path) -> None:
    with zipfile.ZipFile(saved) as archive:
        info = archive.getinfo("packed.bin")
    data = bytearray(saved.read_bytes())
    data[info.header_offset + 4096] ^= 0xFF
    saved.write_bytes(data)
    with pytest.raises(PlanFileError, match=r"the bytes of packed.bin have changed"):
        load_plan(saved)


@pytest.mark.parametrize("place", ["first", "middle", "last"])
@pytest.mark.parametrize("number", [0, 3, -1])
def test_large_files_are_checked_in_samples(
    mla: Pair, tmp_path: Path, number: int, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if these few kilobytes were more than 2 GiB: any weight, at both ends and in between."""
    monkeypatch.setattr(planfile, "_MOST_CHECKED", 0)
    monkeypatch.setattr(planfile, "_SAMPLE", 8)
    monkeypatch.setattr(planfile, "_STRIDE", 64)
    path = save(mla, tmp_path / "large.ktplan")
    loaded = load_plan(path)
    assert logits(loaded.runner()).isfinite().all()
    with zipfile.ZipFile(path) as archive:
        places = json.loads(archive.read("weights.json"))["packed"]
        start = planfile._data_offset(path, archive.getinfo("packed.bin"))
    found = places[number]
    inside = {"first": 0, "middle": found["nbytes"] // 128 * 64, "last": found["nbytes"] - 1}
    data = bytearray(path.read_bytes())
    data[start + found["offset"] + inside[place]] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(PlanFileError, match=r"the bytes of packed.bin have changed"):
        load_plan(path)


def test_saving_where_no_file_can_be(mla: Pair, tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match=rf"there is no folder {tmp_path / 'none'}: make it"):
        save(mla, tmp_path / "none" / "m.ktplan")
    with pytest.raises(PlanFileError, match="is a folder: give the name of a file in it"):
        save(mla, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "option", [{"page_size": 0}, {"max_batch": "x"}, {"threads": -3}, {"dtype": 3}]
)
def test_options_that_make_no_sense_are_refused(saved: Path, option: dict[str, Any]) -> None:
    change_json(saved, "options.json", **option)
    with pytest.raises(PlanFileError, match=rf"options.json: {next(iter(option))}="):
        load_plan(saved)


def test_a_failed_save_leaves_the_old_file(saved: Path, mla: Pair) -> None:
    before = saved.read_bytes()
    with pytest.raises(PlanFileError, match="belongs to the file itself"):
        save(mla, saved, extras={"env.json": ""})
    weights = mla.runner.executor.weights
    key = next(reversed(weights.tensors))
    kept = weights.tensors.pop(key)
    try:
        with pytest.raises(KeyError):
            save(mla, saved)
    finally:
        weights.tensors[key] = kept
    assert saved.read_bytes() == before
    assert [p.name for p in saved.parent.iterdir()] == [saved.name]


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match=r"none\.ktplan: no such file"):
        load_plan(tmp_path / "none.ktplan")
