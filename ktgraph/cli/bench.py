"""`ktgraph bench cpu`: routed experts on this CPU against its measured limits."""

from __future__ import annotations

import argparse
from typing import Any

from ktgraph.bench.arguments import add_arguments


def add_parser(commands: Any) -> None:
    """Add `bench` to the commands of an argparse parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench", help="measure kernels against the limits of this machine", description=__doc__
    )
    parser.add_argument("what", choices=["cpu"], help="cpu: routed experts on the CPU")
    add_arguments(parser)
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Run the bench."""
    from ktgraph.bench.run import run

    return run(args)
