"""Small models placed on a simulated GPU and this CPU, and runners for them.

Where experts go is forced by rules; the prices of a toy machine decide the rest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lowered_models
import small_models
import torch
from lowered_models import Pair, prompts
from placed_models import FRONT, HYBRID, small_target

from ktgraph.ir.graph import Module
from ktgraph.ir.parser import parse_module
from ktgraph.pass_api import CompileOptions, PassContext
from ktgraph.pipeline import Pipeline
from ktgraph.runtime.cache import allocate_states
from ktgraph.runtime.gpu.device import GpuDevice
from ktgraph.runtime.gpu.executor import GpuExecutor
from ktgraph.runtime.gpu.simulated import SimulatedDevice
from ktgraph.runtime.packed import load_weights
from ktgraph.runtime.plan import Plan
from ktgraph.runtime.runner import InterpreterRunner, Runner, fit_cache
from ktgraph.weights.evaluate import WeightEvaluator
from ktgraph.weights.sources import RandomSource

OPTIONS = replace(lowered_models.OPTIONS, activations="f32")
PIPELINE = f"{FRONT},{HYBRID},pack-weights,plan-memory,lower"
DEFERRED = PIPELINE.replace("insert-copies", "expert-deferral,insert-copies")  # option `defer`
_ALWAYS = "- match: {{class: moe.grouped_mlp}}\n  replace: {{device: {0}}}\n"
_PREFILL = "- match: {class: moe.grouped_mlp}\n  replace: {device: stream}\n  phase: prefill\n"
EXPERTS: Mapping[str, str] = {
    "resident": _ALWAYS.format("cuda:0"),
    "cpu": _ALWAYS.format("cpu"),
    "streamed": _ALWAYS.format("stream"),
    "streamed prefill": _PREFILL + _ALWAYS.format("cpu"),
}
HOT = "- match: {class: moe.grouped_mlp}\n  replace: {device: hot, experts: 3}\n"
HOT_EXPERTS: Mapping[str, str] = {"hot": HOT, "hot, streamed prefill": _PREFILL + HOT}


def gqa_layers(layers: int) -> Module:
    """The model gqa_moe with another number of layers, each with experts."""
    text = str(small_models.gqa_moe())
    text = re.sub(r"i in 0\.\.1\b", f"i in 0..{layers - 1}", text)
    return parse_module(
        text.replace("(2 x f32[C, G, A], 2 x", f"({layers} x f32[C, G, A], {layers} x")
    )


_SECOND = """\
  %l1.ids2, %l1.wts2 = moe.route %l1.h.1, @layers[1].mlp.gate2 {top_k = K} : i32[T, K], f32[T, K]
  %l1.routed2 = moe.experts %l1.h.1, %l1.ids2, %l1.wts2, @layers[1].mlp.experts.gate_up_proj, \
@layers[1].mlp.experts.down_proj : f32[T, D]
  %l1.both = tensor.add %l1.routed, %l1.routed2 : f32[T, D]
  %l1.mlp = tensor.add %l1.both, %l1.shared : f32[T, D]"""


def two_groups() -> Module:
    """The model mla_moe with a second choice of experts for each token: two answers at once."""
    text = str(small_models.mla_moe())
    gate = re.search(r"weight @layers\[1\]\.mlp\.gate :.*\n", text)
    assert gate is not None
    twin = gate[0].replace("mlp.gate", "mlp.gate2")
    text = text.replace(gate[0], gate[0] + twin)
    return parse_module(re.sub(r"  %l1\.mlp = .*", _SECOND.replace("\\", r"\\"), text))


def move_behind(module: Module, moved: str, anchor: str) -> None:
    """In every function, move the op that makes %moved right behind the one that makes %anchor."""
    for func in module.functions.values():
        ops = func.body.ops
        op = next(o for o in ops if any(r.name == moved for r in o.results))
        ops.remove(op)
        place = next(n for n, o in enumerate(ops) if any(r.name == anchor for r in o.results))
        ops.insert(place + 1, op)


def place(
    module: Module,
    experts: str,
    pipeline: str = PIPELINE,
    options: CompileOptions = OPTIONS,
    gpu_memory: int = 4 << 30,
) -> PassContext:
    """Run a pipeline on the module, in place, for a simulated GPU.

    experts: a key of EXPERTS, or rules.
    """
    target = small_target(gpu_memory, kind="simulated")
    with TemporaryDirectory() as folder:
        rules = Path(folder) / "rules.yaml"
        rules.write_text(EXPERTS.get(experts, experts), encoding="utf-8")
        context = PassContext(target, RandomSource(module), replace(options, rules=str(rules)))
        for step in Pipeline.of(pipeline).steps:
            step.instance.run(module, context)
    return context


def plan_of(model: Module | str, experts: str, **options: Any) -> Plan:
    """A plan of a small model."""
    module = lowered_models.MODELS[model]() if isinstance(model, str) else model
    place(module, experts, options=replace(OPTIONS, **options))
    return Plan.build(module)


@dataclass
class Hybrid(Pair):
    """A pair whose runner is hybrid; closing it stops its threads."""

    placed: PassContext = field(default_factory=PassContext)

    @property
    def executor(self) -> GpuExecutor:
        found = self.runner.executor
        assert isinstance(found, GpuExecutor)
        return found


def bind(
    module: Module, options: CompileOptions, device: GpuDevice | None = None, **more: Any
) -> Runner:
    """A runner of a lowered hybrid module with random weights, by default on a simulated GPU."""
    device = device or SimulatedDevice()
    plan = Plan.build(module)
    shape = fit_cache(plan, options, 2)
    evaluator = WeightEvaluator(module, RandomSource(module), cache_nbytes=0)
    weights = load_weights(plan.loaded(), evaluator, 2, gpu=device.torch_device)
    places = {"cpu": torch.device("cpu"), plan.home: device.torch_device}
    weights = weights.with_views(plan.views)
    states = allocate_states(plan.states, plan.module.dims, shape, places, plan.home)
    return Runner(GpuExecutor(plan, device, weights, states, shape, 2, **more))


def make_hybrid(
    model: Module | str,
    experts: str,
    *,
    device: GpuDevice | None = None,
    capture: bool = True,
    pipeline: str = PIPELINE,
    **options: Any,
) -> Hybrid:
    """A small model on a GPU, by default simulated, beside the interpreter on the same module."""
    chosen = replace(OPTIONS, **options)
    module = lowered_models.MODELS[model]() if isinstance(model, str) else model
    source = RandomSource(module)
    placed = place(module, experts, pipeline, chosen)
    reference = InterpreterRunner(module, WeightEvaluator(module, source), chosen)
    runner = bind(module, chosen, device, capture=capture)
    return Hybrid(runner, reference, source, chosen, placed=placed)


def follow(pair: Hybrid, lengths: list[int], counts: list[int]) -> list[float]:
    """A ragged prefill, a decode step of each count of sequences, a chunk, and decode of all."""
    texts = prompts(*lengths)
    seqs = [pair.open() for _ in texts]
    errors = [pair.forward(list(zip(seqs, texts, strict=True)), "all")]
    for count in counts:
        tokens = prompts(*[1] * count, seed=count)
        errors.append(pair.forward(list(zip(seqs[-count:], tokens, strict=True))))
    chunk = prompts(7, 3, seed=9)
    errors.append(pair.forward(list(zip(seqs[:2], chunk, strict=True))))
    errors.append(pair.forward([(seq, [3]) for seq in seqs]))
    pair.executor.close()
    return errors


_COUNTS = (1, 3, 2, 4, 1, 1, 2)  # sequences of a step, again and again


def greedy(runner: Runner, steps: int = 60) -> list[int]:
    """Steps of batches that change; every token that was chosen, in order."""
    seqs = [runner.open() for _ in range(4)]
    rows = runner.forward(list(zip(seqs, prompts(5, 1, 7, 3), strict=True)))
    last = rows.argmax(-1).tolist()
    found = [*last]
    for step in range(steps):
        chosen = [(step + n) % 4 for n in range(_COUNTS[step % len(_COUNTS)])]
        rows = runner.forward([(seqs[n], [last[n]]) for n in chosen])
        for n, token in zip(chosen, rows.argmax(-1).tolist(), strict=True):
            last[n] = token
            found.append(token)
    return found


__all__ = [
    "DEFERRED",
    "EXPERTS",
    "HOT",
    "HOT_EXPERTS",
    "OPTIONS",
    "PIPELINE",
    "Hybrid",
    "bind",
    "follow",
    "gqa_layers",
    "greedy",
    "make_hybrid",
    "move_behind",
    "place",
    "plan_of",
    "two_groups",
]
