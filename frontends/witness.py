"""Are two traces of one architecture, at different sizes, the same graph?"""

from __future__ import annotations

import re

from ktgraph.ir.graph import Module
from ktgraph.ir.printer import structural_text


def first_difference(module: Module, other: Module) -> str | None:
    """Where two modules differ in more than numbers; None when they are isomorphic."""
    mine, theirs = (_skeleton(m) for m in (module, other))
    for a, b in zip(mine, theirs, strict=False):
        if a != b:
            return f"{a.strip()}  <>  {b.strip()}"
    return None if len(mine) == len(theirs) else f"{len(mine)} lines <> {len(theirs)} lines"


def _skeleton(module: Module) -> list[str]:
    lines = structural_text(module).split("\n")
    kept = [ln for ln in lines if not ln.startswith(("dim ", "sym ", "witness"))]
    return [re.sub(r"(?<![%\w])-?\d+(\.\d+)?(e[-+]?\d+)?", "#", ln) for ln in kept]
