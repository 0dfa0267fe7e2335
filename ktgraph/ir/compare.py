"""The difference of two modules: declarations first, then function by function."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from ktgraph.ir.graph import Function, Module, Op, Value
from ktgraph.ir.printer import print_module


def module_diff(
    a: Module,
    b: Module,
    a_name: str = "a",
    b_name: str = "b",
    *,
    ignore_names: bool = False,
    context: int = 2,
) -> str:
    """Unified diffs, one for what differs; an empty string when the modules are equal.

    `ignore_names`: values of equal ops are written with the names of `a`, locs are left out.
    """
    if ignore_names:
        a, b = a.clone(), b.clone()
        _align(a, b)
    mine, theirs = _sections(a), _sections(b)
    lines: list[str] = []
    for title in dict.fromkeys([*mine, *theirs]):
        labels = (f"{a_name} {title}", f"{b_name} {title}")
        lines += difflib.unified_diff(
            mine.get(title, []), theirs.get(title, []), *labels, n=context, lineterm=""
        )
    return "".join(f"{line}\n" for line in lines)


def _sections(module: Module) -> dict[str, list[str]]:
    """Printed lines by function, those before the first function as "declarations"."""
    found: dict[str, list[str]] = {"declarations": []}
    title = "declarations"
    for line in print_module(module).splitlines():
        if line.startswith("func "):
            title = line.split("(", 1)[0]
        if line:
            found.setdefault(title, []).append(line)
    return found


def _align(a: Module, b: Module) -> None:
    """Give b's values the names of a's where the ops are equal; drop names of modules and locs."""
    b.name = a.name
    for op in [*a.walk(), *b.walk()]:
        op.loc = None
    for name, function in a.functions.items():
        if name in b.functions:
            _align_function(function, b.functions[name])


def _align_function(a: Function, b: Function) -> None:
    renamed: dict[Value, str] = dict(
        (theirs, mine.name) for mine, theirs in zip(a.args, b.args, strict=False)
    )
    mine, theirs = list(a.walk()), list(b.walk())
    keys = [[_key(op) for op in ops] for ops in (mine, theirs)]
    blocks = difflib.SequenceMatcher(None, *keys, autojunk=False).get_matching_blocks()
    for block in blocks:
        for at in range(block.size):
            renamed.update(_names(mine[block.a + at], theirs[block.b + at]))
    _rename(b, renamed)


def _key(op: Op) -> tuple[str, ...]:
    """What an op is, without the names of values."""
    return (
        op.name,
        *map(str, op.weights),
        *(f"{k}={v}" for k, v in op.attrs.items()),
        *(str(r.type) for r in op.results),
        op.via or "",
    )


def _names(mine: Op, theirs: Op) -> dict[Value, str]:
    pairs = list(zip(theirs.results, mine.results, strict=False))
    if mine.body is not None and theirs.body is not None:
        pairs += zip(theirs.body.args, mine.body.args, strict=False)
    return {value: other.name for value, other in pairs}


def _rename(function: Function, renamed: dict[Value, str]) -> None:
    """Rename values; those without a counterpart keep theirs, with a mark where it is taken."""
    taken = set(renamed.values())
    values: Sequence[Value] = list(function.values())
    for value in values:
        if value in renamed:
            value.name = renamed[value]
        elif value.name in taken:
            value.name += ".b"


__all__ = ["module_diff"]
