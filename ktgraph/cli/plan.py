"""`ktgraph plan`: will a model run on a machine, how fast, and what binds it; from a config alone.

Nothing is downloaded or loaded.  Exit code 1 when it does not fit.
"""

from __future__ import annotations

import argparse
from typing import Any

_OPTIONS = ("quantize", "dtype", "context", "batch", "max_tokens", "rules", "threads", "defer")


def add_parser(commands: Any) -> None:
    """Add `plan` to the commands of an argparse parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan", help="predict speed and memory from a config alone", description=__doc__
    )
    parser.add_argument("model", metavar="CONFIG", help="a config.json, or a folder with one")
    parser.add_argument(
        "--target", default="auto", help="auto, cpu, hybrid, a described machine, or a target file"
    )
    parser.add_argument("--gpu-memory", metavar="SIZE", help="of the GPU, instead of the target's")
    parser.add_argument("--ram", metavar="SIZE", help="of the host, instead of the target's")
    parser.add_argument(
        "--what-if", action="append", default=[], metavar="CHANGE",
        help="beside the base, several times: gpu_memory=+8GiB, ram=384GiB, link=x2, cpu=NAME, "
        "gpu=NAME, dram=, disk=, quantize=, context=, batch=; joined by commas",
    )  # fmt: skip
    parser.add_argument("--quantize", help='e.g. "experts=int4p(group=64),*=int8"')
    parser.add_argument("--dtype", default="auto", help="auto (f32; with a GPU bf16), f32 or bf16")
    parser.add_argument("--context", type=int, metavar="ROWS", help="most tokens of a sequence")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="sequences at once")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most new tokens of one call")
    parser.add_argument("--rules", metavar="FILE", help="YAML placement rules")
    parser.add_argument("--defer", type=int, metavar="N", help="as `ktgraph run` takes it")
    parser.add_argument("--threads", type=int, metavar="N", help="of the host's CPU")
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Print the plan."""
    from rich.console import Console

    from ktgraph.planner import plan

    found = plan(
        args.model,
        args.target,
        what_if=args.what_if,
        gpu_memory=args.gpu_memory,
        ram=args.ram,
        **{name: getattr(args, name) for name in _OPTIONS},
    )
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(found)
    else:
        print(found)
    return 0 if found.fits else 1
