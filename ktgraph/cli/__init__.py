"""The command line.  One file per command, and one line in COMMANDS.

A command's module has ``add_parser(commands)``, which adds its parser to argparse's subparsers and
sets ``main``: a function of the parsed arguments that returns the exit code.  Heavy imports belong
into that function.  Errors a user can cause end as one message on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from ktgraph.errors import user_message

COMMANDS = (
    "run",
    "chat",
    "quantize",
    "plan",
    "dump",
    "opt",
    "explain",
    "profile",
    "diff",
    "bisect",
    "replay",
    "passes",
    "doctor",
    "bench",
    "fmt",
)  # in the order that `ktgraph --help` lists them

ERROR, INTERRUPTED = 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    try:
        args = build_parser().parse_args(argv)
        with _short_warnings():
            return _run(args)
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(args: argparse.Namespace) -> int:
    try:
        code = int(args.main(args))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader has seen enough: `ktgraph passes | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if args.debug:
            raise
        print(f"ktgraph {args.command}: {_message(error)}", file=sys.stderr)
        return ERROR


def build_parser() -> argparse.ArgumentParser:
    """The parser with every command."""
    parser = argparse.ArgumentParser(
        prog="ktgraph", description="Compile and run large mixture-of-experts language models."
    )
    parser.add_argument("--version", action="version", version=f"ktgraph {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        import_module(f"ktgraph.cli.{name}").add_parser(commands)
    for command in commands.choices.values():
        command.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    return parser


def _version() -> str:
    try:
        return version("ktgraph")
    except PackageNotFoundError:
        return "(not installed)"


@contextmanager
def _short_warnings() -> Generator[None]:
    """A warning is one line: which line of ktgraph gave it tells a user nothing."""

    def short(message: Warning | str, category: type[Warning], *_: object) -> str:
        return f"{category.__name__}: {message}\n"

    usual, warnings.formatwarning = warnings.formatwarning, short
    try:
        yield
    finally:
        warnings.formatwarning = usual


def _message(error: Exception) -> str:
    known = user_message(error)
    if known is not None:
        return known
    return f"{type(error).__name__}: {error} (a fault in ktgraph; --debug shows where)"


__all__ = ["COMMANDS", "build_parser", "main"]
