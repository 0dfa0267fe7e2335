"""How a GPU kernel joins the kernel table: `@cuda_kernel` on its launcher.

A launcher takes the op's operands in order (None for absent ones), then by keyword `out`, one
preallocated tensor per result (None for a cache state, which is updated in place), and the op's
attributes.  It only launches: no host synchronisation, and grids that depend on shapes and on
bounds that the host knows, so that every launcher can be captured into a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ktgraph.ir.graph import Module, Op
from ktgraph.ops.registry import Refusal, register_kernel

Launcher = Callable[..., None]
Supports = Callable[[Op, Module], bool | Refusal]


def _always(op: Op, module: Module) -> bool | Refusal:
    return True


def cuda_kernel(
    op: str, *, name: str, nmse: float, supports: Supports = _always, priority: int = 10
) -> Callable[[Launcher], Launcher]:
    """Register the decorated launcher for an op.

    nmse: error bound against the op's reference with bf16 operands (1e-10 for f32 ones).
    """

    def register(launcher: Launcher) -> Launcher:
        register_kernel(
            op, name, "cuda", into=launcher, supports=supports, nmse=nmse, priority=priority
        )
        return launcher

    return register


def launcher(op: str, name: str) -> Any:
    """A registered launcher, for tests and benchmarks."""
    from ktgraph.ops.registry import kernels_for

    return next(k.into for k in kernels_for(op, "cuda") if k.name == name)


__all__ = ["Launcher", "Supports", "cuda_kernel", "launcher"]
