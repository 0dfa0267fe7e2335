"""Options as text: ``gpu_memory=22GiB,layers=[1, 2]`` to and from the fields of a dataclass.

Values by field type: ``true``/``false``; integers, also as sizes (``22GiB``); floats; strings, bare
or quoted; ``none`` for an optional field; ``[a, b]`` for tuples.  Commas inside brackets or quotes
do not separate, so ``encoding=int4(group=32)`` needs no quotes.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ktgraph.errors import KtgraphError
from ktgraph.target.description import TargetError, parse_size

_OPEN, _CLOSE = "([{", ")]}"
_BARE = re.compile(r"[^\s,\[\]{}\"@][^,\[\]{}\"@]*")


class PipelineError(KtgraphError, ValueError):
    """A malformed pipeline string or option; the message quotes it and lists what is known."""


def split_top(text: str, separator: str = ",") -> list[str]:
    """Split at separators outside brackets and quotes; raises PipelineError when unbalanced."""
    parts: list[str] = []
    depth, quoted, current = 0, False, ""
    for char in text:
        quoted ^= char == '"'
        depth += 0 if quoted else (char in _OPEN) - (char in _CLOSE)
        if depth < 0:
            raise PipelineError(f"{text!r}: {char!r} closes nothing")
        if char == separator and depth == 0 and not quoted:
            parts.append(current.strip())
            current = ""
        else:
            current += char
    if depth or quoted:
        raise PipelineError(f"{text!r}: a bracket or quote is not closed")
    return [*parts, current.strip()]


def parse_options(cls: type[Any], text: str, where: str) -> dict[str, Any]:
    """Field values of the dataclass `cls` from ``a=1,b=true``; `where` names it in errors."""
    found: dict[str, Any] = {}
    hints = get_type_hints(cls)
    names = [f.name for f in fields(cls)]
    for item in split_top(text) if text.strip() else []:
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            raise PipelineError(f"{where}: expected name=value, got {item!r}")
        if key not in names:
            raise PipelineError(_unknown_option(cls, key, where))
        if key in found:
            raise PipelineError(f"{where}: option {key} is given twice")
        found[key] = parse_value(value, hints[key], f"{where}: option {key}")
    return found


def _unknown_option(cls: type[Any], key: str, where: str) -> str:
    known = describe_options(cls)
    if not known:
        return f"{where}: it has no options, got {key!r}"
    close = difflib.get_close_matches(key, [f.name for f in fields(cls)], n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return f"{where}: unknown option {key!r}{hint}; it has: {', '.join(known)}"


def describe_options(cls: type[Any]) -> list[str]:
    """``name: type = default`` of every option."""
    hints = get_type_hints(cls)
    return [f"{f.name}: {type_name(hints[f.name])}{_default(f)}" for f in fields(cls)]


def _default(field: Field[Any]) -> str:
    if field.default is MISSING:
        return ""
    return f" = {format_value(field.default)}"


def type_name(hint: Any) -> str:
    """The type as an option's documentation writes it."""
    if hint is NoneType:
        return "none"
    if get_origin(hint) in (Union, UnionType):
        return " | ".join(type_name(a) for a in get_args(hint))
    if get_origin(hint) is Literal:
        return " | ".join(str(a) for a in get_args(hint))
    if get_origin(hint) is tuple:
        return f"[{type_name(get_args(hint)[0])}, …]"
    return str(hint.__name__)


def parse_value(text: str, hint: Any, where: str) -> Any:
    """One value of the type `hint`; raises PipelineError with the expected type and the text."""
    for member in _members(hint):
        try:
            return _parse_as(text, member)
        except (ValueError, TargetError):
            continue
    raise PipelineError(f"{where} takes {type_name(hint)}, got {text!r}")


def _members(hint: Any) -> Iterator[Any]:
    if get_origin(hint) not in (Union, UnionType):
        yield hint
        return
    members = get_args(hint)
    yield from sorted(members, key=lambda m: m is str)  # a string fits anything: try it last


def _parse_as(text: str, kind: Any) -> Any:
    if kind is NoneType:
        return _one_of(text, {"none": None})
    if kind is bool:
        return _one_of(text, {"true": True, "false": False})
    if kind is int:
        return int(text) if re.fullmatch(r"-?\d+", text) else parse_size(text)
    if kind is float:
        return float(text)
    if kind is str:
        return _string(text)
    if get_origin(kind) is Literal:
        return _one_of(text, {str(a): a for a in get_args(kind)})
    if get_origin(kind) is tuple:
        return _tuple(text, get_args(kind)[0])
    raise PipelineError(f"an option of type {type_name(kind)} cannot be written as text")


def _one_of(text: str, choices: dict[str, Any]) -> Any:
    if text not in choices:
        raise ValueError(text)
    return choices[text]


def _string(text: str) -> str:
    if len(text) >= 2 and text[0] == text[-1] == '"':
        return text[1:-1]
    if not text or '"' in text:
        raise ValueError(text)
    return text


def _tuple(text: str, item: Any) -> tuple[Any, ...]:
    if text[:1] != "[" or text[-1:] != "]":
        raise ValueError(text)
    inner = text[1:-1].strip()
    return tuple(parse_value(t, item, "an item") for t in split_top(inner)) if inner else ()


def options_text(instance: Any) -> str:
    """``{a=1,b=true}`` with the fields that differ from their defaults, or an empty string."""
    items = [(f, getattr(instance, f.name)) for f in fields(instance)]
    shown = [f"{f.name}={format_value(v)}" for f, v in items if v != f.default]
    return "{" + ",".join(shown) + "}" if shown else ""


def format_value(value: Any) -> str:
    """Text that `parse_value` reads back; raises PipelineError for a value that has none."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return _format_string(value)
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(format_value(v) for v in value) + "]"  # pyright: ignore[reportUnknownVariableType]
    raise PipelineError(f"an option value {value!r} cannot be written as text")


def _format_string(value: str) -> str:
    if '"' in value:
        raise PipelineError(f"an option value cannot hold a quote: {value!r}")
    balanced = value.count("(") == value.count(")")
    bare = _BARE.fullmatch(value) and balanced and value.strip() == value
    return value if bare and value not in ("none", "true", "false") else f'"{value}"'


__all__ = [
    "PipelineError",
    "describe_options",
    "format_value",
    "options_text",
    "parse_options",
    "parse_value",
    "split_top",
    "type_name",
]
