"""`ktgraph explain`: why an op runs where it does, what it costs, and which kernel it has.

A file of a dump folder brings its target, options and placement report along.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_parser(commands: Any) -> None:
    """Add `explain` to the commands of an argparse parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "explain", help="why an op runs where it does", description=__doc__
    )
    parser.add_argument("file", type=Path, metavar="FILE.ktir")
    parser.add_argument("what", nargs="+", metavar="%value|@weight|op")
    parser.add_argument("--target", help="a word, name or file; default: the recorded one")
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Print a paragraph for each name."""
    from ktgraph.explain import explain
    from ktgraph.recorded import read_recorded
    from ktgraph.target import resolve_target

    recorded = read_recorded(args.file)
    target = resolve_target(args.target) if args.target is not None else recorded.target
    report = args.file.parent / "placement.txt"
    placement = report.read_text(encoding="utf-8") if report.is_file() else ""
    found = [
        explain(recorded.module, what, target, recorded.options, placement) for what in args.what
    ]
    print("\n\n".join(found))
    return 0
