"""Writing a `.ktplan` (ktgraph/runtime/planfile.py reads it): whole or not at all."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import zipfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ktgraph.errors import KtgraphError, is_full
from ktgraph.ir.printer import print_weight
from ktgraph.pass_api import CompileOptions
from ktgraph.runtime.operands import WeightUse
from ktgraph.runtime.packed import LoadedWeights
from ktgraph.runtime.plan import Plan
from ktgraph.runtime.planfile import (
    PACKED,
    TEXTS,
    PackedPlace,
    PlanFileError,
    environment,
    packed_places,
)
from ktgraph.runtime.planfile_draft import Draft, Packed, PackedMember, WeightsFrom
from ktgraph.runtime.runner import Runner
from ktgraph.target.description import round_size

log = logging.getLogger("ktgraph")


class DiskSpaceError(KtgraphError, OSError):
    """A file that the disk has no room for, as a rule said before anything is written."""


def save_plan(
    path: str | Path,
    runner: Runner,
    options: CompileOptions,
    *,
    fingerprint: str,
    pipeline: str = "",
    target: str = "",
    extras: Mapping[str, str] | None = None,
    packed: bool = True,
) -> None:
    """`write_plan` of a model that is loaded.

    packed: also the packed weights; without them loading needs the model and packs again.
    """
    runner.settle_residency()
    held = partial(_held, runner.plan, runner.executor.weights)
    weights = held if packed else None
    write_plan(
        path, runner.plan, options, weights,
        fingerprint=fingerprint, pipeline=pipeline, target=target, extras=extras,
    )  # fmt: skip


def _held(
    plan: Plan, weights: LoadedWeights, first: int
) -> Iterator[tuple[WeightUse, torch.Tensor]]:
    for use in plan.loaded()[first:]:
        yield use, weights.tensors[use.key]


def write_plan(
    path: str | Path,
    plan: Plan,
    options: CompileOptions,
    weights: WeightsFrom | None,
    *,
    fingerprint: str,
    pipeline: str = "",
    target: str = "",
    extras: Mapping[str, str] | None = None,
    resume: bool = False,
    say: Callable[[str], None] = log.info,
) -> None:
    """Write a .ktplan; each weight is asked for when its turn comes and let go again.

    weights: gives `plan.loaded()` from a number on, each with its bytes; None for a file without.
    resume: after an interrupt the finished weights stay in a hidden draft beside the file, and the
        next call with the same model and options goes on behind them, which `say` is told; the
        whole file, where it is there already, stays as it is.
    fingerprint: of the weights' source.  target: TOML.  extras: further texts by member name.
    Raises PlanFileError when there is no such folder, DiskSpaceError when the disk is too full.
    """
    places = packed_places(plan.loaded()) if weights is not None else []
    texts = {
        "plan.ktir": str(plan.module),
        "pipeline.txt": pipeline,
        "options.json": _json(asdict(options)),
        "target.toml": target,
        "env.json": _json(environment(plan)),
        **{_extra_name(k): v for k, v in (extras or {}).items()},
    }
    path = Path(path)
    draft = Draft(path, _key(texts, fingerprint) if resume else None)
    if resume and _is_written(path, texts, fingerprint, places):
        draft.journal.unlink(missing_ok=True)
        say(f"goes on where it stopped: all {len(places)} weights are packed already")
        return
    nbytes = packed_nbytes_in_file(places) + sum(len(t.encode()) for t in texts.values())
    _check_path(path)
    held = draft.file.stat().st_size if draft.file.exists() else 0
    check_disk(path.parent, nbytes - held)
    with _room_for(path), draft.opened() as file, zipfile.ZipFile(file, "w") as out:
        for name, text in texts.items():
            out.writestr(name, text)
        samples = ""
        if weights is not None:
            member = PackedMember(out, draft, places)
            member.write(partial(_told, weights, len(places), say), _bytes_of)
            samples = str(member.samples)
        out.writestr("weights.json", _json(_describe_weights(plan, fingerprint, places, samples)))


def _is_written(
    path: Path, texts: Mapping[str, str], fingerprint: str, places: Iterable[PackedPlace]
) -> bool:
    """Whether the file is there and whole (it got its name last), from the same model and options.

    So it is where a call was killed before its folder was renamed.  One that was saved without
    weights has the same texts, and not the same places.
    """
    try:
        with zipfile.ZipFile(path) as there:
            found = {name: there.read(name).decode() for name in texts}
            weights = json.loads(there.read("weights.json"))
    except (OSError, zipfile.BadZipFile, KeyError, ValueError):
        return False
    packed = [asdict(p) for p in places]
    return found == texts and (weights["fingerprint"], weights["packed"]) == (fingerprint, packed)


@contextmanager
def _room_for(path: Path) -> Generator[None]:
    """Names the file where the disk fills up meanwhile."""
    try:
        yield
    except OSError as error:
        if isinstance(error, KtgraphError) or not is_full(error):
            raise
        raise DiskSpaceError(
            f"{path}: {error.strerror}: make room, or give a folder on another disk"
        ) from error


def _told(weights: WeightsFrom, count: int, say: Callable[[str], None], first: int) -> Packed:
    if first:
        say(f"goes on where it stopped: {first} of {count} weights are packed already")
    return weights(first)


def _key(texts: Mapping[str, str], fingerprint: str) -> str:
    """Of everything that a file's bytes follow from."""
    return hashlib.sha256(json.dumps([texts, fingerprint]).encode()).hexdigest()


def packed_nbytes_in_file(places: Iterable[PackedPlace]) -> int:
    """Bytes of packed.bin."""
    return max((p.offset + p.nbytes for p in places), default=0)


def _extra_name(name: str) -> str:
    if name in (*TEXTS, PACKED):
        raise PlanFileError(f"extra {name!r}: the name belongs to the file itself")
    return name


def _describe_weights(
    plan: Plan, fingerprint: str, places: Iterable[PackedPlace], samples: str
) -> dict[str, object]:
    return {
        "fingerprint": fingerprint,
        "weights": [print_weight(w) for w in plan.module.weights.values()],
        "packed": [asdict(p) for p in places],
        "samples": samples,
    }


def _bytes_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    return tensor.reshape(-1).view(torch.uint8).cpu().numpy()


def _check_path(path: Path) -> None:
    if path.is_dir():
        raise PlanFileError(f"{path} is a folder: give the name of a file in it")
    if not path.parent.is_dir():
        raise PlanFileError(f"{path}: there is no folder {path.parent}: make it first")


def check_disk(folder: Path, nbytes: int) -> None:
    """Raise DiskSpaceError when a folder's disk has no room for `nbytes`."""
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise DiskSpaceError(
            f"{folder}: this writes {round_size(nbytes)}, and its disk has {round_size(free)} "
            "free: make room, give a folder on another disk, or quantize to fewer bits"
        )


def _json(value: object) -> str:
    return json.dumps(value, indent=1)


__all__ = ["DiskSpaceError", "check_disk", "save_plan", "write_plan"]
