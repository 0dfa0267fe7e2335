"""Arguments of a `torch.call` as text: ``%0, [#0, 3], dim=-1, dtype=torch.float32``.

``%k`` is operand k, ``#k`` is entry k of the attribute `sizes`; the rest is Python's own literals,
inf and nan, and torch's dtypes, layouts and memory formats.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from ktgraph.ir.dims import Dim

_MARKS = re.compile(r"""("[^"]*"|'[^']*')|%(\d+)|#(\d+)""")
_PLAIN = (type(None), bool, int, float, str)
_NUMBERS = {"inf": float("inf"), "nan": float("nan")}
_TORCH = (torch.dtype, torch.layout, torch.memory_format)


class ArgumentError(ValueError):
    """An argument that has no text, or a text that is no argument list."""


# -- writing --------------------------------------------------------------------------------------
class ArgumentWriter:
    """Collects operands and sizes while arguments are written.

    `name` gives what stands for an argument: an operand for the first list, a `Dim`, or the
    argument itself.
    """

    def __init__(self, operand: Callable[[object], Any], size: Callable[[object], Dim | None]):
        self._operand = operand
        self._size = size
        self.operands: list[Any] = []
        self.sizes: list[Dim] = []

    def text(self, args: Sequence[object], kwargs: Mapping[str, object]) -> str:
        """The argument list; raises ArgumentError naming what cannot be written."""
        given = [self._one(a) for a in args]
        return ", ".join([*given, *(f"{k}={self._one(v)}" for k, v in kwargs.items())])

    def _one(self, value: object) -> str:
        operand = self._operand(value)
        if operand is not None:
            self.operands.append(operand)
            return f"%{len(self.operands) - 1}"
        size = self._size(value)
        if size is not None:
            if size.is_const:
                return str(size.const())
            self.sizes.append(size)
            return f"#{len(self.sizes) - 1}"
        if isinstance(value, (list, tuple)):
            items = [self._one(v) for v in cast("Sequence[object]", value)]
            inside = ", ".join(items) + (
                "," if isinstance(value, tuple) and len(items) == 1 else ""
            )
            return f"[{inside}]" if isinstance(value, list) else f"({inside})"
        if isinstance(value, dict):
            pairs = cast("dict[str, object]", value).items()
            return "{" + ", ".join(f"{k!r}: {self._one(v)}" for k, v in pairs) + "}"
        if isinstance(value, torch.device):
            return repr(str(value))
        if isinstance(value, _TORCH):
            return str(value)
        if isinstance(value, _PLAIN) and not _has_marks(value):
            return repr(value)
        raise ArgumentError(f"an argument of type {type(value).__name__} ({value!r})"[:200])


def _has_marks(value: object) -> bool:
    """Texts whose quotes `repr` would have to escape."""
    return isinstance(value, str) and ('"' in value or "'" in value or "\\" in value)


# -- reading --------------------------------------------------------------------------------------
def read_arguments(
    text: str, operands: Sequence[Any], sizes: Sequence[int]
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments and keywords; raises ArgumentError for anything but literals, %k and #k."""
    marked = _MARKS.sub(_marked, text)
    try:
        call = ast.parse(f"_({marked})", mode="eval").body
    except SyntaxError as error:
        raise ArgumentError(f"args = {text!r} is no argument list: {error.msg}") from error
    assert isinstance(call, ast.Call)
    reader = _Reader(text, operands, sizes)
    return (
        [reader.value(a) for a in call.args],
        {k.arg or "": reader.value(k.value) for k in call.keywords},
    )


def _marked(found: re.Match[str]) -> str:
    if found.group(1):
        return found.group(1)
    return f"_x{found.group(2)}" if found.group(2) else f"_n{found.group(3)}"


class _Reader:
    def __init__(self, text: str, operands: Sequence[Any], sizes: Sequence[int]) -> None:
        self.text = text
        self.operands = operands
        self.sizes = sizes

    def value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return self._mark(node.id)
        if isinstance(node, (ast.List, ast.Tuple)):
            items = [self.value(e) for e in node.elts]
            return items if isinstance(node, ast.List) else tuple(items)
        if isinstance(node, ast.Dict):
            keys = [self.value(k) for k in node.keys if k is not None]
            return dict(zip(keys, map(self.value, node.values), strict=True))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self.value(node.operand)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            return self._of_torch(node.value.id, node.attr)
        raise self._refused(ast.unparse(node))

    def _mark(self, name: str) -> Any:
        if name in _NUMBERS:
            return _NUMBERS[name]
        found = re.fullmatch(r"_([xn])(\d+)", name)
        if found is None:
            raise self._refused(name)
        values: Sequence[Any] = self.operands if found.group(1) == "x" else self.sizes
        number = int(found.group(2))
        if number >= len(values):
            what = "operands" if found.group(1) == "x" else "sizes"
            raise ArgumentError(
                f"args = {self.text!r} asks for number {number} of {len(values)} {what}"
            )
        return values[number]

    def _of_torch(self, root: str, name: str) -> Any:
        found = getattr(torch, name, None) if root == "torch" else None
        if not isinstance(found, _TORCH):
            raise self._refused(f"{root}.{name}")
        return found

    def _refused(self, part: str) -> ArgumentError:
        return ArgumentError(
            f"args = {self.text!r}: {part} is neither %k (an operand), #k (a size) nor a literal"
        )


__all__ = ["ArgumentError", "ArgumentWriter", "read_arguments"]
