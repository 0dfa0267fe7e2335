"""Hand-written targets and full-size modules for tests of placement, costs and timelines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ktgraph.ir.graph import Module
from ktgraph.ir.parser import parse_file
from ktgraph.pass_api import CompileOptions, PassContext
from ktgraph.pipeline import Pipeline
from ktgraph.placement.graph import GPU_WORKSPACE
from ktgraph.target import Device, Link, Target, load_target

_HERE = Path(__file__).resolve().parent / "passes"
FRONT = "specialize-phases,mla-absorb,merge-linears,moe-group,fuse-norms,fuse-rope-kv"
HYBRID = "place,quantize,insert-copies,overlap"


def v2_lite(pipeline: str = FRONT, ctx: PassContext | None = None) -> Module:
    """DeepSeek-V2-Lite at its full sizes, after a pipeline; no weights are needed for it."""
    return run(parse_file(_HERE / "v2_lite.ktir"), pipeline, ctx)


def run(module: Module, pipeline: str, ctx: PassContext | None = None) -> Module:
    """Run passes on a module, in place."""
    context = ctx or PassContext()
    for step in Pipeline.of(pipeline).steps:
        step.instance.run(module, context)
    return module


def context(target: Target | str = "rtx4090-24g+xeon", **options: object) -> PassContext:
    """A context for a described target."""
    found = load_target(target) if isinstance(target, str) else target
    return PassContext(found, None, replace(CompileOptions(), **options))  # type: ignore[arg-type]


def small_target(gpu_memory: int, **gpu: Any) -> Target:
    """A toy machine whose GPU is ten times as fast, over a link as slow as its host.

    gpu_memory: what is left on the GPU beside the scratch of kernels and libraries.
    """
    peak = {"f32": 1e12, "bf16": 1e12, "int8": 1e12}
    cpu = Device("cpu", "cpu", 1 << 34, ((1, 1e10),), dict.fromkeys(peak, 1e11), 1e-6)
    cuda = Device("cuda:0", "cuda", gpu_memory + GPU_WORKSPACE, ((1, 1e11),), peak, 1e-6)
    cuda = replace(cuda, **gpu)
    links = (Link("cpu", "cuda:0", 1e10, 2e-6), Link("cuda:0", "cpu", 1e10, 2e-6))
    return Target("toy", (cpu, cuda), "cuda:0", links)


__all__ = ["FRONT", "HYBRID", "context", "run", "small_target", "v2_lite"]
