"""Routed experts on the CPU: ktgraph beside the machine's limits and beside peers, in one run.

    python bench/cpu_moe.py --store cells.jsonl            # ktgraph alone
    python bench/cpu_moe.py --store cells.jsonl --peers    # with all peers that are installed
    python bench/cpu_moe.py --store cells.jsonl --peers torch,ggml --shapes dsv3 --tokens 1,4

The same as `ktgraph bench cpu`, and peers.  One call takes --seconds; with the same store the next
one goes on.  What runs a cell and what counts: ktgraph/bench/cpu_moe.py.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # peers/

from peers import PEERS, subjects_of

from ktgraph.bench.arguments import add_arguments
from ktgraph.bench.run import run
from ktgraph.errors import user_message


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument(
        "--peers", nargs="?", const=",".join(PEERS), default="", help=f"of {', '.join(PEERS)}"
    )
    parser.add_argument(
        "--peer-formats", default="", help="only these, as bf16,int4:row,q4_K; default: all"
    )
    parser.add_argument("--peers-only", action="store_true", help="leave ktgraph out")
    args = parser.parse_args()
    if args.peers_only:
        args.formats = ""
    names = [name for name in args.peers.split(",") if name]
    formats = {name for name in args.peer_formats.split(",") if name}
    try:
        return run(args, lambda: subjects_of(names, formats))
    except Exception as error:
        if (message := user_message(error)) is None:
            raise
        print(f"bench: {message}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
