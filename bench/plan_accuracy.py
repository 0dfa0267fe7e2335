"""Decode as `kt.plan` predicts it beside decode as it is measured, on this machine's CPU.

    python bench/plan_accuracy.py deepseek-v2-lite --layers 8 --threads 2 --rounds 3

Each round measures the machine afresh (what `ktgraph doctor --remeasure` does), plans with those
figures, and runs the very module that was priced, with random weights of the model's shapes.
--realtime takes the CPUs for the seconds that something is measured (needs root): on a machine that
others use, figures and steps mean nothing without it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from decode import processor
from synthetic_models import MODELS, CopiedWeights

import ktgraph as kt
from ktgraph.cost import Call
from ktgraph.placement.lanes import OpTimes
from ktgraph.planner.forecast import Forecast
from ktgraph.runtime.cache import CacheShape
from ktgraph.runtime.packed import LoadedWeights
from ktgraph.runtime.plan import Plan
from ktgraph.runtime.runner import Runner
from ktgraph.target import Target
from ktgraph.target.host import host_target

WARM, STEPS = 4, 48


@contextmanager
def at_priority(realtime: bool) -> Iterator[None]:
    """Every thread of this process before all others of the machine, if wished."""
    if realtime:
        _schedule(os.SCHED_FIFO, 1)
    try:
        yield
    finally:
        if realtime:
            _schedule(os.SCHED_OTHER, 0)


def _schedule(policy: int, priority: int) -> None:
    for thread in os.listdir("/proc/self/task"):
        os.sched_setscheduler(int(thread), policy, os.sched_param(priority))


@dataclass(frozen=True)
class Round:
    """One measuring of the machine, one plan, one run."""

    target: Target
    predicted: float  # seconds of a decode step
    median: float
    best: float
    prefill: tuple[float, float]  # of one call: predicted, best measured
    kernels: tuple[tuple[str, float, float], ...]  # op, predicted and measured seconds a step

    @property
    def error(self) -> float:
        return self.predicted / self.median - 1

    @property
    def unrest(self) -> float:
        return self.median / self.best - 1


def run_round(found: Forecast, weights: LoadedWeights, plan: Plan, vocabulary: int) -> Round:
    """Decode the planned module at the end of the planned context."""
    assert found.decode is not None
    assert found.module is not None
    options, threads = found.options, found.target.cpu_threads
    pages = -(-options.context // 32) + 1
    runner = Runner.bind(plan, weights, CacheShape(32, pages, pages * 32), threads)
    prefill = _prefill(found, runner, vocabulary)
    seq = runner.open()
    rows = options.context - WARM - STEPS - 1
    for start in range(0, rows, options.max_tokens):
        size = min(options.max_tokens, rows - start)
        runner.forward([(seq, torch.randint(0, vocabulary, (size,)).tolist())])
    seconds: list[float] = []
    for _ in range(WARM + STEPS):
        token = int(torch.randint(0, vocabulary, ()))
        start = time.perf_counter()
        runner.forward([(seq, [token])])
        seconds.append(time.perf_counter() - start)
    kept = seconds[WARM:]
    return Round(
        found.target, found.decode.seconds, statistics.median(kept), min(kept), prefill,
        tuple(_by_op(found, runner, seq, vocabulary)),
    )  # fmt: skip


def _prefill(found: Forecast, runner: Runner, vocabulary: int) -> tuple[float, float]:
    """Seconds of one full call: predicted, and the shortest of three."""
    assert found.prefill is not None
    tokens = torch.randint(0, vocabulary, (found.prefill.tokens,)).tolist()
    least = float("inf")
    for _ in range(3):
        seq = runner.open()
        start = time.perf_counter()
        runner.forward([(seq, tokens)])
        least = min(least, time.perf_counter() - start)
        runner.close(seq)
    return found.prefill.seconds, least


def _by_op(
    found: Forecast, runner: Runner, seq: Any, vocabulary: int
) -> list[tuple[str, float, float]]:
    """Predicted and measured seconds of a step by op; of several measured steps the shortest."""
    assert found.module is not None
    times = OpTimes(found.module, found.target, Call.decode(found.options.context - 1))
    decode = found.module.functions["decode"]
    kernels = {op.via or "": op.name for op in decode.walk()}
    predicted: dict[str, float] = {}
    for op in decode.walk():
        if op.body is None:
            count = _runs(op)
            predicted[op.name] = predicted.get(op.name, 0.0) + times.seconds(op) * count
    least: dict[str, float] = {}
    for _ in range(8):
        step = dict[str, float]()
        for event in cast("Any", runner).measure([(seq, [int(torch.randint(0, vocabulary, ()))])]):
            name = kernels.get(event.kernel) or event.kernel
            step[name] = step.get(name, 0.0) + event.seconds
        least = {n: min(s, least.get(n, s)) for n, s in step.items()}
    rows = [(n, predicted.get(n, 0.0), s) for n, s in least.items()]
    return sorted(rows, key=lambda r: -r[2])


def _runs(op: Any) -> int:
    """How often an op of a function runs in one call."""
    block = op.block
    repeat = getattr(block, "parent", None)
    return 1 if repeat is None else repeat.int_attr("hi") - repeat.int_attr("lo") + 1


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicted decode beside measured decode.")
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--layers", type=int, help="default: the model's own")
    parser.add_argument("--quantize", default="int4p(group=64)", help="default: %(default)s")
    parser.add_argument("--context", type=int, default=512, help="default: %(default)s")
    parser.add_argument("--threads", type=int, help="default: as measured")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--realtime", action="store_true", help="see above")
    args = parser.parse_args()
    config = MODELS[args.model](args.layers)
    config.dtype = torch.bfloat16
    rounds: list[Round] = []
    weights, plan = None, None
    for _ in range(args.rounds):
        with at_priority(args.realtime):
            host_target(remeasure=True)
        target = kt.cpu(args.threads)
        found = kt.plan(
            config, target, quantize=args.quantize, context=args.context, dtype=args.dtype
        ).base
        if weights is None or plan is None:
            assert found.module is not None
            plan = Plan.build(found.module)
            weights = CopiedWeights().load(plan.uses())
        with at_priority(args.realtime):
            rounds.append(run_round(found, weights, plan, config.vocab_size))
        shown = rounds[-1]
        print(f"predicted {shown.predicted * 1e3:.2f} ms, measured {shown.median * 1e3:.2f} "
              f"(best {shown.best * 1e3:.2f}): {shown.error:+.0%}")  # fmt: skip
    report(rounds, args, config)


def report(rounds: list[Round], args: argparse.Namespace, config: Any) -> None:
    """The table of rounds, and the steadiest round by op."""
    threads = rounds[0].target.cpu_threads
    print(f"\n{processor()}, {threads} threads; {args.model}, {config.num_hidden_layers} layers, "
          f"{args.quantize}, {args.context} rows in the cache\n")  # fmt: skip
    print("| DRAM; int8, int4p GB/s | f32, int8 TFLOP/s | decode: predicted ms "
          "| measured ms: median, best | predicted tok/s | measured tok/s | error "
          "| prefill tok/s: predicted, measured |")  # fmt: skip
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for row in rounds:
        cpu = row.target.cpu
        peaks = ", ".join(f"{cpu.peak[d] / 1e12:.3g}" for d in ("f32", "int8"))
        reads = ", ".join(f"{cpu.reads[f] / 1e9:.1f}" for f in ("int8", "int4p"))
        tokens = min(512, args.context)
        prefill = ", ".join(f"{tokens / s:.0f}" for s in row.prefill)
        print(
            f"| {cpu.bandwidth_at() / 1e9:.1f}; {reads} | {peaks} | {row.predicted * 1e3:.2f} "
            f"| {row.median * 1e3:.2f}, {row.best * 1e3:.2f} | {1 / row.predicted:.1f} "
            f"| {1 / row.median:.1f} | {row.error:+.0%} | {prefill} |"
        )
    steady = min(rounds, key=lambda r: r.unrest)
    print("\n| op | predicted ms | measured ms |\n| --- | ---: | ---: |")
    for name, predicted, measured in steady.kernels[:10]:
        print(f"| {name} | {predicted * 1e3:.3f} | {measured * 1e3:.3f} |")


if __name__ == "__main__":
    main()
