"""The arguments of `ktgraph bench cpu` and bench/cpu_moe.py. Imports nothing heavy."""

from __future__ import annotations

import argparse
from pathlib import Path

from ktgraph.bench.shapes import MEASURED, TOKENS

FORMATS = "bf16,int8,int4p:64"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to measure and where to."""
    add = parser.add_argument
    add("--shapes", default=",".join(MEASURED), help="default: %(default)s")
    add("--tokens", default=",".join(map(str, TOKENS)), help="default: %(default)s")
    add("--formats", default=FORMATS, help="default: %(default)s")
    add("--threads", default="", help="as 8,16; default: one for each CPU that may be used")
    add("--isa", default="", help="avx2, avx512, ...: default the best")
    later = "time for this call; the next one with the same store goes on (default: %(default)s)"
    add("--seconds", type=float, default=480.0, help=later)
    add("--cell-seconds", type=float, default=1.0, help="default: %(default)s")
    rotation = "weights in rotation, in last-level caches (default: %(default)s)"
    add("--footprint", type=float, default=20.0, metavar="X", help=rotation)
    share = "for weights; default: 45 %% of what is free"
    add("--memory", type=float, default=0.0, metavar="GIB", help=share)
    kept = "keep cells here, and leave out those that are there"
    add("--store", type=Path, metavar="FILE.jsonl", help=kept)
    add("--fresh", action="store_true", help="begin the store anew")
    add("--csv", type=Path, metavar="FILE")
    add("--markdown", type=Path, metavar="FILE")
    add("--roofline", type=Path, metavar="FILE.png", help="needs matplotlib")
    add("--report-only", action="store_true", help="only show what the store has")
