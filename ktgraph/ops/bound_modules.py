"""Which torch module a `torch.call` means: modules by the names that the IR's text gives them.

A traced module is bound to its class's name (``Net``, a second live one ``Net.2``), and one of its
submodules is ``Net/blocks.0.moe``.  A dump that is run again in another process finds nothing there
until `bind_module` says what the name means.  A traced module is held weakly: what runs its graph
keeps it alive.
"""

from __future__ import annotations

from itertools import count
from weakref import WeakValueDictionary

from torch import nn

from ktgraph.errors import UnsupportedInputError

_BOUND: WeakValueDictionary[str, nn.Module] = WeakValueDictionary()
_KEPT: dict[str, nn.Module] = {}  # what `bind_module` was given


class UnboundModuleError(UnsupportedInputError):
    """A `torch.call` names a module that this process does not know."""


def bind_module(name: str, module: nn.Module) -> None:
    """Let `torch.call {module = "name/…"}` mean submodules of `module`, e.g. to run a dump again.

    The module is kept until the name is bound again.
    """
    if not isinstance(module, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UnsupportedInputError(
            f"bind_module({name!r}, …): expected a torch module, got {type(module).__name__}"
        )
    if not name or "/" in name:
        raise UnsupportedInputError(
            f"bind_module({name!r}, …): expected the part before the slash, as in Net of Net/moe"
        )
    _BOUND[name] = _KEPT[name] = module


def name_of(module: nn.Module) -> str:
    """The name a module is bound to; an unbound one is bound to its class's name."""
    for name, bound in _BOUND.items():
        if bound is module:
            return name
    stem = type(module).__name__
    names = (stem if n == 1 else f"{stem}.{n}" for n in count(1))
    name = next(n for n in names if n not in _BOUND)
    _BOUND[name] = module
    return name


def bound_module(path: str) -> nn.Module:
    """The module that ``Net/blocks.0.moe`` (or ``Net``) means; raises UnboundModuleError."""
    name, _, inner = path.partition("/")
    root = _BOUND.get(name)
    if root is None:
        raise UnboundModuleError(
            f"torch.call runs the module {path}, and no module is bound to the name {name!r} in "
            f"this process (bound: {', '.join(sorted(_BOUND)) or 'none'}). Build the model and "
            f"call ktgraph.bind_module({name!r}, model); on the command line, in a file given "
            "with --plugin"
        )
    try:
        return root.get_submodule(inner)
    except AttributeError as error:
        raise UnboundModuleError(
            f"torch.call runs the module {path}, but the {type(root).__name__} bound to {name!r} "
            f"has no submodule {inner!r}: bind the model that the graph was traced from"
        ) from error


__all__ = ["UnboundModuleError", "bind_module", "bound_module", "name_of"]
