"""What the user asks of a compile, checked: the fields of `CompileOptions` and their values."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from ktgraph.cpu_kernels import NativeMissingError, load_native
from ktgraph.errors import UnsupportedInputError
from ktgraph.model_input import ModelCard
from ktgraph.pass_api import CompileOptions, option_fault
from ktgraph.placement.popularity import Popularity
from ktgraph.placement.rules import read_rules
from ktgraph.target import check_threads
from ktgraph.weights.policy import Policy

PART_OPTIONS = ("quantize", "activations", "max_tokens", "threads")
_PATHS = ("rules", "popularity")  # options that may be given as a Path
_CONTEXT = 4096  # rows of a sequence where the model allows more and the user says nothing


def compile_options(card: ModelCard, dtype: str, given: dict[str, Any]) -> CompileOptions:
    """What the user gave over the defaults; None means the default.  Unknown names are errors."""
    check_options(given)
    chosen = {k: str(v) if k in _PATHS else v for k, v in given.items() if v is not None}
    context = min(card.max_context or _CONTEXT, _CONTEXT)
    options = replace(CompileOptions(), **{"context": context, "dtype": dtype, **chosen})
    if card.max_context is not None and options.context > card.max_context:
        raise UnsupportedInputError(
            f"context={options.context}: {card.name} was made for {card.max_context} positions"
        )
    return options


def check_isa() -> None:
    """A KTGRAPH_ISA that is unknown, or that this CPU lacks, shows before anything runs."""
    try:
        load_native().Engine(1)
    except NativeMissingError:
        return  # lowering works without the native part, and says so where it is needed
    except (RuntimeError, ValueError) as error:
        raise UnsupportedInputError(str(error)) from None


def check_options(given: dict[str, Any]) -> None:
    """Raises UnsupportedInputError for a name that is no option, or a value that makes no sense.

    Also for files that cannot be read: before a model is traced.
    """
    known = sorted({f.name for f in fields(CompileOptions)} - {"dtype"})
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=2)
            hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known)}"
            raise UnsupportedInputError(f"unknown option {name!r}; {hint}")
        fault = option_fault(name, str(given[name]) if name in _PATHS else given[name])
        if fault is not None and given[name] is not None:
            raise UnsupportedInputError(fault)
    if given.get("popularity") is not None:
        Popularity.load(given["popularity"])
    if given.get("rules") is not None:
        read_rules(given["rules"])


def part_options(given: Mapping[str, Any]) -> CompileOptions:
    """Options of what is compiled inside an eager model, where None means the default.

    Raises UnsupportedInputError, TargetError for more threads than CPUs, and PolicyError for an
    unknown encoding, before anything runs.
    """
    for name, value in given.items():
        if name not in PART_OPTIONS:
            raise UnsupportedInputError(
                f"unknown option {name!r}; known: {', '.join(PART_OPTIONS)}"
            )
        fault = option_fault(name, value)
        if fault is not None:
            raise UnsupportedInputError(fault)
    chosen = {k: v for k, v in given.items() if v is not None}
    options = replace(CompileOptions(max_batch=1), **chosen)
    if options.threads is not None:
        check_threads(options.threads)
    if options.quantize is not None:
        Policy.parse(options.quantize)
    return options


__all__ = ["PART_OPTIONS", "check_isa", "check_options", "compile_options", "part_options"]
