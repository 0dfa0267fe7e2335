"""`kt.trace`, `kt.compile`, `kt.load`: from a model to something that runs."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn

from ktgraph.compile_options import check_options
from ktgraph.compiled import Compiled
from ktgraph.errors import UnsupportedInputError, path_of
from ktgraph.ir.graph import Module
from ktgraph.ir.parser import parse_module
from ktgraph.model_input import Model, is_gguf, read_model
from ktgraph.ops.tensor import dtype_name
from ktgraph.packed_folder import check_restart, plan_in
from ktgraph.stages import Traced
from ktgraph.start_cache import folder_key, read_entry, write_entry
from ktgraph.target import Target, resolve_target

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from ktgraph.module_stages import CompiledModule, ExampleInputs, TracedModule

_DTYPES = {"auto": torch.float32, "f32": torch.float32, "bf16": torch.bfloat16}


@overload
def trace(model: Model, *, dtype: str = "auto", tokenizer: str | Path | None = None) -> Traced: ...
@overload
def trace(
    model: nn.Module, *, dtype: str = "auto", example_inputs: ExampleInputs
) -> TracedModule: ...
def trace(
    model: Model,
    *,
    dtype: str = "auto",
    tokenizer: str | Path | None = None,
    example_inputs: ExampleInputs | None = None,
) -> Traced:
    """The first stage: the model's graph as it is, unplaced.

    model: a causal language model loaded by transformers, or its checkpoint folder; to read or plan
        a graph without weights also a transformers config, or the path of a config.json; or any
        torch module, with `example_inputs`.
    example_inputs: the arguments of one call of the module: a tensor, a tuple, or a dict of keyword
        arguments.  Sizes above 1 may differ in later calls where the module allows it.
    dtype: what is computed in.  "auto" is "f32", with every weight kept as it is stored (a bf16
        checkpoint is `f32[...]<bf16>`: half the bytes, no rounding).
    tokenizer: a folder with tokenizer.json, if it is not the model's own.
    """
    if example_inputs is not None:
        from ktgraph.module_stages import trace_plain

        return trace_plain(model, example_inputs, dtype)
    if not isinstance(dtype, str) or dtype not in _DTYPES:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UnsupportedInputError(f"dtype={dtype!r}: expected one of {', '.join(_DTYPES)}")
    given = read_model(model, tokenizer)
    return Traced(_traced(given.model, _DTYPES[dtype]), given, dtype)


def _traced(model: PreTrainedModel | PreTrainedConfig | Path, dtype: torch.dtype) -> Module:
    if isinstance(model, Path) and not is_gguf(model):
        return _traced_folder(model, dtype)
    from ktgraph.frontends.hf import trace_hf

    return trace_hf(model, dtype)


def _traced_folder(folder: Path, dtype: torch.dtype) -> Module:
    """The graph of a checkpoint; of one that was traced before, as `start_cache` kept it."""
    key, kind = folder_key(folder), f"{dtype_name(dtype)}.ktir"
    kept = None if key is None else read_entry(key, kind)
    if kept is not None:
        return parse_module(kept)
    from ktgraph.frontends.hf import trace_hf
    from ktgraph.frontends.safetensors_files import CheckpointError
    from ktgraph.weights.safetensors_source import LAYOUT, SafetensorsSource

    module = trace_hf(folder, dtype)
    if key is not None and module.witnesses:  # without them it warned, and is to warn again
        write_entry(key, kind, str(module))
        with suppress(CheckpointError):  # told where the weights are read
            write_entry(key, LAYOUT, SafetensorsSource(folder).layout())
    return module


def compute_dtype(dtype: str, target: Target) -> str:
    """What "auto" means for a target: "bf16" where a GPU computes, else what `trace` says."""
    return "bf16" if dtype == "auto" and target.gpus else dtype


@overload
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
) -> Compiled: ...
@overload
def compile(
    model: nn.Module,
    target: str | Path | Target = "auto",
    pipeline: str = "default",
    *,
    example_inputs: ExampleInputs,
    quantize: str | None = None,
    max_tokens: int | None = None,
    validate: int | None = None,
    dump: str | Path | None = None,
    **options: Any,
) -> CompiledModule: ...
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
    example_inputs: ExampleInputs | None = None,
    **options: Any,
) -> Compiled | CompiledModule:
    """Trace, lower and compile in one call.

    model, dtype, tokenizer, example_inputs: see `trace`, but for a language model on a target with
        a GPU dtype "auto" is "bf16".  The others: see `Traced.lower`.  A folder or .ktplan with
        packed weights is loaded instead, as `load` does; everything that weights depend on is as it
        was when they were packed.
    With example_inputs the result is called as the module itself (`CompiledModule`).
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
    if example_inputs is not None:
        from ktgraph.module_stages import trace_plain

        plain = trace_plain(model, example_inputs, dtype)
        return plain.lower(machine, pipeline, validate=validate, dump=dump, **given).compile()
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
