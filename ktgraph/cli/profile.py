"""`ktgraph profile`: count which experts a model chooses, for the placement of hot experts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ktgraph.cli.model_arguments import add_model_arguments, lower_model

DEFAULT = Path("popularity.json")


def add_parser(commands: Any) -> None:
    """Add `profile` to the commands of an argparse parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "profile", help="count which experts a model chooses", description=__doc__
    )
    add_model_arguments(parser)
    parser.add_argument("prompts", type=Path, metavar="PROMPTS", help="a text, one prompt a line")
    parser.add_argument(
        "-o", "--output", type=Path, default=DEFAULT, metavar="FILE", help=f"default: {DEFAULT}"
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=32, metavar="N", help="behind each prompt; default 32"
    )
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Run the prompts, write the file, and print how unequal the choices were."""
    from ktgraph.errors import UnsupportedInputError

    prompts = read_prompts(args.prompts)
    folder = args.output.parent
    if not folder.is_dir():  # said before the model runs, not after
        raise UnsupportedInputError(f"-o {args.output}: there is no folder {folder}")
    found = lower_model(args).compile().popularity(prompts, args.max_new_tokens)
    found.save(args.output)
    for router, counts in found.counts.items():
        shown = ", ".join(
            f"{n} {found.share(router, len(counts), found.hottest(router, len(counts), n)):.0%}"
            for n in _numbers(len(counts))
        )
        print(f"{router}: {len(counts)} experts; share of choices of the hottest {shown}")
    print(f"{args.output}: {found.tokens} tokens of {len(prompts)} prompts")
    return 0


def read_prompts(path: Path) -> list[str]:
    """The lines that are not blank; raises UnsupportedInputError where there is none."""
    from ktgraph.errors import UnsupportedInputError

    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UnsupportedInputError(f"{path}: no text in UTF-8 ({error})") from None
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise UnsupportedInputError(f"{path}: no prompts: expected one on each line")
    return prompts


def _numbers(experts: int) -> list[int]:
    """1/8, 1/4 and 1/2 of the experts."""
    return sorted({max(1, experts // part) for part in (8, 4, 2)})
