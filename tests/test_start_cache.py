"""What is kept from one start for the next: the same graph and weights, without transformers."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from quantized_checkpoints import make

from ktgraph import start_cache
from ktgraph.start_cache import folder_key, read_entry, write_entry
from ktgraph.target.host import cache_folder
from ktgraph.weights.safetensors_source import LAYOUT, SafetensorsSource

_SCRIPT = """
import sys
import ktgraph as kt
traced = kt.trace(sys.argv[1])
print(traced)
print(traced.lower("cpu", context=64, threads=1).compile().logits([[5, 3, 8]]).tolist())
print("transformers" in sys.modules)
"""


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, in a process that seems not to have loaded transformers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(start_cache, "sys", SimpleNamespace(modules={}))
    return tmp_path


@pytest.fixture
def folder(tiny_deepseek: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(tiny_deepseek, copy)
    return copy


def run(folder: Path, cache: Path) -> tuple[str, bool]:
    """What a process of its own prints of a model, and whether it loaded transformers."""
    env = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", _SCRIPT, str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    text, _, loaded = done.stdout.strip().rpartition("\n")
    return text, loaded == "True"


def test_the_second_start_is_the_first_without_transformers(folder: Path, tmp_path: Path) -> None:
    first, loaded = run(folder, tmp_path / "cache")
    assert loaded
    again, loaded = run(folder, tmp_path / "cache")
    assert not loaded
    assert again == first
    assert "func @main" in first


def test_what_an_entry_depends_on(
    folder: Path, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [folder_key(folder)]
    config = folder / "config.json"
    config.write_text(config.read_text() + " ")
    keys.append(folder_key(folder))
    (file,) = folder.glob("*.safetensors")
    file.rename(folder / "other.safetensors")
    keys.append(folder_key(folder))
    monkeypatch.setattr(start_cache, "_code_digest", lambda: "another version")
    keys.append(folder_key(folder))
    assert None not in keys
    assert len(set(keys)) == len(keys)


def test_the_code_is_part_of_it() -> None:
    digest = start_cache._code_digest.__wrapped__
    assert digest() == digest()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start_cache, "_PACKAGES", ("frontends", "ir", "ops", "weights"))
        assert digest() != start_cache._code_digest()


@pytest.mark.parametrize(
    ("name", "text", "same"),
    [
        ("RECORD", "transformers/modeling_utils.py,sha256=another,1", False),
        ("direct_url.json", '{"url": "file:///x", "dir_info": {"editable": true}}', None),
        ("direct_url.json", '{"url": "file:///x.whl", "archive_info": {}}', True),
    ],
)
def test_a_transformers_of_the_same_version(
    name: str, text: str, same: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another build is another one; a copy that somebody edits is never kept from."""
    read_text = metadata.PathDistribution.read_text
    monkeypatch.setattr(
        metadata.PathDistribution,
        "read_text",
        lambda self, file: text if file == name else read_text(self, file),
    )
    found = start_cache._code_digest.__wrapped__()
    assert (found is None) is (same is None)
    assert (found == start_cache._code_digest()) is (same is True)


def test_where_none_is_used(folder: Path, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With transformers loaded, without a whole checkpoint, or where the user says so."""
    assert folder_key(folder)
    for name in ("off", "OFF", "0"):
        monkeypatch.setenv("KTGRAPH_CACHE", name)
        assert folder_key(folder) is None
    monkeypatch.delenv("KTGRAPH_CACHE")
    monkeypatch.setattr(start_cache, "sys", sys)
    assert "transformers" in sys.modules
    assert folder_key(folder) is None
    monkeypatch.setattr(start_cache, "sys", SimpleNamespace(modules={}))

    def refused(path: Path) -> bytes:
        raise PermissionError(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", refused)
        assert folder_key(folder) is None
    (file,) = folder.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    assert folder_key(folder) is None
    assert folder_key(folder / "none") is None


@pytest.mark.parametrize("name", ["plain", "fp8", "mxfp4"])
def test_a_kept_layout_gives_the_same_weights(name: str, fresh: Path, folder: Path) -> None:
    if name != "plain":
        make(fresh, name)
        folder = fresh / name
    found = SafetensorsSource(folder)
    key = folder_key(folder)
    assert key is not None
    write_entry(key, LAYOUT, found.layout())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SafetensorsSource, "_find", None)
        kept = SafetensorsSource(folder)
    assert list(kept.names()) == list(found.names())
    for weight in found.names():
        assert kept.dtype(weight) == found.dtype(weight)
        assert kept.encoding(weight) == found.encoding(weight)
        assert torch.equal(kept.get(weight), found.get(weight)), weight
    assert (kept.nbytes, kept.fingerprint()) == (found.nbytes, found.fingerprint())


def fail(*args: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_entries_are_whole_or_not_there(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_entry("key", "f32.ktir", "text\nof two lines")
    assert read_entry("key", "f32.ktir") == "text\nof two lines"
    assert read_entry("key", "bf16.ktir") is None
    (file,) = (cache_folder() / "starts").iterdir()
    file.write_text(file.read_text()[:-1])
    assert read_entry("key", "f32.ktir") is None
    for number in range(70):
        write_entry(f"{number}", "f32.ktir", "x")
    assert len(list((cache_folder() / "starts").iterdir())) == 64
    assert read_entry("69", "f32.ktir") == "x"
    with monkeypatch.context() as full:  # a draft of a full disk does not stay
        full.setattr(Path, "replace", fail)
        write_entry("full", "f32.ktir", "x")
    assert not list((cache_folder() / "starts").glob(".*"))
    (fresh / "file").touch()
    monkeypatch.setenv(
        "XDG_CACHE_HOME", str(fresh / "file")
    )  # no folder: nothing is kept, nothing breaks
    write_entry("key", "f32.ktir", "x")
    assert read_entry("key", "f32.ktir") is None
