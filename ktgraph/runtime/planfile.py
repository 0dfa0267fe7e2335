"""`.ktplan`: a compiled model in one file, which starts without tracing, passes or packing.

A zip of stored members: plan.ktir (the final IR), pipeline.txt, options.json, target.toml,
weights.json (where each weight comes from, and where it lies in packed.bin), env.json (what the
plan was made with), extras such as the tokenizer, and packed.bin, whose data begin at a multiple of
64 bytes of the file and are mapped, not read.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import platform
import struct
import zipfile
import zlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from ktgraph.errors import KtgraphError
from ktgraph.ir.graph import Module
from ktgraph.ir.lexer import ParseError
from ktgraph.ir.parser import parse_module
from ktgraph.ops.tensor import torch_dtype
from ktgraph.pass_api import CompileOptions, option_fault
from ktgraph.runtime.arena import PlanError
from ktgraph.runtime.native import dense_dtype
from ktgraph.runtime.operands import WeightUse
from ktgraph.runtime.packed import LoadedWeights, load_weights, use_nbytes
from ktgraph.runtime.plan import Plan
from ktgraph.runtime.runner import (
    Runner,
    fit_cache,
    gpu_device,
    torch_device,
    worker_threads,
)
from ktgraph.weights.evaluate import WeightEvaluator
from ktgraph.weights.sources import WeightSource

FORMAT = 2
ALIGN = 4096  # bytes: every weight begins at a page, as what a GPU copies from must
TEXTS = ("plan.ktir", "pipeline.txt", "options.json", "target.toml", "weights.json", "env.json")
PACKED = "packed.bin"


class PlanFileError(KtgraphError, ValueError):
    """A .ktplan that is damaged, or that was made for something else; the message lists all."""


@dataclass(frozen=True)
class PlanFile:
    """What a .ktplan holds.  `weights` is None when it was saved without packed weights."""

    path: Path
    plan: Plan
    options: CompileOptions
    pipeline: str
    target: str  # TOML
    fingerprint: str  # of the weights
    extras: Mapping[str, str]
    weights: LoadedWeights | None

    @property
    def module(self) -> Module:
        return self.plan.module

    def runner(self, source: WeightSource | None = None, threads: int | None = None) -> Runner:
        """Ready to run; `source` is needed only for a file without packed weights.

        Raises MemoryBudgetError when it does not fit, PlanFileError without weights.
        """
        count = worker_threads(self.options, threads)
        device = gpu_device(self.plan)
        shape = fit_cache(self.plan, self.options, count)
        weights = self.weights
        if weights is None and source is None:
            raise PlanFileError(f"{self.path}: {_NO_WEIGHTS}")
        if weights is None:
            assert source is not None
            evaluator = WeightEvaluator(self.module, source, cache_nbytes=0)
            weights = load_weights(self.plan.loaded(), evaluator, count, torch_device(device))
        elif device is not None:
            weights = weights.with_gpu(self.plan.loaded(), device.torch_device)
        return Runner.bind(self.plan, weights, shape, count, device)


_NO_WEIGHTS = "it was saved without packed weights: give the model they come from"


# -- where packed weights lie ----------------------------------------------------------------------
# Larger packed bytes are checked in samples: to read all of them would take minutes, while a start
# reads only what it needs.  Samples find what happens to large files: a download that stopped or
# left holes, a file pieced together from two, a weight that was written over.
_MOST_CHECKED = 2 << 30  # bytes
_SAMPLE, _STRIDE = 4096, 4 << 20  # bytes of a sample, and from one to the next inside a weight


@dataclass(frozen=True)
class PackedPlace:
    """Where a weight's bytes lie in packed.bin."""

    key: str
    type: str
    offset: int
    nbytes: int


def packed_places(uses: Sequence[WeightUse]) -> list[PackedPlace]:
    places: list[PackedPlace] = []
    at = 0
    for use in uses:
        nbytes = use_nbytes(use)
        places.append(PackedPlace(use.key, str(use.type), at, nbytes))
        at += -(-nbytes // ALIGN) * ALIGN
    return places


class Samples:
    """A digest of the bytes at the start, every `_STRIDE` and the end of each weight."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, part: NDArray[np.uint8]) -> None:
        for start in [*range(0, part.size, _STRIDE), max(0, part.size - _SAMPLE)]:
            self._digest.update(part[start : start + _SAMPLE].data)

    def __str__(self) -> str:
        return self._digest.hexdigest()


# -- the environment ------------------------------------------------------------------------------
def environment(plan: Plan) -> dict[str, str]:
    """What a plan depends on besides its file."""
    found = {"format": str(FORMAT), "ktgraph": _version()}
    if any(i.is_native for p in plan.phases for i in p.instructions):
        found |= {"isa": _isa(), "kernels": _library_hash()}
    if not all(p.is_native for p in plan.phases):
        found["torch"] = torch.__version__
    return {**found, "machine": platform.machine()}


def _version() -> str:
    try:
        return metadata.version("ktgraph")
    except metadata.PackageNotFoundError:
        return "not installed"


def _isa() -> str:
    from ktgraph.cpu_kernels import load_native

    return str(load_native().isa_info()["chosen"])


def _library_hash() -> str:
    from ktgraph.cpu_kernels import load_native

    return hashlib.sha256(Path(load_native().__file__).read_bytes()).hexdigest()[:16]


_ENV_HINTS = {
    "format": "this version reads format {now}, the file has {was}",
    "ktgraph": "it was made by ktgraph {was}, this is {now}",
    "isa": "it was made for the instruction set {was}, this machine uses {now} (KTGRAPH_ISA={was} "
    "asks for it, where the CPU has it)",
    "kernels": "the native kernels were built anew since (library {was}, now {now})",
    "torch": "some of its ops run on torch {was}, this is {now}",
    "machine": "it was made for {was}, this is {now}",
}


# -- loading --------------------------------------------------------------------------------------
def load_plan(
    path: str | Path,
    source: WeightSource | None = None,
    expected: Mapping[str, object] | None = None,
) -> PlanFile:
    """Read a .ktplan; its packed weights are mapped, not read.

    source: the model, if the caller has it: its weights must be those the plan was made from.
    expected: option values that the caller insists on, e.g. {"page_size": 32}.
    Raises PlanFileError: one line for a damaged file, or every reason why the plan does not fit.
    """
    path = Path(path)
    if path.is_dir():
        raise PlanFileError(f"{path} is a folder, not a .ktplan: kt.compile takes a model's folder")
    with _reading(path) as archive:
        texts = {i.filename: _text(archive, i) for i in archive.infolist() if i.filename != PACKED}
        _require_members(path, texts)
        env = cast("dict[str, str]", _object(path, texts, "env.json"))
        _refuse(path, _format_reasons(env))
        options = _options(path, texts)
        plan = _plan(path, texts)
        described = _object(path, texts, "weights.json")
        reasons = [
            *_environment_reasons(env, environment(plan)),
            *_option_reasons(options, expected or {}),
            *_weight_reasons(described, source),
        ]
        _refuse(path, reasons)
        weights = _map_packed(path, archive, plan, described)
    return PlanFile(
        path,
        plan,
        options,
        texts["pipeline.txt"],
        texts["target.toml"],
        str(described.get("fingerprint")),
        {k: v for k, v in texts.items() if k not in TEXTS},
        weights,
    )


@contextmanager
def _reading(path: Path) -> Generator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except (zipfile.BadZipFile, EOFError, struct.error, NotImplementedError) as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, what: str) -> PlanFileError:
    return PlanFileError(
        f"{path} is no whole .ktplan ({what}): it was cut off, changed, or is another kind of "
        "file. Save it again"
    )


def _text(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> str:
    try:
        return archive.read(info).decode()
    except UnicodeDecodeError as error:
        raise zipfile.BadZipFile(f"{info.filename} is no text") from error


def _require_members(path: Path, texts: Mapping[str, str]) -> None:
    missing = [name for name in TEXTS if name not in texts]
    if missing:
        raise _damaged(path, f"it lacks {', '.join(missing)}")


def _object(path: Path, texts: Mapping[str, str], name: str) -> dict[str, Any]:
    try:
        found = json.loads(texts[name])
    except ValueError as error:
        raise _damaged(path, f"{name}: {error}") from error
    if not isinstance(found, dict):
        raise _damaged(path, f"{name} holds no JSON object")
    return cast("dict[str, Any]", found)


def _options(path: Path, texts: Mapping[str, str]) -> CompileOptions:
    given = _object(path, texts, "options.json")
    unknown = sorted(given.keys() - {f.name for f in fields(CompileOptions)})
    if unknown:
        raise PlanFileError(f"{path}: unknown option {unknown[0]}: it was made by a newer version")
    for name, value in given.items():
        fault = option_fault(name, value)
        if fault is not None:
            raise _damaged(path, f"options.json: {fault}")
    return CompileOptions(**given)


def _plan(path: Path, texts: Mapping[str, str]) -> Plan:
    try:
        return Plan.build(parse_module(texts["plan.ktir"]))
    except (ParseError, PlanError, KeyError, ValueError) as error:
        raise PlanFileError(f"{path}: plan.ktir cannot be planned: {error}") from error


def _refuse(path: Path, reasons: Sequence[str]) -> None:
    if reasons:
        shown = "\n".join(f"  - {r}" for r in reasons)
        raise PlanFileError(
            f"{path} does not fit:\n{shown}\nCompile the model again and save it; a folder: "
            f"ktgraph quantize MODEL -o {path.parent} --overwrite"
        )


def _format_reasons(env: Mapping[str, str]) -> list[str]:
    was = str(env.get("format"))
    return [] if was == str(FORMAT) else [_ENV_HINTS["format"].format(was=was, now=FORMAT)]


def _environment_reasons(was: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    keys = [k for k in _ENV_HINTS if was.get(k) != now.get(k)]
    return [_ENV_HINTS[k].format(was=was.get(k, "none"), now=now.get(k, "none")) for k in keys]


def _option_reasons(options: CompileOptions, expected: Mapping[str, object]) -> list[str]:
    return [
        f"{name}={value} is asked for, it was made with {getattr(options, name, 'no such option')}"
        for name, value in expected.items()
        if getattr(options, name, None) != value
    ]


def _weight_reasons(described: Mapping[str, Any], source: WeightSource | None) -> list[str]:
    if source is None:
        return []
    was, now = str(described.get("fingerprint")), source.fingerprint()
    if was == now:
        return []
    return [f"it was made from other weights (fingerprint {was}, the model given has {now})"]


def _map_packed(
    path: Path, archive: zipfile.ZipFile, plan: Plan, described: Mapping[str, Any]
) -> LoadedWeights | None:
    if PACKED not in archive.namelist():
        return None
    try:
        places = {p["key"]: PackedPlace(**p) for p in described["packed"]}
    except (KeyError, TypeError) as error:
        raise _damaged(path, f"weights.json: {error!r}") from error
    # where a weight lies follows from the plan: what the file says must be the same
    for planned in packed_places(plan.loaded()):
        if places.get(planned.key) != planned:
            raise _damaged(path, f"weights.json does not hold @{planned.key} as {planned.type}")
    info = archive.getinfo(PACKED)
    if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
        raise _damaged(path, f"{PACKED} is compressed: it cannot be mapped")
    start = _data_offset(path, info)
    if start % ALIGN or start + info.file_size > path.stat().st_size:
        raise _damaged(path, f"{PACKED} is not where it should be")
    mapped = np.memmap(path, np.uint8, mode="c", offset=start, shape=(info.file_size,))
    if info.file_size <= _MOST_CHECKED:
        is_whole = zlib.crc32(mapped.data) == info.CRC
    else:
        samples = Samples()
        for place in packed_places(plan.loaded()):
            samples.add(mapped[place.offset : place.offset + place.nbytes])
        is_whole = str(samples) == described.get("samples")
    if not is_whole:
        raise _damaged(path, f"the bytes of {PACKED} have changed")
    _read_ahead(mapped)
    whole = torch.as_tensor(mapped)
    tensors = {u.key: _mapped(path, whole, u, places) for u in plan.loaded()}
    return LoadedWeights(tensors, owner=mapped)


def _data_offset(path: Path, info: zipfile.ZipInfo) -> int:
    with path.open("rb") as file:
        file.seek(info.header_offset)
        head = file.read(30)
    if len(head) < 30 or head[:4] != b"PK\x03\x04":
        raise _damaged(path, f"{PACKED} has no header")
    names, extra = struct.unpack("<HH", head[26:30])
    return info.header_offset + 30 + int(names) + int(extra)


def _read_ahead(mapped: np.memmap[Any, Any]) -> None:
    inner: mmap.mmap | None = getattr(mapped, "_mmap", None)
    if inner is not None and hasattr(mmap, "MADV_WILLNEED"):
        inner.madvise(mmap.MADV_WILLNEED)


def _mapped(
    path: Path, whole: torch.Tensor, use: WeightUse, places: Mapping[str, PackedPlace]
) -> torch.Tensor:
    place = places.get(use.key)
    if place is None or place.type != str(use.type):
        raise _damaged(path, f"weights.json does not hold @{use.key} as {use.type}")
    if place.offset % ALIGN or place.nbytes != use_nbytes(use):
        raise _damaged(path, f"@{use.key} has {place.nbytes} bytes at {place.offset}")
    if place.offset + place.nbytes > whole.numel():
        raise _damaged(path, f"@{use.key} lies beyond the end of {PACKED}")
    data = whole[place.offset : place.offset + place.nbytes]
    if use.form == "tile":
        return data
    shape = [d.const() for d in use.type.dims]
    return data.view(torch_dtype(dense_dtype(use))).reshape(shape)


__all__ = ["FORMAT", "PlanFile", "PlanFileError", "environment", "load_plan"]
