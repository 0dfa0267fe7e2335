"""GPU kernels: every launcher of `ktgraph.triton_kernels`, the crossings, and the fallback.

The fallback `torch.reference` runs an op's meaning on the host, with copies there and back and a
wait for the GPU: named in `via`, counted in reports and warned about, never silent.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from ktgraph.ir.graph import Module, Op
from ktgraph.ops.registry import all_ops, kernels_for, register_kernel
from ktgraph.placement.graph import ON_HOST
from ktgraph.runtime.kernels_cpu import REFERENCE

# How values cross between the CPU and a GPU; the executor does these itself.
CROSSINGS = {"xfer.post": "cuda.post", "xfer.await": "cuda.await", "xfer.copy": "cuda.copy"}
STREAM_WEIGHTS = "cuda.stream_weights"  # `xfer.copy` of weights, on a stream of its own


@cache
def import_launchers() -> None:
    """Import every file of `ktgraph.triton_kernels`, which registers its kernels."""
    package = import_module("ktgraph.triton_kernels")
    for found in iter_modules(package.__path__):
        import_module(f"ktgraph.triton_kernels.{found.name}")


def register_all() -> None:
    """Register the launchers, and the fallback of every op of the table."""
    import_launchers()
    for name, definition in all_ops().items():
        if name in CROSSINGS or name in ON_HOST:
            continue
        if all(k.name != REFERENCE for k in kernels_for(name, "cuda")):
            register_kernel(
                name, REFERENCE, "cuda", launch=definition.reference, nmse=0.0, priority=-100,
                fallback=True,
            )  # fmt: skip


def crossing_kernel(op: Op, module: Module) -> str:
    """The `via` of an op that crosses between the CPU and a GPU."""
    return STREAM_WEIGHTS if op.weights else CROSSINGS[op.name]


__all__ = ["CROSSINGS", "STREAM_WEIGHTS", "crossing_kernel", "import_launchers", "register_all"]
