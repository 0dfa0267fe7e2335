"""`ktgraph quantize`: pack a model's weights once, into a folder that later starts map.

`ktgraph run DIR`, `ktgraph chat DIR` and `kt.compile("DIR")` start from it without tracing, passes
or packing.  Without --quantize the weights are packed as the checkpoint stores them.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from ktgraph.cli.model_arguments import add_model_arguments, lower_model, say
from ktgraph.packed_folder import PLAN, check_folder, write_folder


def add_parser(commands: Any) -> None:
    """Add `quantize` to the commands of an argparse parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "quantize", help="pack a model's weights once, for quick starts", description=__doc__
    )
    add_model_arguments(parser)
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="DIR", help="the folder to write"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a packed model that is there"
    )
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Run the command; the folder is printed last, everything else goes to stderr."""
    from ktgraph.target.description import round_size

    check_folder(args.output, overwrite=args.overwrite)
    lowered = lower_model(args)
    nbytes, packing = lowered.packing()
    say(f"writes {round_size(nbytes)}, packing takes about {round_size(packing)} of memory")
    say(f"to run it {lowered.memory_need().summary()}")
    began = time.perf_counter()
    folder = write_folder(lowered, args.output, overwrite=args.overwrite, say=say)
    say(f"packed {round_size(nbytes)} in {time.perf_counter() - began:.1f} s: {folder / PLAN}")
    print(args.output)
    return 0
