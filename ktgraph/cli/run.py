"""`ktgraph run`: compile a model, show what it needs, and generate text with it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktgraph.cli.model_arguments import add_model_arguments, open_model, say
from ktgraph.errors import UnsupportedInputError
from ktgraph.pass_report import table_text

if TYPE_CHECKING:
    from ktgraph.compiled import Compiled
    from ktgraph.stages import Lowered

INTERRUPTED = 130  # what a shell gives for Ctrl-C


def add_parser(commands: Any) -> None:
    """Add `run` to the commands of an argparse parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "run", help="compile a model and generate text", description=__doc__
    )
    add_model_arguments(parser)
    parser.add_argument("prompt", nargs="?", help="the text to continue")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="default: to the end token")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--repetition-penalty", type=float, default=1.0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--stop", action="append", default=[], help="a text that ends generation")
    parser.add_argument(
        "--check",
        type=Path,
        metavar="FILE",
        help="compare greedy continuations with a reference.json; exit code 1 where they differ",
    )
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Run the command; the text goes to stdout, everything else to stderr."""
    if args.prompt is None and args.check is None:
        raise UnsupportedInputError("nothing to do: give a prompt, or --check FILE")
    entries = read_reference(args.check) if args.check is not None else []
    check_generation(args)
    exe, lowered = open_model(args)
    status = 0
    if args.prompt is not None:
        status = generate(exe, args)
        say(str(exe.last.timing))
    if entries:
        status = max(status, check(exe, entries))
    if lowered is not None:
        show_passes(lowered)
    return status


def check_generation(args: argparse.Namespace) -> None:
    """Arguments of `generate` that make no sense show before the model is traced and loaded."""
    from ktgraph.generate import Endings
    from ktgraph.sampling import Sampling

    Endings.of(args.max_new_tokens, (), args.stop)
    Sampling(
        args.temperature, args.top_k, args.top_p, args.min_p, args.repetition_penalty, args.seed
    )


def generate(exe: Compiled, args: argparse.Namespace) -> int:
    """Stream the text; Ctrl-C ends it, and what was generated stays."""
    pieces = exe.generate(
        args.prompt,
        args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        seed=args.seed,
        stop=args.stop,
        stream=True,
    )
    sys.stdout.write(args.prompt)
    try:
        for piece in pieces:
            sys.stdout.write(piece)
            sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        print(flush=True)
    return 0


def show_passes(lowered: Lowered) -> None:
    """The table of passes, and where the dump is."""
    say(table_text(lowered.passes.records))
    if lowered.passes.folder is not None:
        say(f"dump: {lowered.passes.folder}")


# ---- comparison with a reference


@dataclass(frozen=True)
class Entry:
    """One greedy continuation of a reference file."""

    prompt: list[int]
    ids: list[int]


def read_reference(path: Path) -> list[Entry]:
    """The `greedy_float32` entries of a reference.json."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return [Entry(e["prompt_ids"], e["ids"]) for e in data["greedy_float32"]]
    except (ValueError, KeyError, TypeError) as error:
        raise UnsupportedInputError(
            f"{path}: not a reference file: expected greedy_float32 = [{{prompt_ids, ids}}, …] "
            f"({type(error).__name__}: {error})"
        ) from None


def check(exe: Compiled, entries: Sequence[Entry]) -> int:
    """Compare greedy continuations; 1 where one differs."""
    found = [_first_difference(exe, e) for e in entries]
    for number, (entry, at) in enumerate(zip(entries, found, strict=True)):
        equal = f"equal to the reference in all {len(entry.ids)} tokens"
        message = equal if at is None else f"differs from the reference {at}"
        say(f"check: prompt {number} {message}")
    return 0 if all(at is None for at in found) else 1


def _first_difference(exe: Compiled, entry: Entry) -> str | None:
    got = exe.generate(entry.prompt, len(entry.ids), eos=())
    for at, (ours, theirs) in enumerate(zip(got, entry.ids, strict=True)):
        if ours != theirs:
            spelled = f"{_spell(exe, ours)}, not {_spell(exe, theirs)}"
            return f"at token {at} of {len(entry.ids)}: {spelled}"
    return None


def _spell(exe: Compiled, token: int) -> str:
    text = exe.tokenizer.decode([token]) if exe.tokenizer else ""
    return f"{token} {text!r}" if text else str(token)
