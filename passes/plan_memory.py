"""plan-memory: every value gets its place in the arena, from liveness over the order of ops.

Why: activations of all layers share a few megabytes, nothing is allocated at run time, and the size
is known before anything is loaded.

    func @decode(...) {phase = "decode", max_q = 1}
 -> func @decode(...) {..., arena_bytes = 8192, buffers = ["x:0:1024", "h[1..26]:1024:1024", ...]}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ktgraph.ir.graph import Function, Module, attr
from ktgraph.ir.types import StateType
from ktgraph.pass_api import Numerics, Pass, PassContext, exact, register_pass
from ktgraph.runtime.arena import Arena, arena_attrs, phase_sizes, plan_arena
from ktgraph.target.description import round_size


@register_pass
@dataclass(frozen=True)
class PlanMemory(Pass):
    name: ClassVar[str] = "plan-memory"
    numerics: ClassVar[Numerics] = exact()
    required: ClassVar[bool] = True

    def run(self, module: Module, ctx: PassContext) -> None:
        tables: list[str] = []
        for func in module.functions.values():
            arena = plan_arena(module, func, phase_sizes(func, ctx.options))
            func.attrs.pop("away_bytes", None)
            func.attrs.update({k: attr(v) for k, v in arena_attrs(arena).items()})
            ctx.note(f"@{func.name}: arena {_sizes(arena)}, {len(arena.places)} buffers")
            tables += _table(func, arena)
        ctx.artifacts["memory.txt"] = "\n".join(tables) + "\n"


def _sizes(arena: Arena) -> str:
    """``3 MiB, 1 MiB on cpu``"""
    away = [f"{round_size(n)} on {device}" for device, n in arena.away.items()]
    return ", ".join([round_size(arena.nbytes), *away])


def _table(func: Function, arena: Arena) -> list[str]:
    sizes = arena.sizes
    sum_of_all = sum(p.nbytes for p in arena.places.values())
    states = [str(a.type) for a in func.args if isinstance(a.type, StateType)]
    head = [
        f"@{func.name}: at most {sizes.tokens} tokens, {sizes.rows} rows of logits, "
        f"{sizes.batch} sequences",
        f"  arena {_sizes(arena)} (without sharing {round_size(sum_of_all)}), "
        f"{len(arena.owner)} values written in place",
        *(f"  cache {state}" for state in states),
        f"  {'offset':>12} {'bytes':>12} {'live from':>10} {'to':>6}  value",
    ]
    rows = [
        f"  {p.offset:>12} {p.nbytes:>12} {p.first:>10} {p.last:>6}  %{p.slot}"
        for p in arena.places.values()
    ]
    return [*head, *rows, ""]


__all__ = ["PlanMemory"]
