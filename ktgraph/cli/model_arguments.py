"""Arguments that every command on a model has, and lowering a model as they say."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ktgraph.packed_folder import check_restart, plan_in

if TYPE_CHECKING:
    from ktgraph.compiled import Compiled
    from ktgraph.stages import Lowered

_OPTIONS = (
    "quantize",
    "activations",
    "max_tokens",
    "max_batch",
    "context",
    "rules",
    "popularity",
    "threads",
    "exact",
    "defer",
)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, and how it is compiled."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a checkpoint folder, a .gguf file, or a folder that ktgraph quantize wrote",
    )
    parser.add_argument(
        "--target", default="auto", help="auto, cpu, cuda, hybrid, simulated, or a target file"
    )
    parser.add_argument(
        "--gpu-memory", metavar="SIZE", help='what the GPU may take, e.g. "21GiB"; default: all'
    )
    parser.add_argument("--dtype", default="auto", help="auto (f32; with a GPU bf16), f32 or bf16")
    parser.add_argument("--pipeline", default="default", help='e.g. "default,-fuse-norms"')
    parser.add_argument("--quantize", help='e.g. int8, "int4p(group=32)"; default: lossless')
    parser.add_argument("--context", type=int, metavar="ROWS", help="most tokens of a sequence")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most new tokens of one call")
    parser.add_argument("--max-batch", type=int, metavar="N", help="most sequences of one call")
    parser.add_argument("--threads", type=int, metavar="N", help="default: as measured")
    parser.add_argument("--rules", metavar="FILE", help="YAML placement rules")
    parser.add_argument(
        "--popularity", metavar="FILE", help="which experts are hot: made by ktgraph profile"
    )
    parser.add_argument(
        "--activations",
        choices=("auto", "f32"),
        help="rows that meet integer weights: auto rounds them to int8, f32 leaves them",
    )
    parser.add_argument(
        "--defer", type=int, metavar="N", help="experts of a token that come a layer late (lossy)"
    )
    parser.add_argument("--exact", action="store_true", default=None, help="refuse lossy rewrites")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="default: the model's own")
    parser.add_argument("--dump", type=Path, metavar="FOLDER", help="write every pass's IR there")
    parser.add_argument("--validate", type=int, choices=(0, 1, 2), metavar="0|1|2")


def open_model(args: argparse.Namespace) -> tuple[Compiled, Lowered | None]:
    """Compile args.model, or start from packed weights; what it needs is said on stderr first."""
    packed = plan_in(args.model)
    if packed is not None:
        return _start(packed, args), None
    lowered = lower_model(args, to_run=True)
    say(lowered.memory_need().summary())
    return lowered.compile(), lowered


def _start(packed: Path, args: argparse.Namespace) -> Compiled:
    from ktgraph.api import load

    options = {name: getattr(args, name) for name in _OPTIONS}
    more = {name: getattr(args, name) for name in ("gpu_memory", "dump", "validate", "tokenizer")}
    for name, default in (("target", "auto"), ("dtype", "auto"), ("pipeline", "default")):
        more[name] = None if getattr(args, name) == default else getattr(args, name)
    changed = check_restart(packed, {**options, **more})
    say(f"weights packed already: {packed}")
    return load(packed, **changed)


def say(text: str) -> None:
    """What is not a command's result goes to stderr."""
    print(text, file=sys.stderr, flush=True)


def lower_model(args: argparse.Namespace, *, to_run: bool = False) -> Lowered:
    """Trace and lower args.model; `to_run`: on this machine, which is checked before."""
    from ktgraph.api import compute_dtype, trace
    from ktgraph.compile_options import check_options
    from ktgraph.target import check_runs_here, resolve_target, with_gpu_memory

    options = {name: getattr(args, name) for name in _OPTIONS}
    check_options(options)
    target = with_gpu_memory(resolve_target(args.target), args.gpu_memory)
    if to_run:
        check_runs_here(target)
    dtype = compute_dtype(args.dtype, target)
    traced = trace(args.model, dtype=dtype, tokenizer=args.tokenizer)
    return traced.lower(target, args.pipeline, validate=args.validate, dump=args.dump, **options)
