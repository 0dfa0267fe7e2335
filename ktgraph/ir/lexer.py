"""Tokens of `.ktir` text, each with its line and column."""

from __future__ import annotations

import re
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r]+|//[^\n]*)
    |(?P<newline>\n)
    |(?P<string>"(?:[^"\\\n]|\\.)*")
    |(?P<value>%[A-Za-z0-9_.]+)
    |(?P<symbol>@[A-Za-z_][A-Za-z0-9_.]*(?:\[[^\]\n]*\][A-Za-z0-9_.]*)*)
    |(?P<capture>\$[A-Za-z_][A-Za-z0-9_]*)
    |(?P<rest>\.\.\.)
    |(?P<range>\.\.)
    |(?P<arrow>->)
    |(?P<number>-?(?:\d+\.(?!\.)\d*(?:e[-+]?\d+)?|\d+e[-+]?\d+|inf\b|nan\b)|\d+)
    |(?P<name>[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*)
    |(?P<punct>[()\[\]{}<>,:=*+@?\-])""",
    re.VERBOSE,
)


class ParseError(ValueError):
    """Malformed `.ktir`: the message has file, line, column, the line itself and a caret."""


@dataclass(frozen=True)
class Token:
    # string value symbol range arrow number name punct end; capture and rest ("...") in rules only
    kind: str
    text: str
    line: int
    column: int


def tokenize(text: str, file: str = "<text>") -> list[Token]:
    """Split text into tokens; raises ParseError at the first character that fits nothing."""
    tokens: list[Token] = []
    position, line, line_start = 0, 1, 0
    while position < len(text):
        found = _TOKEN.match(text, position)
        if found is None:
            column = position - line_start + 1
            raise parse_error(text, file, line, column, f"unexpected character {text[position]!r}")
        kind = found.lastgroup or ""
        if kind == "newline":
            line, line_start = line + 1, found.end()
        elif kind != "space":
            tokens.append(Token(kind, found.group(), line, position - line_start + 1))
        position = found.end()
    tokens.append(Token("end", "", line, position - line_start + 1))
    return tokens


def parse_error(text: str, file: str, line: int, column: int, message: str) -> ParseError:
    """An error that shows the offending line with a caret under the column."""
    lines = text.split("\n")
    shown = lines[line - 1] if line <= len(lines) else ""
    caret = " " * (column - 1) + "^"
    return ParseError(f"{file}:{line}:{column}: {message}\n  {shown}\n  {caret}")
