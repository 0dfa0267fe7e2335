"""The two small models of small_models.py, lowered, and a runner beside the interpreter."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from small_models import gqa_moe, mla_moe
from torch import Tensor

from ktgraph.ir.graph import Module
from ktgraph.pass_api import CompileOptions, PassContext
from ktgraph.pipeline import Pipeline
from ktgraph.runtime.runner import InterpreterRunner, Rows, Runner
from ktgraph.weights.evaluate import WeightEvaluator
from ktgraph.weights.sources import RandomSource

OPTIONS = CompileOptions(
    max_tokens=16, max_batch=4, context=64, cache_rows=240, page_size=4, threads=2
)
# every op on a native kernel
NATIVE = (
    "specialize-phases,mla-absorb,merge-linears,moe-group,fuse-norms,fuse-rope-kv,pack-weights,"
    "plan-memory,lower"
)
# unpacked weights: linears and experts run on their torch reference, between native segments
MIXED = "specialize-phases,plan-memory,lower"
MODELS = {"mla": mla_moe, "gqa": gqa_moe}


def lower(module: Module, pipeline: str = NATIVE, options: CompileOptions = OPTIONS) -> PassContext:
    """Run passes on the module, in place."""
    context = PassContext(source=RandomSource(module), options=options)
    for step in Pipeline.of(pipeline).steps:
        step.instance.run(module, context)
    return context


@dataclass
class Pair:
    """A runner and its reference; `twins` says which sequence of the other one is the same."""

    runner: Runner
    reference: InterpreterRunner
    source: RandomSource
    options: CompileOptions
    twins: dict[int, int] = field(default_factory=dict[int, int])

    def open(self) -> int:
        seq = self.runner.open()
        self.twins[seq] = self.reference.open()
        return seq

    def close(self, seq: int) -> None:
        self.runner.close(seq)
        self.reference.close(self.twins.pop(seq))

    def forward(self, requests: list[tuple[int, list[int]]], logits: Rows = "last") -> float:
        """Both append; the NMSE between their logits."""
        found = self.runner.forward(requests, logits)
        twins = [(self.twins[seq], ids) for seq, ids in requests]
        return nmse(found, self.reference.forward(twins, logits))


def make_pair(model: str, pipeline: str = NATIVE, **options: Any) -> Pair:
    """A lowered model with random weights, beside the interpreter on the same module."""
    chosen = replace(OPTIONS, **options)
    module = MODELS[model]()
    source = RandomSource(module)
    lower(module, pipeline, chosen)
    reference = InterpreterRunner(module, WeightEvaluator(module, source), chosen)
    return Pair(Runner.load(module, source, chosen), reference, source, chosen)


def prompts(*lengths: int, vocabulary: int = 61, seed: int = 0) -> list[list[int]]:
    """Seeded token ids."""
    rng = torch.Generator().manual_seed(seed)
    return [torch.randint(vocabulary, (n,), generator=rng).tolist() for n in lengths]


def nmse(got: Tensor, want: Tensor) -> float:
    """Squared error over squared size."""
    assert got.shape == want.shape
    difference = got.double() - want.double()
    return float(difference.square().sum() / want.double().square().sum())


__all__ = ["MIXED", "MODELS", "NATIVE", "OPTIONS", "Pair", "lower", "make_pair", "nmse", "prompts"]
