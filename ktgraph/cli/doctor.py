"""`ktgraph doctor`: what this machine is and can do, and whether every kernel works on it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_parser(commands: Any) -> None:
    """Add `doctor` to the commands of an argparse parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor", help="look at this machine and check the kernels", description=__doc__
    )
    parser.add_argument("--remeasure", action="store_true", help="measure even if it was before")
    longer = "measure limits for longer, on more memory (about half a minute)"
    parser.add_argument("--thorough", action="store_true", help=longer)
    parser.add_argument("--save-target", type=Path, metavar="FILE.toml",
                        help="write the machine's description")  # fmt: skip
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Print the report; exit code 1 when something is wrong."""
    from rich.console import Console

    from ktgraph.doctor import doctor

    report = doctor(remeasure=args.remeasure, thorough=args.thorough)
    Console(highlight=False).print(report)
    if args.save_target is not None:
        args.save_target.write_text(report.target.to_toml(), encoding="utf-8")
        print(f"target written to {args.save_target}")
    return 0 if report.ok else 1
