"""xfer.*: values that cross from one device to another; their meaning is the identity."""

from __future__ import annotations

from typing import Any

from ktgraph.ir.types import Type
from ktgraph.ops.registry import op


def _same(types: Any, attrs: Any) -> list[Type]:
    return [t for t in types if t is not None]


@op("xfer.copy(xs: any[...]*; stream: int = 0, share: float = 1.0) -> any[...]", infer=_same)
def copy(*xs: Any, stream: int, share: float) -> Any:
    """Copies of the operands on the results' device, ordered after their producers.

    share: of the bytes that cross a link; the rest lies there already, in slots of hot experts.
    Only prices read it.
    """
    return xs[0] if len(xs) == 1 else xs


@op("xfer.post(xs: any[...]*; mailbox: int) -> any[...]", infer=_same)
def post(*xs: Any, mailbox: int) -> Any:
    """Hand operands to the other device without waiting; `xfer.await` of the mailbox receives."""
    return xs[0] if len(xs) == 1 else xs


@op("xfer.await(xs: any[...]*; mailbox: int) -> any[...]", infer=_same)
def await_(*xs: Any, mailbox: int) -> Any:
    """Wait for the answer of a mailbox and bring it to the results' device."""
    return xs[0] if len(xs) == 1 else xs
