"""Module properties that passes require and ensure: name -> check(module) -> True | no(reason)."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from ktgraph.ir.graph import Module, Op
from ktgraph.ir.types import BatchType
from ktgraph.ir.verify import COPIES, PENDING
from ktgraph.ops.registry import Refusal, no

Check = Callable[[Module], bool | Refusal]


def _named(module: Module) -> bool | Refusal:
    """Dims are named as far as they can be: no witness traces are left."""
    if not module.witnesses:
        return True
    return no(f"{len(module.witnesses)} witness traces are left: run name-dims first")


def _flat(module: Module) -> bool | Refusal:
    """Tokens lie on one ragged axis T, or have fixed sizes: no [b, s] is left."""
    for func in module.functions.values():
        takes_batch = any(isinstance(a.type, BatchType) for a in func.args)
        how = "run flatten-tokens first"
        if not takes_batch:
            how += ', or fix-sizes with sizes in the attribute example = ["b=2", …] of the function'
        for value in func.args:
            names = {n for d in getattr(value.type, "dims", ()) for n in d.names}
            if names & {"b", "s", "t"}:
                return no(f"%{value.name} of @{func.name} is {value.type}: {how}")
    return True


def _ragged(module: Module) -> bool | Refusal:
    """The tokens of every causal language model lie on one axis; plain modules keep their axes."""
    for func in module.functions.values():
        for value in func.args:
            names = {n for d in getattr(value.type, "dims", ()) for n in d.names}
            if names & {"b", "s", "t"} and any(isinstance(a.type, BatchType) for a in func.args):
                return no(f"%{value.name} of @{func.name} is {value.type}")
    return True


def _phased(module: Module) -> bool | Refusal:
    """Every function says the most new tokens of a sequence it is for (attribute max_q)."""
    without = [f.name for f in module.functions.values() if "max_q" not in f.attrs]
    return no(f"@{without[0]} has no max_q: run specialize-phases first") if without else True


def _placed(module: Module) -> bool | Refusal:
    """Every op has a device: printed, or the module's home."""
    return True if module.home else no("the module has no home device: run place first")


def _copied(module: Module) -> bool | Refusal:
    """Operands lie where their op runs (the verifier checks it once no copies are pending)."""
    waiting = [f.name for f in module.functions.values() if f.attrs.get(COPIES) == PENDING]
    if waiting:
        return no(f"copies of @{waiting[0]} between devices are pending: run insert-copies first")
    return _placed(module)


def _lowered(module: Module) -> bool | Refusal:
    """Every op that computes has a kernel (`via`)."""
    for op in module.walk():
        if op.body is None and not op.via:
            return no("no kernel was chosen: run lower first", op)
    return True


def _has_batch(module: Module) -> bool | Refusal:
    """The module is a causal language model: it takes a batch and a cache."""
    for func in module.functions.values():
        if not any(isinstance(a.type, BatchType) for a in func.args):
            return no(f"@{func.name} takes no batch: it is not a causal language model")
    return True


PROPERTIES: dict[str, Check] = {
    "named": _named,
    "flat": _flat,
    "ragged": _ragged,
    "phased": _phased,
    "placed": _placed,
    "copied": _copied,
    "lowered": _lowered,
    "causal-lm": _has_batch,
}


def register_property(name: str, check: Check) -> None:
    """Add a property that passes may name in `requires` and `ensures`."""
    PROPERTIES[name] = check


def missing(module: Module, name: str) -> str:
    """Why the module lacks a property; an empty string when it has it.

    Raises KeyError for a property that is in no table.
    """
    if name not in PROPERTIES:
        close = difflib.get_close_matches(name, PROPERTIES, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise KeyError(f"no module property {name!r}{hint}; known: {', '.join(PROPERTIES)}")
    found = PROPERTIES[name](module)
    if found:
        return ""
    return _reason(found)


def _reason(found: bool | Refusal) -> str:
    if not isinstance(found, Refusal):
        return "the check failed"
    return found.reason + (f"\n  in: {_line(found.op)}" if found.op is not None else "")


def _line(op: Op) -> str:
    return str(op).split("\n")[0]


__all__ = ["PROPERTIES", "Check", "missing", "register_property"]
