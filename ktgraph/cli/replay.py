"""`ktgraph replay`: run the failing pass of a repro folder again."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_parser(commands: Any) -> None:
    """Add `replay` to the commands of an argparse parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "replay", help="show a failure again from its repro folder", description=__doc__
    )
    parser.add_argument("folder", type=Path, metavar="REPRO")
    parser.add_argument(
        "--validate", type=int, choices=(0, 1, 2), metavar="0|1|2", help="default: as recorded"
    )
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Run the command; the failure ends it with its message and exit code 2."""
    from ktgraph.pass_manager import replay

    report = replay(args.folder, args.validate)
    print(report)
    print("the pass does not fail any more")
    return 0
