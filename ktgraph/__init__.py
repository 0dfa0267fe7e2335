"""ktgraph: a readable graph compiler and runtime for large mixture-of-experts models.

Names are imported on first use, so that a command that needs no model starts quickly.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ktgraph.api import compile, load, trace
    from ktgraph.errors import KtgraphError
    from ktgraph.pass_api import CompileOptions
    from ktgraph.stages import Compiled, Lowered, Traced
    from ktgraph.target import Target, cpu, hybrid, load_target

__all__ = [
    "CompileOptions",
    "Compiled",
    "KtgraphError",
    "Lowered",
    "Target",
    "Traced",
    "compile",
    "cpu",
    "hybrid",
    "load",
    "load_target",
    "trace",
]

_HOMES = {
    "ktgraph.api": ("compile", "load", "trace"),
    "ktgraph.errors": ("KtgraphError",),
    "ktgraph.pass_api": ("CompileOptions",),
    "ktgraph.stages": ("Compiled", "Lowered", "Traced"),
    "ktgraph.target": ("Target", "cpu", "hybrid", "load_target"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            globals()[name] = found = getattr(import_module(home), name)
            return found
    raise AttributeError(f"module 'ktgraph' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
