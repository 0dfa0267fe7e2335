"""ktgraph: a readable graph compiler and runtime for large mixture-of-experts models.

Names are imported on first use, so that a command that needs no model starts quickly.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ktgraph.api import compile, load, trace
    from ktgraph.compiled import Compiled
    from ktgraph.errors import KtgraphError
    from ktgraph.ir import Module
    from ktgraph.module_stages import CompiledModule, TracedModule
    from ktgraph.ops import kernel, no, op
    from ktgraph.ops.bound_modules import bind_module
    from ktgraph.pass_api import CompileOptions, Pass, register_pass
    from ktgraph.patching import Patched, patch, unpatch
    from ktgraph.planner import plan
    from ktgraph.rewrite import Rule, RulePass
    from ktgraph.stages import Lowered, Traced
    from ktgraph.target import Target, cpu, hybrid, load_target

__all__ = [
    "CompileOptions",
    "Compiled",
    "CompiledModule",
    "KtgraphError",
    "Lowered",
    "Module",
    "Pass",
    "Patched",
    "Rule",
    "RulePass",
    "Target",
    "Traced",
    "TracedModule",
    "bind_module",
    "compile",
    "cpu",
    "hybrid",
    "kernel",
    "load",
    "load_target",
    "no",
    "op",
    "patch",
    "plan",
    "register_pass",
    "trace",
    "unpatch",
]

_HOMES = {
    "ktgraph.api": ("compile", "load", "trace"),
    "ktgraph.compiled": ("Compiled",),
    "ktgraph.errors": ("KtgraphError",),
    "ktgraph.ir": ("Module",),
    "ktgraph.module_stages": ("CompiledModule", "TracedModule"),
    "ktgraph.ops": ("kernel", "no", "op"),
    "ktgraph.ops.bound_modules": ("bind_module",),
    "ktgraph.patching": ("Patched", "patch", "unpatch"),
    "ktgraph.planner": ("plan",),
    "ktgraph.pass_api": ("CompileOptions", "Pass", "register_pass"),
    "ktgraph.rewrite": ("Rule", "RulePass"),
    "ktgraph.stages": ("Lowered", "Traced"),
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
