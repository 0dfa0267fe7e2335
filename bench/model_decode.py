"""Decode of a whole model's shape on the CPU beside the bytes that a step must read.

    python bench/model_decode.py deepseek-v2-lite --quantize "int4p(group=64)" --threads 16
    python bench/model_decode.py qwen3-30b-a3b --layers 24

The model is traced from its configuration without weights, and one random matrix per shape is
packed and copied: bytes lie in memory as in the real model, their values mean nothing.  The floor
of a step is every byte of weights that it reads (of the experts the k chosen ones) over the DRAM
bandwidth read before and after, on the same threads.  Routing is random: see `ROUTER`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import transformers
from decode import processor
from synthetic_models import MODELS, CopiedWeights

import ktgraph as kt
from ktgraph.bench.limits import Reader
from ktgraph.cpu_kernels import load_native
from ktgraph.pass_api import CompileOptions, PassContext
from ktgraph.pass_manager import PassManager
from ktgraph.runtime.cache import CacheShape
from ktgraph.runtime.native import packed_nbytes
from ktgraph.runtime.operands import WeightUse
from ktgraph.runtime.packed import use_nbytes
from ktgraph.runtime.plan import Plan
from ktgraph.runtime.runner import Runner
from ktgraph.target import resolve_target

PROMPT, WARM, STEPS = 32, 8, 64


@dataclass(frozen=True)
class Step:
    """What one decode step reads."""

    weights: int  # bytes of weights, the chosen experts only
    total: int  # bytes of all weights


def bytes_of_step(uses: Sequence[WeightUse], top_k: int) -> Step:
    read = total = 0
    for use in uses:
        shape = [d.const() for d in use.type.dims]
        size = packed_nbytes(use) if use.form == "tile" else use_nbytes(use)
        total += size
        if "embed" in use.key and use.form != "tile":
            size = size // shape[0]  # one row
        is_stack = len(shape) == 3 and use.form == "tile"
        read += size * top_k // shape[0] if is_stack and "expert" in use.key else size
    return Step(read, total)


def decode_seconds(runner: Runner, vocabulary: int) -> list[float]:
    """Seconds of every timed step; the tokens are random."""
    tokens = torch.randint(0, vocabulary, (PROMPT + WARM + STEPS,)).tolist()
    seq = runner.open()
    runner.forward([(seq, tokens[:PROMPT])])
    found: list[float] = []
    for token in tokens[PROMPT:]:
        start = time.perf_counter()
        runner.forward([(seq, [token])])
        found.append(time.perf_counter() - start)
    return found[WARM:]


def main() -> None:
    parser = argparse.ArgumentParser(description="Decode of a model's shape beside its roofline.")
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--layers", type=int, help="default: the model's own")
    parser.add_argument("--quantize", default="int4p(group=64)", help="default: %(default)s")
    parser.add_argument("--threads", type=int, help="default: one for each CPU that may be used")
    args = parser.parse_args()
    config = MODELS[args.model](args.layers)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    # no weights: what `kt.Traced.lower` does, without a source to measure errors on
    traced = kt.trace(model)
    options = CompileOptions(
        dtype="bf16", quantize=args.quantize, context=512, max_batch=1, max_tokens=64,
        threads=args.threads,
    )  # fmt: skip
    module = traced.ir.clone()
    PassManager().run(module, "default", PassContext(resolve_target("cpu"), None, options))
    plan = Plan.build(module)
    uses = plan.uses()
    step = bytes_of_step(uses, config.num_experts_per_tok)
    print(
        f"{len(uses)} weights, {step.total / 1e9:.2f} GB; a step reads {step.weights / 1e9:.3f} GB"
    )
    begin = time.perf_counter()
    weights = CopiedWeights(plan.module).load(uses)
    print(f"made in {time.perf_counter() - begin:.1f} s")
    threads = args.threads or len(load_native().default_cpus())
    runner = Runner.bind(plan, weights, CacheShape(32, 32, 512), threads)
    reader = Reader(2 << 30)
    before = reader.read(threads)
    seconds = decode_seconds(runner, config.vocab_size)
    after = reader.read(threads)
    median, best = statistics.median(seconds), min(seconds)
    floor = step.weights / max(before, after)
    print(f"{processor()}, {threads} threads; {args.model}, {config.num_hidden_layers} layers, "
          f"{args.quantize}")  # fmt: skip
    print(
        "| tok/s | ms/token | best ms | GB read | GB/s | DRAM GB/s before, after | of the floor |"
    )
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    print(
        f"| {1 / median:.1f} | {median * 1e3:.2f} | {best * 1e3:.2f} | {step.weights / 1e9:.3f} "
        f"| {step.weights / median / 1e9:.1f} | {before / 1e9:.1f}, {after / 1e9:.1f} "
        f"| {floor / median:.0%} |"
    )
    slowest(runner, config.vocab_size)


def slowest(runner: Runner, vocabulary: int) -> None:
    """Where the time of a step goes, by kernel."""
    seq = runner.open()
    runner.forward([(seq, [1] * PROMPT)])
    spent: dict[str, float] = {}
    for _ in range(4):
        for event in cast("Any", runner).measure([(seq, [int(torch.randint(0, vocabulary, ()))])]):
            spent[event.kernel] = spent.get(event.kernel, 0.0) + event.seconds / 4
    for kernel, seconds in sorted(spent.items(), key=lambda kv: -kv[1])[:8]:
        print(f"  {kernel:28} {seconds * 1e3:8.3f} ms")


if __name__ == "__main__":
    main()
