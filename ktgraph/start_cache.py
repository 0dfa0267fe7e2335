"""What a start from a checkpoint folder asks transformers and torch.export, kept for the next one.

That is the trace and which file tensors make up each parameter.  Both follow from config.json, the
headers of the files, ktgraph's own code, torch and transformers, so an entry is found by a digest
of all of these.  Where transformers is loaded already somebody may have changed what it gives:
nothing is read then, nor where it is installed for editing.  Entries lie in the user's cache
folder; KTGRAPH_CACHE=off does without.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import sys
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

from ktgraph.frontends.safetensors_files import CheckpointError, Shards
from ktgraph.target.host import cache_folder

log = logging.getLogger("ktgraph")

_PACKAGES = ("frontends", "ir", "ops", "weights", "rewrite")  # code that an entry follows from
_KEPT = 64  # files


def folder_key(folder: Path) -> str | None:
    """The digest by which entries of a checkpoint folder are found; None where none may be used."""
    if os.environ.get("KTGRAPH_CACHE", "").lower() in ("off", "0"):
        return None
    if "transformers" in sys.modules or not (folder / "config.json").is_file():
        return None
    code = _code_digest()
    if code is None:
        return None
    digest = hashlib.sha256(code.encode())
    try:
        digest.update((folder / "config.json").read_bytes())
        digest.update(Shards(folder).layout_digest().encode())
    except (CheckpointError, OSError):
        return None  # what is wrong is told where it is read
    return digest.hexdigest()[:32]


@cache
def _code_digest() -> str | None:
    """Changes with ktgraph's code, torch and transformers; None where somebody works on the last.

    What a wheel holds is told by its RECORD, also where two builds have one version.
    """
    transformers = metadata.distribution("transformers")
    if '"editable": true' in (transformers.read_text("direct_url.json") or ""):
        return None
    digest = hashlib.sha256((transformers.read_text("RECORD") or "").encode())
    for name in _PACKAGES:
        spec = importlib.util.find_spec(f"ktgraph.{name}")
        places = spec.submodule_search_locations if spec is not None else None
        for place in places or ():
            for file in sorted(Path(place).rglob("*.py")):
                digest.update(file.name.encode() + file.read_bytes())
    digest.update(f"{torch.__version__} {transformers.version}".encode())
    return digest.hexdigest()


def read_entry(key: str, kind: str) -> str | None:
    """The text of an entry; None when there is none, or it is not whole."""
    path = _path(key, kind)
    try:
        digest, _, text = path.read_text(encoding="utf-8").partition("\n")
        os.utime(path)
    except (OSError, UnicodeDecodeError):
        return None
    return text if digest == _digest(text) else None


def write_entry(key: str, kind: str, text: str) -> None:
    """Keep an entry; a folder that cannot be written costs the next start its time, no more."""
    path = _path(key, kind)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(f"{_digest(text)}\n{text}", encoding="utf-8")
        draft.replace(path)
        _forget_oldest(path.parent)
    except OSError as error:
        log.info("%s is not kept for the next start: %s", path, error)
        with suppress(OSError):
            draft.unlink(missing_ok=True)  # of a full disk


def _forget_oldest(folder: Path) -> None:
    files = sorted(folder.glob("*.*"), key=lambda f: f.stat().st_mtime, reverse=True)
    for file in files[_KEPT:]:
        file.unlink(missing_ok=True)


def _path(key: str, kind: str) -> Path:
    return cache_folder() / "starts" / f"{key}.{kind}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


__all__ = ["folder_key", "read_entry", "write_entry"]
