"""`kt.trace`, `kt.compile`, `kt.load`: from a model to something that runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ktgraph.errors import UnsupportedInputError, path_of
from ktgraph.model_input import Model, read_model
from ktgraph.packed_folder import check_restart, plan_in
from ktgraph.stages import Compiled, Traced, check_options
from ktgraph.target import Target, resolve_target

_DTYPES = {"auto": torch.float32, "f32": torch.float32, "bf16": torch.bfloat16}


def trace(model: Model, *, dtype: str = "auto", tokenizer: str | Path | None = None) -> Traced:
    """The first stage: the model's graph as it is, unplaced.

    model: a causal language model loaded by transformers, or its checkpoint folder; to read or plan
        a graph without weights also a transformers config, or the path of a config.json.
    dtype: what is computed in.  "auto" is "f32", with every weight kept as it is stored (a bf16
        checkpoint is `f32[...]<bf16>`: half the bytes, no rounding).
    tokenizer: a folder with tokenizer.json, if it is not the model's own.
    """
    from ktgraph.frontends.hf import trace_hf

    if not isinstance(dtype, str) or dtype not in _DTYPES:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UnsupportedInputError(f"dtype={dtype!r}: expected one of {', '.join(_DTYPES)}")
    given = read_model(model, tokenizer)
    return Traced(trace_hf(given.model, _DTYPES[dtype]), given, dtype)


def compute_dtype(dtype: str, target: Target) -> str:
    """What "auto" means for a target: "bf16" where a GPU computes, else what `trace` says."""
    return "bf16" if dtype == "auto" and target.gpus else dtype


def compile(
    model: Model,
    target: str | Path | Target = "auto",
    pipeline: str = "default",
    *,
    quantize: str | None = None,
    dtype: str = "auto",
    max_tokens: int | None = None,
    context: int | None = None,
    validate: int | None = None,
    dump: str | Path | None = None,
    tokenizer: str | Path | None = None,
    **options: Any,
) -> Compiled:
    """Trace, lower and compile in one call.

    model, dtype, tokenizer: see `trace`, but for a target with a GPU dtype "auto" is "bf16".  The
        others: see `Traced.lower`.  A folder or .ktplan with packed weights is loaded instead, as
        `load` does; everything that weights depend on is as it was when they were packed.
    """
    given = {"quantize": quantize, "max_tokens": max_tokens, "context": context, **options}
    packed = plan_in(model)
    if packed is not None:
        asked = {
            "target": None if target == "auto" else target,
            "pipeline": None if pipeline == "default" else pipeline,
            "dtype": None if dtype == "auto" else dtype,
        }
        more = {"validate": validate, "dump": dump, "tokenizer": tokenizer}
        return load(packed, **check_restart(packed, {**given, **asked, **more}))
    check_options(given)
    machine = resolve_target(target)
    traced = trace(model, dtype=compute_dtype(dtype, machine), tokenizer=tokenizer)
    return traced.lower(machine, pipeline, validate=validate, dump=dump, **given).compile()


def load(
    path: str | Path,
    model: Model | None = None,
    *,
    tokenizer: str | Path | None = None,
    **options: Any,
) -> Compiled:
    """A compiled model from the .ktplan that `save` wrote, or a folder of `ktgraph quantize`.

    model: needed for a plan saved without weights; where given, its weights must be the plan's own.
    options: context, cache_rows and threads may differ from when it was saved.
    Raises PlanFileError with every reason why the plan does not fit this machine.
    """
    path = path_of("path", path)
    path = plan_in(path) or path
    changed = check_restart(path, options)
    given = None if model is None else read_model(model, tokenizer)
    return Compiled.from_plan(path, given, **changed)
