"""Writing a `.ktplan` (ktgraph/runtime/planfile.py reads it): whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import struct
import zipfile
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO

import numpy as np
import torch
from numpy.typing import NDArray

from ktgraph.errors import KtgraphError
from ktgraph.ir.printer import print_weight
from ktgraph.pass_api import CompileOptions
from ktgraph.runtime.operands import WeightUse
from ktgraph.runtime.packed import LoadedWeights
from ktgraph.runtime.plan import Plan
from ktgraph.runtime.planfile import (
    ALIGN,
    PACKED,
    TEXTS,
    PackedPlace,
    PlanFileError,
    Samples,
    environment,
    packed_places,
)
from ktgraph.runtime.runner import Runner
from ktgraph.target.description import round_size

_PAD_ID = 0xD935  # the extra field by which archives are aligned
Packed = Iterable[tuple[WeightUse, torch.Tensor]]


class DiskSpaceError(KtgraphError, OSError):
    """A file that the disk has no room for, said before anything is written."""


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
    weights = _held(runner.plan, runner.executor.weights) if packed else None
    write_plan(
        path, runner.plan, options, weights,
        fingerprint=fingerprint, pipeline=pipeline, target=target, extras=extras,
    )  # fmt: skip


def _held(plan: Plan, weights: LoadedWeights) -> Iterator[tuple[WeightUse, torch.Tensor]]:
    for use in plan.loaded():
        yield use, weights.tensors[use.key]


def write_plan(
    path: str | Path,
    plan: Plan,
    options: CompileOptions,
    weights: Packed | None,
    *,
    fingerprint: str,
    pipeline: str = "",
    target: str = "",
    extras: Mapping[str, str] | None = None,
) -> None:
    """Write a .ktplan; each weight is asked for when its turn comes and let go again.

    weights: `plan.loaded()` in order, each with its bytes; None for a file without them.
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
    nbytes = packed_nbytes_in_file(places) + sum(len(t.encode()) for t in texts.values())
    with _replacing(path, nbytes) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as out:
        for name, text in texts.items():
            out.writestr(name, text)
        samples = "" if weights is None else _write_packed(out, places, weights)
        out.writestr("weights.json", _json(_describe_weights(plan, fingerprint, places, samples)))


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


def _write_packed(archive: zipfile.ZipFile, places: Iterable[PackedPlace], weights: Packed) -> str:
    """Write packed.bin; gives the digest of its samples."""
    info = zipfile.ZipInfo(PACKED)
    assert archive.fp is not None
    head = archive.fp.tell() + 30 + len(PACKED) + 20  # with the 64-bit size field
    pad = -(head + 4) % ALIGN
    info.extra = struct.pack("<HH", _PAD_ID, pad) + bytes(pad)
    samples = Samples()
    with archive.open(info, "w", force_zip64=True) as file:
        for place, (use, tensor) in zip(places, weights, strict=True):
            data = _bytes_of(tensor)
            assert (place.key, place.nbytes) == (use.key, data.size)
            samples.add(data)
            file.write(data.data)
            file.write(bytes(-place.nbytes % ALIGN))
    return str(samples)


def _bytes_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    return tensor.reshape(-1).view(torch.uint8).cpu().numpy()


@contextmanager
def _replacing(path: Path, nbytes: int) -> Generator[IO[bytes]]:
    """A file that takes the place of `path` when all of its `nbytes` are on the disk."""
    if path.is_dir():
        raise PlanFileError(f"{path} is a folder: give the name of a file in it")
    if not path.parent.is_dir():
        raise PlanFileError(f"{path}: there is no folder {path.parent}: make it first")
    check_disk(path.parent, nbytes)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


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
