"""`ktgraph dump`: write what every pass makes of a model, without loading its weights."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ktgraph.cli.model_arguments import add_model_arguments, lower_model

DEFAULT = Path("ktg_dump")


def add_parser(commands: Any) -> None:
    """Add `dump` to the commands of an argparse parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "dump", help="write the IR after every pass", description=__doc__
    )
    add_model_arguments(parser)
    parser.set_defaults(main=main, dump=DEFAULT)


def main(args: argparse.Namespace) -> int:
    """Lower the model; print the table of passes, and the folder last."""
    lowered = lower_model(args)
    print(lowered.passes)
    print(lowered.passes.folder)
    return 0
