"""`ktgraph opt`: run passes over a .ktir file.

A file of a dump folder goes on where it was written: its first line names the passes it has seen,
pipeline.txt and target.toml beside it hold the rest.  The module goes to stdout (or -o), the table
of passes to stderr.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ktgraph.pass_api import PassContext
    from ktgraph.pipeline import Pipeline
    from ktgraph.recorded import Recorded


def add_parser(commands: Any) -> None:
    """Add `opt` to the commands of an argparse parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "opt", help="run passes over a .ktir file", description=__doc__
    )
    parser.add_argument("file", type=Path, metavar="FILE.ktir")
    parser.add_argument(
        "-p", "--pipeline", help='e.g. "default,-fuse-norms"; default: what is left of the recorded'
    )
    parser.add_argument("--from", dest="start", metavar="PASS", help="begin with this pass")
    parser.add_argument("--target", help="a word, name or file; default: the recorded one")
    parser.add_argument("--options", default="", metavar="NAME=VALUE,…", help="compile options")
    parser.add_argument("--plugin", action="append", default=[], metavar="FILE.py")
    parser.add_argument("--dump", type=Path, metavar="FOLDER", help="write every pass's IR there")
    parser.add_argument("--validate", type=int, choices=(0, 1, 2), metavar="0|1|2")
    parser.add_argument("-o", dest="output", type=Path, metavar="OUT.ktir")
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    from ktgraph.pass_manager import PassManager
    from ktgraph.pipeline import load_plugin
    from ktgraph.recorded import read_recorded, with_header

    for plugin in args.plugin:
        load_plugin(plugin)
    recorded = read_recorded(args.file)
    applied, steps = _steps(recorded, args.pipeline, args.start)
    context = _context(recorded, args.target, args.options)
    report = PassManager().run(
        recorded.module, steps, context, validate=args.validate, dump=args.dump, applied=applied
    )
    print(report, file=sys.stderr)
    text = with_header(str(recorded.module), [*applied, *steps.names])
    if args.output is None:
        sys.stdout.write(text)
    else:
        args.output.write_text(text)
    return 0


def _steps(
    recorded: Recorded, pipeline: str | None, start: str | None
) -> tuple[list[str], Pipeline]:
    """Names of the passes that count as done, and the steps to run."""
    from ktgraph.pipeline import Pipeline

    applied = list(recorded.applied or ())
    if pipeline is not None and start is None:
        return applied, Pipeline.of(pipeline)
    whole = Pipeline.of(pipeline) if pipeline is not None else recorded.pipeline
    whole = whole if whole is not None else Pipeline.of("default")
    if start is None:
        return applied, whole.rest_after(applied)
    steps = whole.starting_at(start)
    return list(whole.names[: len(whole.steps) - len(steps.steps)]), steps


def _context(recorded: Recorded, target: str | None, options: str) -> PassContext:
    from ktgraph.pass_api import CompileOptions
    from ktgraph.pass_options import parse_options
    from ktgraph.target import resolve_target

    context = recorded.context()
    if options:
        given = parse_options(CompileOptions, options, "--options")
        context.options = replace(context.options, **given)
    if target is not None:
        context.target = resolve_target(target)
    return context
