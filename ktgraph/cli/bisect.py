"""`ktgraph bisect`: find the first pass that goes wrong, then the first rewrite inside it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_parser(commands: Any) -> None:
    """Add `bisect` to the commands of an argparse parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "bisect", help="find the first bad pass and rewrite", description=__doc__
    )
    parser.add_argument("what", type=Path, metavar="REPRO|FILE.ktir")
    parser.add_argument("-p", "--pipeline", help="default: the recorded one")
    parser.add_argument("--plugin", action="append", default=[], metavar="FILE.py")
    parser.add_argument("--seed", type=int, default=0, help="of weights and tokens (a file's)")
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Run the command; exit code 1 when a pass goes wrong."""
    from ktgraph.bisect import bisect
    from ktgraph.pipeline import load_plugin

    for plugin in args.plugin:
        load_plugin(plugin)
    found = bisect(args.what, args.pipeline, seed=args.seed)
    print("no pass goes wrong" if found is None else found)
    return 0 if found is None else 1
