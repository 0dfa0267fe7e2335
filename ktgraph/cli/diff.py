"""`ktgraph diff`: compare two .ktir files declaration by declaration and function by function."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_parser(commands: Any) -> None:
    """Add `diff` to the commands of an argparse parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "diff", help="compare two .ktir files", description=__doc__
    )
    parser.add_argument("a", type=Path, metavar="A.ktir")
    parser.add_argument("b", type=Path, metavar="B.ktir")
    parser.add_argument(
        "--ignore-names", action="store_true", help="leave out differences of value names and locs"
    )
    parser.add_argument("--context", type=int, default=2, metavar="LINES")
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Run the command; exit code 1 when the files differ."""
    from ktgraph.ir.compare import module_diff
    from ktgraph.ir.parser import parse_file

    found = module_diff(
        parse_file(args.a),
        parse_file(args.b),
        str(args.a),
        str(args.b),
        ignore_names=args.ignore_names,
        context=args.context,
    )
    print(found, end="")
    return 1 if found else 0
