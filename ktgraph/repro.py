"""Repro bundles: all that shows a pass's failure again, in one folder, without weights.

module.ktir before the pass · pipeline.txt (the pass) · target.toml · inputs.safetensors (seeded
token ids of the miniature's trace) · env.json (versions, level, failure) · run.sh
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from ktgraph.drive import Trace, make_trace, vocabulary
from ktgraph.errors import KtgraphError
from ktgraph.ir.graph import Module
from ktgraph.miniature import MiniatureError, shrink
from ktgraph.pass_api import PassContext
from ktgraph.pipeline import Pipeline, Step
from ktgraph.recorded import Recorded, read_recorded, with_header, write_settings

MODULE_FILE, INPUTS_FILE, ENV_FILE = "module.ktir", "inputs.safetensors", "env.json"
_PACKAGES = ("ktgraph", "torch", "numpy", "transformers", "triton")


class ReproError(KtgraphError, ValueError):
    """A folder that is no repro bundle."""


@dataclass(frozen=True)
class Repro:
    """A bundle that was read back."""

    recorded: Recorded
    level: int  # of validation
    seed: int
    trace: Trace
    failure: str  # the message when it was written

    @property
    def pipeline(self) -> Pipeline:
        return self.recorded.pipeline or Pipeline(())


def versions() -> dict[str, str]:
    """Versions of Python, the platform and the packages that results depend on."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def write_repro(
    folder: Path,
    module: Module,
    step: Step,
    ctx: PassContext,
    *,
    level: int,
    seed: int,
    failure: str,
) -> Path:
    """Write a bundle for a pass that fails on `module`; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MODULE_FILE).write_text(with_header(str(module), ()))
    write_settings(folder, Pipeline((step,)), ctx)
    trace = make_trace(_vocabulary(module), seed)
    tensors: dict[str, torch.Tensor] = {}
    for number, new in enumerate(trace):
        tensors |= {f"step{number}.seq{q}": torch.tensor(t) for q, t in new.items()}
    (folder / INPUTS_FILE).write_bytes(save(tensors, {"seed": str(seed)}))
    env: dict[str, Any] = {"validate": level, "seed": seed, "failure": failure}
    (folder / ENV_FILE).write_text(json.dumps({**env, "versions": versions()}, indent=2) + "\n")
    run = folder / "run.sh"
    run.write_text('#!/bin/sh\nexec ktgraph replay "$(dirname "$0")" "$@"\n')
    run.chmod(0o755)
    return folder


def _vocabulary(module: Module) -> int:
    try:
        return max(vocabulary(shrink(module).modules[0]), 2)
    except MiniatureError:
        return max(vocabulary(module), 2)


def read_repro(folder: str | Path) -> Repro:
    """Read a bundle; raises ReproError naming what is missing."""
    path = Path(folder)
    for name in (MODULE_FILE, ENV_FILE, INPUTS_FILE):
        if not (path / name).is_file():
            raise ReproError(f"{path} is no repro folder: {name} is missing")
    env: Mapping[str, Any] = json.loads((path / ENV_FILE).read_text())
    return Repro(
        read_recorded(path / MODULE_FILE),
        int(env["validate"]),
        int(env["seed"]),
        _read_trace(path / INPUTS_FILE),
        str(env["failure"]),
    )


def _read_trace(file: Path) -> Trace:
    steps: dict[int, dict[int, list[int]]] = {}
    for key, tensor in load(file.read_bytes()).items():
        found = re.fullmatch(r"step(\d+)\.seq(\d+)", key)
        if found is None:
            raise ReproError(f"{file}: unexpected tensor {key!r}")
        steps.setdefault(int(found[1]), {})[int(found[2])] = [int(t) for t in tensor]
    return [steps[n] for n in sorted(steps)]


__all__ = ["Repro", "ReproError", "read_repro", "versions", "write_repro"]
