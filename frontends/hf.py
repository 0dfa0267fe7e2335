"""`trace_hf`: a transformers causal language model, its config or its folder, as an IR module.

The steps: a twin on the meta device (`hf_build`), leaf ops in place of attention, experts, norms,
routers and rope (`hf_leaves`), torch.export (`hf_export`), import (`fx_import`), equal layers
rolled (`roll`), and two more traces at other sizes, from which dims are named (`config_dims`).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from ktgraph.frontends.config_dims import PAIRS, sizes_of, witness_configs
from ktgraph.frontends.errors import UnsupportedModelError
from ktgraph.frontends.fx_import import import_graph
from ktgraph.frontends.hf_build import Source, Twin, build_twin, twin_like
from ktgraph.frontends.hf_export import export_step
from ktgraph.frontends.hf_leaves import LeafReport
from ktgraph.frontends.roll import group_size, roll_layers
from ktgraph.frontends.witness import first_difference
from ktgraph.ir.graph import Module, Witness
from ktgraph.ir.literals import literals
from ktgraph.ir.verify import verify


@dataclass
class HfTrace:
    """The module, what became leaf ops, and the values that no checkpoint has (rope)."""

    module: Module
    report: LeafReport
    buffers: dict[str, Tensor]


def trace_hf(source: Source, dtype: torch.dtype | None = None) -> Module:
    """The IR module of a loaded model, a config, or a checkpoint folder, computing in `dtype`.

    ``@main(%ids: i64[b, s], %batch: batch, %kv) -> (logits, kv)``.  A loaded model is left as it
    is and its weights are not copied.  Raises UnsupportedModelError.
    """
    return trace_hf_full(source, dtype).module


def trace_hf_full(
    source: Source, dtype: torch.dtype | None = None, *, witnesses: bool = True
) -> HfTrace:
    """`trace_hf` with its report; `witnesses` off skips the traces that dims are named from."""
    twin = build_twin(source, dtype)
    module, report = _trace(twin)
    if witnesses:
        _attach_witnesses(module, twin)
    verify(module)
    return HfTrace(module, report, twin.buffers)


def _trace(twin: Twin) -> tuple[Module, LeafReport]:
    export = export_step(twin)
    module = import_graph(twin, export, twin.config.model_type)
    roll_layers(module)
    return module, export.report


def _attach_witnesses(module: Module, twin: Twin) -> None:
    """Dims of the config, and the literals of two more traces; a mismatch leaves dims unnamed."""
    layers = _enough_layers(module, twin)
    why = ""
    for head_tied in (False, True):  # some models need hidden_size == heads * head_dim
        try:
            found, why = _witnesses(module, twin, layers, head_tied)
        except UnsupportedModelError as error:
            why = str(error)
            continue
        if found:
            module.dims, module.witnesses = _dims(twin, head_tied), found
            return
    warnings.warn(
        f"{module.name}: traced at other sizes it has another graph, so its dims stay plain "
        f"numbers and it is validated at its own size. First difference: {why}",
        stacklevel=4,
    )


def _witnesses(
    module: Module, twin: Twin, layers: int, head_tied: bool
) -> tuple[list[Witness], str]:
    """The witnesses, or none and the first difference."""
    found: list[Witness] = []
    for config in witness_configs(twin.config, layers, head_tied):
        other = twin_like(twin, config)
        traced, _ = _trace(other)
        difference = first_difference(module, traced)
        if difference is not None:
            return [], difference
        found.append(Witness(_dims(other, head_tied), literals(traced)))
    return found, ""


def _dims(twin: Twin, head_tied: bool) -> dict[str, int]:
    """Dims of the config by letter, and the number of rotary pairs."""
    dims = sizes_of(twin.config, head_tied).dims
    pairs = {b.shape[0] for name, b in twin.buffers.items() if name.endswith(".inv_freq")}
    return {**dims, PAIRS: pairs.pop()} if len(pairs) == 1 else dims


def _enough_layers(module: Module, twin: Twin) -> int:
    """Layers that print the same text: of a last run of equal layers two are enough.

    Of a run of equal groups, two groups.
    """
    layers = int(twin.config.num_hidden_layers)
    repeats = [op for op in module.functions["main"].body.ops if op.body is not None]
    if not repeats:
        return layers
    lo, hi, size = (*(repeats[-1].int_attr(name) for name in ("lo", "hi")), group_size(repeats[-1]))
    return min(layers, (lo + 2) * size) if (hi + 1) * size == layers else layers
