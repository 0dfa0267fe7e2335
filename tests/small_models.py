"""Two small flat models (tests/passes/*_moe.ktir), and a run over a whole trace.

Both are what the default pipeline holds after `flatten-tokens`: two layers, named dims, unplaced.
"""

from __future__ import annotations

from pathlib import Path

import torch

from ktgraph.ir.graph import Module
from ktgraph.ir.interp import Interpreter
from ktgraph.ir.parser import parse_file
from ktgraph.ir.types import StateType
from ktgraph.runtime.batch import Batch
from ktgraph.runtime.state import State
from ktgraph.weights.evaluate import WeightEvaluator
from ktgraph.weights.sources import RandomSource, WeightSource

_HERE = Path(__file__).resolve().parent / "passes"


def mla_moe() -> Module:
    """Two layers of latent attention; layer 0 dense, layer 1 routed and shared experts."""
    return parse_file(_HERE / "mla_moe.ktir")


def gqa_moe() -> Module:
    """Two equal layers in a `repeat`, tied embedding, bf16 storage under f32 compute."""
    return parse_file(_HERE / "gqa_moe.ktir")


def run_trace(
    module: Module,
    source: WeightSource | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    prefill: str = "main",
    decode: str = "main",
    lossless: bool = False,
) -> torch.Tensor:
    """Logits of a ragged prefill (3 and 5 tokens), a chunk, and two ragged decode steps."""
    source = source or RandomSource(module)
    weights = WeightEvaluator(module, source, dtype, lossless=lossless)
    interp = Interpreter(module, weights, dtype)
    steps = [(prefill, [3, 5]), (prefill, [4, 1]), (decode, [1, 1]), (decode, [1, 1])]
    rng = torch.Generator().manual_seed(7)
    state = interp.new_state(_state_type(module, prefill), 32)
    past, logits = [0, 0], list[torch.Tensor]()
    for function, new in steps:
        batch = Batch.build(past, new, [[3, 1, 6], [0, 5, 2]], 4)
        ids = torch.randint(0, module.dims["VOC"], [sum(new)], generator=rng, dtype=torch.int32)
        out: tuple[torch.Tensor, State] = tuple(interp.run(function, [ids, batch, state]))
        logits.append(out[0])
        state = out[1]
        past = [p + n for p, n in zip(past, new, strict=True)]
    return torch.cat(logits)


def _state_type(module: Module, function: str) -> StateType:
    found = [a.type for a in module.functions[function].args if isinstance(a.type, StateType)]
    return found[0]


def nmse(got: torch.Tensor, want: torch.Tensor) -> float:
    """Squared error over squared size."""
    return float((got - want).double().square().sum() / want.double().square().sum())


__all__ = ["gqa_moe", "mla_moe", "nmse", "run_trace"]
