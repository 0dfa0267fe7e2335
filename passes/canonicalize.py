"""canonicalize: bring what frontends emit to the one form that the other passes know.

What: views that cancel or merge go, adjacent slices become splits, equal ops are merged, dead ops
and unused weights are dropped; attention over rows read from the cache becomes attention over the
cache; latent attention comes to its latent cache (see mla-latent-cache).

Why: later rules match one spelling of each idea.

Before:  %k, %v = kv.read %kv1, %batch … %o = attn.sdpa_rows %q, %k, %v, %batch
After:   %o = attn.sdpa %q, %kv1, %batch
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ktgraph.ir.graph import Module, drop_unused_weights
from ktgraph.pass_api import Numerics, Pass, PassContext, register_pass, reorder
from ktgraph.passes.mla_latent_cache import MlaLatentCache
from ktgraph.rewrite import Rule, rewrite
from ktgraph.rewrite.cleanup import erase_dead, merge_equal_ops, slices_to_splits
from ktgraph.rewrite.shapes import SHAPE_RULES


class AttendCache(Rule):
    """Rows that are read only to be attended over stay in the cache."""

    name = "attend-cache"
    match = """
      %k, %v = kv.read %kv, %batch {layer = $l, ...}
      %o     = attn.sdpa_rows %q, %k, %v, %batch, @sinks? {**how}"""
    emit = "%o = attn.sdpa %q, %kv, %batch, @sinks {layer = $l, **how}"
    keep = ("%k", "%v")


@register_pass
@dataclass(frozen=True)
class Canonicalize(Pass):
    name: ClassVar[str] = "canonicalize"
    numerics: ClassVar[Numerics] = reorder()
    requires: ClassVar[Sequence[str]] = ("named",)  # witnesses list literals of the ops as imported

    def run(self, module: Module, ctx: PassContext) -> None:
        self._tidy(module, ctx)
        MlaLatentCache().run(module, ctx)
        rewrite(module, ctx, [AttendCache()])
        self._tidy(module, ctx)
        drop_unused_weights(module)

    def _tidy(self, module: Module, ctx: PassContext) -> None:
        """Rules and clean-ups until nothing changes."""
        rules = [rule() for rule in SHAPE_RULES]
        changes = 1
        while changes:
            erase_dead(module)
            changes = merge_equal_ops(module, ctx) + slices_to_splits(module, ctx)
            changes += rewrite(module, ctx, rules)
        erase_dead(module)
