"""Running a traced module of a tiny random model (tests/families.py) beside the model itself."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from families import FAMILIES, build, nmse

from ktgraph.frontends.hf import HfTrace, trace_hf_full
from ktgraph.ir.graph import Module
from ktgraph.ir.interp import Interpreter
from ktgraph.ir.types import StateType
from ktgraph.runtime.batch import Batch
from ktgraph.weights.evaluate import WeightEvaluator
from ktgraph.weights.sources import ModelSource, WeightSource

PAGE = 4


@functools.cache
def trace(name: str, dtype: torch.dtype = torch.float32) -> HfTrace:
    """The module of `build(name, dtype)` without witnesses; not to be changed."""
    return trace_hf_full(build(name, dtype), witnesses=False)


def run_module(
    module: Module,
    source: WeightSource,
    ids: torch.Tensor,
    chunks: Sequence[int],
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Logits of `ids` [b, s], fed in chunks, through the reference interpreter."""
    rows = ids.shape[0]
    interp = Interpreter(module, WeightEvaluator(module, source), dtype)
    pages = -(-ids.shape[1] // PAGE)
    tables = [[q * pages + p for p in reversed(range(pages))] for q in range(rows)]
    state_type = module.functions["main"].args[2].type
    assert isinstance(state_type, StateType)
    state, out, past = interp.new_state(state_type, rows * pages * PAGE), [], 0
    for new in chunks:
        batch = Batch.build([past] * rows, [new] * rows, tables, PAGE)
        inputs = [ids[:, past : past + new], batch, state]
        logits, state = interp.run("main", inputs, {"t": past + new})
        out.append(logits)
        past += new
    return torch.cat(out, 1)


def eager(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


class Kit:
    """The helpers above, for tests."""

    build = staticmethod(build)
    trace = staticmethod(trace)
    config = staticmethod(lambda name: FAMILIES[name].make_config())
    nmse = staticmethod(nmse)
    run = staticmethod(run_module)
    eager = staticmethod(eager)
    source = staticmethod(ModelSource)


@pytest.fixture(scope="session")
def kit() -> type[Kit]:
    return Kit
