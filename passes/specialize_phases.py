"""specialize-phases: one function per phase, so that each may take another form and placement.

Prefill is bound by arithmetic and decode by memory; later passes choose per function.  A phase is
told by `max_q`, the most new tokens of one sequence in a call.  Weights are shared.

Before:  func @main(…) -> …
After:   func @prefill(…) {phase = "prefill", max_q = 512} -> …
         func @decode(…) {phase = "decode", max_q = 1} -> …
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from ktgraph.ir.copying import clone_function
from ktgraph.ir.graph import Function, Module, attr
from ktgraph.ir.types import BatchType
from ktgraph.pass_api import Numerics, Pass, PassContext, exact, register_pass
from ktgraph.pass_options import PipelineError
from ktgraph.passes.fix_sizes import TOKENS

Phase = Literal["prefill", "decode"]


@register_pass
@dataclass(frozen=True)
class SpecializePhases(Pass):
    """Clone each causal function for prefill and decode."""

    name: ClassVar[str] = "specialize-phases"
    numerics: ClassVar[Numerics] = exact()
    requires: ClassVar[Sequence[str]] = ("flat",)
    ensures: ClassVar[Sequence[str]] = ("phased",)
    required: ClassVar[bool] = True

    phases: tuple[Phase, ...] = ("prefill", "decode")  # which to make

    def run(self, module: Module, ctx: PassContext) -> None:
        if not self.phases:
            raise PipelineError("specialize-phases: option phases is empty; give prefill or decode")
        most: dict[Phase, int] = {"prefill": ctx.options.max_tokens, "decode": 1}
        for func in list(module.functions.values()):
            if "max_q" in func.attrs:
                continue
            if any(isinstance(a.type, BatchType) for a in func.args):
                self._split(module, func, most)
            else:
                most_q = func.attrs.pop(TOKENS, attr(ctx.options.max_tokens))
                func.attrs |= {"phase": "any", "max_q": most_q}
                ctx.note(f"@{func.name} takes no batch: one phase")

    def _split(self, module: Module, func: Function, most: dict[Phase, int]) -> None:
        """Replace a function by its phases; @main gives @prefill and @decode."""
        del module.functions[func.name]
        for phase in self.phases:
            name = phase if func.name == "main" else f"{func.name}.{phase}"
            copy = module.add_function(name)
            clone_function(func, copy)
            copy.attrs |= {"phase": phase, "max_q": attr(most[phase])}


__all__ = ["SpecializePhases"]
