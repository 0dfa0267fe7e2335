"""`ktgraph passes`: the passes there are, with options, numerics and documentation."""

from __future__ import annotations

import argparse
import inspect
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ktgraph.pass_api import Pass


def add_parser(commands: Any) -> None:
    """Add `passes` to the commands of an argparse parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "passes", help="list passes, or explain one", description=__doc__
    )
    parser.add_argument("name", nargs="?", help="show this pass in full")
    parser.add_argument("--plugin", action="append", default=[], metavar="FILE.py")
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    from ktgraph.pass_api import all_passes, pass_class
    from ktgraph.pipeline import load_plugin

    for plugin in args.plugin:
        load_plugin(plugin)
    if args.name is not None:
        print(describe(pass_class(args.name)))
        return 0
    _print_table(all_passes())
    return 0


def documentation(cls: type[Pass]) -> str:
    """The file's docstring where it is about this pass, else the class's own."""
    module = inspect.getmodule(cls)
    whole = inspect.cleandoc((module.__doc__ if module is not None else "") or "")
    own = "" if _is_generated(cls) else inspect.cleandoc(cls.__doc__ or "")
    if whole.startswith(f"{cls.name}:"):
        return "\n\n".join([whole] + ([own] if own else []))
    return f"{cls.name}: {own or whole}".strip()


def _is_generated(cls: type[Pass]) -> bool:
    """Whether `dataclass` wrote the docstring: the name and its arguments."""
    return (cls.__doc__ or "").startswith(f"{cls.__name__}(")


def describe(cls: type[Pass]) -> str:
    """Everything about one pass."""
    from ktgraph.pass_options import describe_options

    facts = [
        f"numerics  {cls.numerics}",
        f"required  {'yes: lowering needs it' if cls.required else 'no'}",
        f"requires  {', '.join(cls.requires) or 'nothing'}",
        f"ensures   {', '.join(cls.ensures) or 'nothing'}",
        *[f"option    {o}" for o in describe_options(cls)],
        f"from      {cls.__module__}",
    ]
    return "\n".join([documentation(cls), "", *facts])


def _print_table(passes: dict[str, type[Pass]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from ktgraph.pass_options import describe_options

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in ("pass", "numerics", "required"):
        table.add_column(column, no_wrap=True)
    table.add_column("what and options", overflow="fold")
    for name, cls in _ordered(passes):
        first = documentation(cls).split("\n")[0].removeprefix(f"{name}: ")
        about = "\n".join([first, *(f"  {o}" for o in describe_options(cls))])
        table.add_row(name, str(cls.numerics), "yes" if cls.required else "", about)
    width = max(get_terminal_size((120, 24)).columns, 80)
    Console(width=width, highlight=False, markup=False).print(table)


def _ordered(passes: dict[str, type[Pass]]) -> list[tuple[str, type[Pass]]]:
    """In the order of the default pipeline, then by name."""
    from ktgraph.passes.pipelines import PIPELINES

    order = PIPELINES["default"].split(",")
    rank = {name: at for at, name in enumerate(order)}
    return sorted(passes.items(), key=lambda item: (rank.get(item[0], len(order)), item[0]))
