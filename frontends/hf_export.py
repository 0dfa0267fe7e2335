"""torch.export of a twin with leaf ops: one graph, dynamic in batch, new tokens and length."""

from __future__ import annotations

import gc
import inspect
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from ktgraph.frontends.errors import UnsupportedModelError, export_failed
from ktgraph.frontends.hf_build import Twin
from ktgraph.frontends.hf_cache import TraceCache
from ktgraph.frontends.hf_leaves import LeafReport, leaf_ops_in

# Sizes of the axes of a traced module; the importer prints them under these names.
AXES = {"b": (1, 1024), "s": (1, 65536), "t": (1, 1 << 20)}
_EXAMPLE = (2, 3, 8)


@dataclass
class Export:
    program: ExportedProgram
    report: LeafReport


class Step(nn.Module):
    """One call of a causal language model: new tokens, their positions, the cache before."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.cache_name = cache_argument(model)

    def forward(self, input_ids: Tensor, positions: Tensor, state: Tensor) -> tuple[Any, Tensor]:
        cache = TraceCache(state, input_ids.shape[1])
        options = {self.cache_name: cache, "use_cache": True}
        try:
            out = self.model(input_ids=input_ids, position_ids=positions, **options)
        except UnsupportedModelError:
            raise
        except Exception as error:  # here, not around export: that would print the whole graph
            raise export_failed(error, self.model) from error
        return out.logits, cache.state


def cache_argument(model: nn.Module) -> str:
    """``cache`` in newer transformers, ``past_key_values`` before."""
    names = inspect.signature(model.forward).parameters
    found = [n for n in ("cache", "past_key_values") if n in names]
    if not found:
        raise UnsupportedModelError(
            f"{type(model).__name__}.forward takes no cache (neither `cache` nor "
            "`past_key_values`): it is not a causal language model of transformers"
        )
    return found[0]


def export_step(twin: Twin) -> Export:
    """Export one step of the twin; failures become one UnsupportedModelError."""
    step = Step(twin.model)
    b, s, t = _EXAMPLE
    state = torch.zeros(b, t, dtype=torch.int32, device="meta")
    ids = torch.zeros(b, s, dtype=torch.int64, device="meta")
    args = (ids, torch.zeros_like(ids), state)
    db, ds, dt = (Dim(name, min=lo, max=hi) for name, (lo, hi) in AXES.items())
    shapes = {
        "input_ids": {0: db, 1: ds},
        "positions": {0: db, 1: ds},
        "state": {0: db, 1: dt},
    }
    with leaf_ops_in(twin.model, twin.buffers) as report, quiet(), torch.no_grad():
        try:
            program = torch.export.export(step, args, dynamic_shapes=shapes, strict=False)
        except UnsupportedModelError:
            raise
        except Exception as error:
            raise export_failed(error, twin.model) from error
    return Export(program, report)


@contextmanager
def quiet() -> Iterator[None]:
    """Export's warnings are about its own internals; errors still raise.  Its many long-lived
    objects make garbage collection a sixth of its time: paused."""
    loggers = [logging.getLogger(f"torch.{n}") for n in ("export", "fx.experimental")]
    levels = [logger.level for logger in loggers]
    collecting = gc.isenabled()
    gc.disable()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if collecting:
            gc.enable()
