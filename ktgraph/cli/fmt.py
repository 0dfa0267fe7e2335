"""`ktgraph fmt`: write a .ktir file in canonical form.

The comments above the module are kept; comments further down cannot be, and are refused.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ktgraph.errors import UnsupportedInputError


def add_parser(commands: Any) -> None:
    """Add `fmt` to the commands of an argparse parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "fmt", help="write a .ktir file in canonical form", description=__doc__
    )
    parser.add_argument("file", type=Path, metavar="FILE.ktir")
    parser.add_argument("-i", dest="in_place", action="store_true", help="rewrite the file")
    parser.add_argument("--check", action="store_true", help="only tell: exit code 1 if it differs")
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    from ktgraph.ir.parser import parse_module

    text = args.file.read_text()
    head = _head(text)
    _refuse_inner_comments(args.file, text, len(head))
    found = "".join(head) + str(parse_module(text, str(args.file)))
    if args.check:
        return 0 if found == text else 1
    if args.in_place:
        args.file.write_text(found)
    else:
        sys.stdout.write(found)
    return 0


def _head(text: str) -> list[str]:
    """The lines above the module: comments and empty lines."""
    head: list[str] = []
    for line in text.splitlines(keepends=True):
        if line.strip() and not line.lstrip().startswith("//"):
            return head
        head.append(line)
    return head


def _refuse_inner_comments(file: Path, text: str, first: int) -> None:
    for number, line in enumerate(text.splitlines(), start=1):
        if number > first and line.lstrip().startswith("//"):
            raise UnsupportedInputError(
                f"{file}:{number}: a comment inside the module would be lost; "
                "move it above the module or take it out"
            )
