"""ktgraph: a readable graph compiler and runtime for large mixture-of-experts models."""

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
