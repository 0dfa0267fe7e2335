"""Whole models on a GPU and the CPU together: decode and prefill beside the floor of the same run.

    python bench/hybrid.py prepare [CELL ...]     trace, lower, and predict; needs no GPU
    python bench/hybrid.py run [CELL ...]         measure; finished cells are kept and not run again
    python bench/hybrid.py table                  what was measured, one table

Weights are synthetic: one random matrix per shape and encoding, physically copied to every place
that wants one, so bytes lie in memory as in the real model and their values mean nothing.  Tokens
are random, and routers choose by what comes of them.  `decode` gives logits to the host, `generate`
chooses tokens on the GPU, one step ahead.  The floor of a decode step is, over layers,
attention and router at HBM bandwidth, the hand-over (10 µs), and the longer of what the
GPU computes beside the CPU (the shared expert, hot experts) and the CPU's chosen experts' bytes at
DRAM bandwidth; then the head.  Where experts are deferred, only those that are waited for count so,
and no step is shorter than all experts' bytes at DRAM bandwidth.  All bandwidths are measured in
the same run, DRAM's before and after each burst of steps, whose floor takes the better one.  Of hot
experts, the share of choices that they got in the run is told, and the floor counts by it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from synthetic_models import MODELS, CopiedWeights

from ktgraph.analysis import cost_analysis
from ktgraph.generate import Decoder, Endings, Limits
from ktgraph.ir.graph import Module
from ktgraph.ir.parser import parse_module
from ktgraph.measured import timeline_events
from ktgraph.pass_api import CompileOptions, PassContext
from ktgraph.runtime.cache import CacheShape
from ktgraph.runtime.gpu.executor import GpuExecutor
from ktgraph.runtime.operands import WeightUse
from ktgraph.runtime.packed import use_nbytes
from ktgraph.runtime.plan import Plan
from ktgraph.runtime.runner import Runner, gpu_device
from ktgraph.sampling import Sampling
from ktgraph.target import load_target
from ktgraph.timeline import lanes_html

PREPARED = Path("build/bench-hybrid")
RESULTS = Path("bench/results/hybrid.jsonl")
TARGET = "h200+xeon-amx"
WARM, STEPS = 8, 48  # of a text that is generated
BURSTS, SETTLE, BURST = 5, 2, 10  # decode steps between readings of DRAM; two of them to settle
DRAWN = {
    "drawn": Sampling(temperature=3.0, seed=1),
    "top-k, top-p": Sampling(temperature=3.0, top_k=50, top_p=0.95, seed=1),
}
HANDOVER = 10e-6  # seconds a layer: bench/handover.py reads 9 to 14

_ON_CPU = "- match: {class: moe.grouped_mlp}\n  replace: {device: cpu}\n"
_STREAMED = (
    "- match: {class: moe.grouped_mlp}\n  replace: {device: stream}\n  phase: prefill\n"
    "- match: {class: moe.grouped_mlp}\n  replace: {device: cpu}\n  phase: decode\n"
)
_HOT = (  # as many hot experts as the budget leaves room for
    "- match: {class: moe.grouped_mlp}\n  replace: {device: stream}\n  phase: prefill\n"
    "- match: {class: moe.grouped_mlp}\n  replace: {device: hot}\n  phase: decode\n"
)


@dataclass(frozen=True)
class Cell:
    """One measurement: a model's shape, how it is quantized, where its experts are."""

    name: str
    model: str
    quantize: str | None
    rules: str
    gpu_memory: str
    prompt: int
    context: int = 512  # rows in the cache when decode is timed
    layers: int | None = None
    defer: int = 0  # experts of a token that come one layer later in decode


_INT4 = "experts=int4p(group=64)"
_INT4_REST_INT8 = "experts=int4p(group=64),*=int8"
_ALL = (
    Cell("v2lite-cuda-bf16", "deepseek-v2-lite", None, "", "125GiB", 2048),
    Cell("qwen3-30b-cuda-bf16", "qwen3-30b-a3b", None, "", "125GiB", 2048),
    Cell("v2lite-hybrid", "deepseek-v2-lite", _INT4, _ON_CPU, "125GiB", 2048),
    Cell("v2lite-hybrid-deferred", "deepseek-v2-lite", _INT4, _ON_CPU, "125GiB", 2048, defer=3),
    Cell("v2lite-streamed", "deepseek-v2-lite", _INT4, _STREAMED, "125GiB", 2048),
    Cell("qwen3-30b-hybrid", "qwen3-30b-a3b", _INT4, _ON_CPU, "125GiB", 2048),
    Cell("qwen3-30b-streamed", "qwen3-30b-a3b", _INT4, _STREAMED, "125GiB", 2048),
    Cell("v2-236b-21g", "deepseek-v2", _INT4_REST_INT8, _STREAMED, "21GiB", 4096),
    Cell("v2-236b-21g-deferred", "deepseek-v2", _INT4_REST_INT8, _STREAMED, "21GiB", 4096, defer=2),
    Cell("v2-236b-130g", "deepseek-v2", _INT4_REST_INT8, "", "130GiB", 4096),
    Cell("v2-236b-48g-hot", "deepseek-v2", _INT4_REST_INT8, _HOT, "48GiB", 4096),
    Cell("qwen2-57b-12g", "qwen2-57b-a14b", _INT4_REST_INT8, _STREAMED, "12GiB", 4096),
    Cell("qwen2-57b-20g-hot", "qwen2-57b-a14b", _INT4_REST_INT8, _HOT, "20GiB", 4096),
)
CELLS = {c.name: c for c in _ALL}


def options_of(cell: Cell) -> CompileOptions:
    context = max(cell.prompt, cell.context) + WARM + BURSTS * (SETTLE + BURST) + 64
    return CompileOptions(
        dtype="bf16", quantize=cell.quantize, context=context, max_batch=1,
        max_tokens=cell.prompt, cache_rows=2 * context, defer=cell.defer,
    )  # fmt: skip


def prepare(cell: Cell) -> str:
    """Trace on meta tensors, run the passes for the described target, write the lowered IR.

    Returns what is predicted for it, in one line.
    """
    import transformers

    import ktgraph as kt
    from ktgraph.pass_manager import PassManager
    from ktgraph.target.description import parse_size

    with torch.device("meta"):
        config = MODELS[cell.model](cell.layers)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    traced = kt.trace(model, dtype="bf16")
    target = load_target(TARGET)
    gpu = target.device("cuda:0")
    target = target.with_device(replace(gpu, memory=parse_size(cell.gpu_memory)))
    options = options_of(cell)
    PREPARED.mkdir(parents=True, exist_ok=True)
    if cell.rules:
        rules = PREPARED / f"{cell.name}.yaml"
        rules.write_text(cell.rules, encoding="utf-8")
        options = replace(options, rules=str(rules))
    module = traced.ir.clone()
    PassManager().run(module, "default", PassContext(target, None, options), validate=0)
    path = PREPARED / f"{cell.name}.ktir"
    path.write_text(str(module), encoding="utf-8")
    cost = cost_analysis(module, load_target(TARGET))
    decode, prefill = cost.at(T=1, S=cell.context), cost.at(T=cell.prompt)
    return (
        f"{path}: predicted decode {1 / decode.seconds:.1f} tok/s ({decode.seconds * 1e3:.2f} ms), "
        f"prefill {cell.prompt / prefill.seconds:.0f} tok/s"
    )


# -- floors ---------------------------------------------------------------------------------------
@dataclass
class Bytes:
    """What a decode step reads: on the GPU beside experts, in shared experts, in chosen experts."""

    gpu: float = 0.0
    shared: float = 0.0
    gpu_experts: float = 0.0
    cpu_experts: float = 0.0


def bytes_of(plan: Plan) -> Bytes:
    """Weights that the decode phase reads in one step of one token."""
    found = Bytes()
    phase = plan.phase("decode")
    top_k = plan.module.dims.get("K", 1)
    seen: set[str] = set()
    for item, use in ((i, o) for i in phase.instructions for o in i.operands):
        if not isinstance(use, WeightUse) or use.key in seen:
            continue
        seen.add(use.key)
        size, shape = use_nbytes(use), [d.const() for d in use.type.dims]
        if "embed" in use.ref.name:
            continue
        if "expert" in use.ref.name and len(shape) == 3:
            share = phase.step(item).op.attrs.get("share", 1.0)  # of choices, with hot experts
            assert isinstance(share, float)
            chosen = size * top_k * share / shape[0]
            if use.device == "cpu":
                found.cpu_experts += chosen
            else:
                found.gpu_experts += chosen
        elif "shared" in use.ref.name:
            found.shared += size
        else:
            found.gpu += size
    return found


def with_share(read: Bytes, share: float) -> Bytes:
    """What is read when hot experts get this share of choices."""
    chosen = read.gpu_experts + read.cpu_experts
    return replace(read, gpu_experts=chosen * share, cpu_experts=chosen * (1 - share))


def decode_floor(read: Bytes, layers: int, dram: float, hbm: float, deferred: float = 0.0) -> float:
    """Seconds of a step that no schedule goes below; `deferred` is a share of the experts."""
    here = (read.shared + read.gpu_experts) / hbm
    beside = max(here, read.cpu_experts * (1 - deferred) / dram)
    return max(read.gpu / hbm + beside + layers * HANDOVER, read.cpu_experts / dram)


def hbm_bandwidth() -> float:
    """Bytes/s that a sum over 4 GB reads."""
    data = torch.ones(1 << 30, dtype=torch.float32, device="cuda")
    found: list[float] = []
    for _ in range(6):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        data.sum()
        end.record()
        torch.cuda.synchronize()
        found.append(data.nbytes / (start.elapsed_time(end) / 1e3))
    return max(found)


# -- measuring ------------------------------------------------------------------------------------
def run(cell: Cell, with_profile: bool = False, timelines: Path | None = None) -> dict[str, Any]:
    """Measure one cell; with a folder, draw a prefill and a decode step there, op by op."""
    from ktgraph.bench.limits import Reader
    from ktgraph.cpu_kernels import load_native

    module = parse_module((PREPARED / f"{cell.name}.ktir").read_text(encoding="utf-8"))
    plan = Plan.build(module)
    device = gpu_device(plan)
    assert device is not None
    hbm = hbm_bandwidth()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    threads = max(1, len(load_native().default_cpus()) - 1)
    begin = time.perf_counter()
    uses = plan.loaded()
    weights = CopiedWeights(module, device.torch_device).load(uses)
    torch.cuda.synchronize()
    made = time.perf_counter() - begin
    options = options_of(cell)
    size = options.page_size
    assert options.cache_rows is not None
    shape = CacheShape(size, -(-options.cache_rows // size), options.context)
    runner = Runner.bind(plan, weights, shape, threads, device)
    read = bytes_of(plan)
    handovers = sum(1 for i in plan.phase("decode").instructions if i.kernel == "cuda.await")
    layers = (handovers + 1) // 2 if cell.defer else handovers  # two a layer, but for the last
    deferred = cell.defer / plan.module.dims.get("K", 1)
    has_cpu = read.cpu_experts > 0
    reader = Reader(2 << 30) if has_cpu else None
    prefill = prefill_seconds(runner, cell.prompt)
    bursts = decode_bursts(runner, cell.context, lambda: reader.read(threads, 3) if reader else 0.0)
    generate = {name: generate_seconds(runner, cell.context, how) for name, how in DRAWN.items()}
    if with_profile:
        print(profile(runner, cell.context, cell.prompt), flush=True)
    if timelines:
        cost = cost_analysis(module, load_target(TARGET))
        events = timeline_events(runner, cost, cell.prompt)
        page = lanes_html(cell.name, events)
        (timelines / f"{cell.name}.html").write_text(page, encoding="utf-8")
    hot = hot_share(runner, cell.context)
    if hot is not None:
        read = with_share(read, hot["share"])
    readings = [bursts[0].dram[0], *(b.dram[1] for b in bursts)]
    expected = predicted(module, cell, threads, hbm, readings)
    floors = [decode_floor(read, layers, b.bandwidth, hbm, deferred) for b in bursts]
    decode = [seconds for b in bursts for seconds in b.steps]
    median = statistics.median(decode)
    of_floor = [f / statistics.median(b.steps) for f, b in zip(floors, bursts, strict=True)]
    return {
        "cell": cell.name,
        "date": str(date.today()),
        "gpu": torch.cuda.get_device_name(),
        "threads": threads,
        "decode_tok_s": 1 / median,
        "decode_ms": median * 1e3,
        "decode_best_ms": min(decode) * 1e3,
        "cpu_lane_ms": statistics.median(b.cpu for b in bursts) * 1e3,
        "predicted": expected,
        "floor_ms": statistics.median(floors) * 1e3,
        "of_floor": statistics.median(of_floor),
        "generate_ms": {name: seconds * 1e3 for name, seconds in generate.items()},
        "prefill_tokens": cell.prompt,
        "prefill_tok_s": cell.prompt / statistics.median(prefill),
        "prefill_s": prefill,
        "dram": readings,
        "hbm": hbm,
        "gpu_bytes": torch.cuda.max_memory_allocated(),
        "made_s": made,
        "bytes": asdict(read),
        "handovers": handovers,
        "hot": hot,
    }


def predicted(
    module: Module, cell: Cell, threads: int, hbm: float, dram: list[float]
) -> dict[str, Any]:
    """What the cost model says of the described machine with the bandwidths of this run."""
    described = load_target(TARGET)
    cpu = described.device("cpu")
    rate = statistics.median(dram) / cpu.bandwidth_at(threads) or 1.0
    curve = tuple((n, speed * rate) for n, speed in cpu.bandwidth)
    measured = {
        "cpu": replace(cpu, bandwidth=curve, threads=threads),
        "cuda:0": replace(described.device("cuda:0"), bandwidth=((1, hbm),)),
    }
    target = replace(described, devices=tuple(measured.values()))
    cost = cost_analysis(module, target)
    decode, prefill = cost.at(T=1, S=cell.context), cost.at(T=cell.prompt)
    lanes = {t.lane: t.seconds * 1e3 for t in decode.by_lane()}
    bound = decode.limits[0]
    return {
        "decode_ms": decode.seconds * 1e3,
        "cpu_lane_ms": lanes.get("cpu", 0.0),
        "bound": f"{bound} {bound.seconds / decode.seconds:.0%}",
        "prefill_tok_s": cell.prompt / prefill.seconds,
        "prefill_bound": f"{prefill.limits[0]} {prefill.limits[0].seconds / prefill.seconds:.0%}",
    }


def hot_share(runner: Runner, context: int) -> dict[str, float] | None:
    """Slots of a layer, and the share of a few decode steps' choices that they got."""
    slots = sum(len(experts) for experts in runner.residency.values())
    if not slots:
        return None
    with runner.counting_experts() as counts:
        seq = runner.open()
        runner.forward([(seq, _tokens(runner, context))])
        counts.clear()  # the prompt's
        for token in _tokens(runner, 16):
            runner.forward([(seq, [token])])
        runner.close(seq)
    found = counts.popularity("")
    layers = list(zip(found.counts, runner.residency.values(), strict=True))
    shares = [found.share(router, len(found.counts[router]), hot) for router, hot in layers]
    return {"slots": slots / len(layers), "share": sum(shares) / len(shares)}


def profile(runner: Runner, context: int, prompt: int) -> str:
    """Where the GPU's time goes, by kernel: four decode steps, then one prefill."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    def shown(title: str, call: Callable[[], object]) -> str:
        with record(activities=[ProfilerActivity.CUDA]) as found:
            begin = time.perf_counter()
            call()
            spent = time.perf_counter() - begin
        rows = sorted(found.key_averages(), key=lambda r: -r.device_time_total)[:22]
        lines = [f"{title}: {spent * 1e3:.2f} ms"]
        lines += [f"  {r.device_time_total / 1e3:9.3f} ms {r.count:6} {r.key[:90]}" for r in rows]
        return "\n".join(lines)

    seq = runner.open()
    runner.forward([(seq, _tokens(runner, context))])
    for _ in range(4):
        runner.forward([(seq, [1])])
    decode = shown("4 decode steps", lambda: [runner.forward([(seq, [2])]) for _ in range(4)])
    runner.close(seq)
    seq = runner.open()
    tokens = _tokens(runner, prompt)
    prefill = shown("prefill", lambda: runner.forward([(seq, tokens)]))
    runner.close(seq)
    return f"{decode}\n{prefill}"


def _tokens(runner: Runner, count: int) -> list[int]:
    return torch.randint(0, runner.vocabulary, (count,)).tolist()


def _checked(logits: torch.Tensor) -> None:
    """Refuses to time a model whose numbers broke: its routing would not be random.

    By numpy: torch would wake its OpenMP threads, which then spin on the engine's cores for a
    while; steps with experts on the CPU took twice their time.
    """
    values = logits.numpy()
    if not np.isfinite(values).all() or float(values.std()) == 0.0:
        raise SystemExit("refused: the logits are not finite, or all equal")


def prefill_seconds(runner: Runner, tokens: int, repeats: int = 4) -> list[float]:
    found: list[float] = []
    for _ in range(repeats):
        seq = runner.open()
        start = time.perf_counter()
        logits = runner.forward([(seq, _tokens(runner, tokens))])
        found.append(time.perf_counter() - start)
        _checked(logits)
        runner.close(seq)
    return found[1:]


@dataclass(frozen=True)
class Burst:
    """Decode steps in a row, in seconds.

    cpu: what the CPU's experts took of a step.  dram: readings before and after, bytes/s.
    """

    steps: list[float]
    cpu: float
    dram: tuple[float, float]

    @property
    def bandwidth(self) -> float:
        """The better reading: steps have gone below a floor by the mean of both."""
        return max(*self.dram, 1.0)


def cpu_seconds(runner: Runner) -> float:
    """Time that the CPU has spent on the GPU's requests so far."""
    executor = runner.executor
    return executor.mailboxes.busy_seconds if isinstance(executor, GpuExecutor) else 0.0


def decode_bursts(runner: Runner, context: int, dram: Callable[[], float]) -> list[Burst]:
    """The bandwidth of a virtual machine changes within seconds: it is read between bursts."""
    seq = runner.open()
    runner.forward([(seq, _tokens(runner, context))])
    for token in _tokens(runner, WARM):
        runner.forward([(seq, [token])])
    found: list[Burst] = []
    before = dram()
    for _ in range(BURSTS):
        steps: list[float] = []
        busy = cpu_seconds(runner)
        for token in _tokens(runner, SETTLE + BURST):
            start = time.perf_counter()
            logits = runner.forward([(seq, [token])])
            steps.append(time.perf_counter() - start)
            _checked(logits)
        busy = (cpu_seconds(runner) - busy) / len(steps)
        after = dram()
        found.append(Burst(steps[SETTLE:], busy, (before, after)))
        before = after
    runner.close(seq)
    return found


def generate_seconds(runner: Runner, context: int, how: Sampling) -> float:
    """Median seconds between two tokens of a text, which the GPU chooses one step ahead.

    Drawn hot, so that tokens and thus experts are as different as those of `decode_bursts`.
    """
    limits = Limits(
        runner.max_tokens, runner.max_batch, runner.context, runner.cache_rows, runner.page_size,
        runner.vocabulary,
    )  # fmt: skip
    prompt, endings = _tokens(runner, context), Endings(WARM + STEPS)
    _, events = Decoder(runner, limits, None).start([prompt], [how], endings)
    times = [time.perf_counter() for _ in events]
    return statistics.median(b - a for a, b in pairwise(times[WARM:]))


# -- results --------------------------------------------------------------------------------------
def finished() -> dict[str, dict[str, Any]]:
    if not RESULTS.is_file():
        return {}
    rows = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    return {r["cell"]: r for r in rows}


def table() -> str:
    """In brackets: what the cost model says of the machine at the bandwidths of the run."""
    heads = (
        "cell", "decode tok/s", "ms", "CPU's experts ms", "bound", "generated ms", "floor ms",
        "of floor", "prefill tok/s", "bound", "GPU GiB", "DRAM GB/s", "HBM TB/s", "hot",
    )  # fmt: skip
    rows = [heads, ["---" if n in (0, 4, 5, 9) else "---:" for n in range(len(heads))]]
    rows += [_cells(r) for r in finished().values()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cells(r: dict[str, Any]) -> list[str]:
    hot, expected = r.get("hot"), r.get("predicted", {})

    def beside(value: str, key: str, form: str) -> str:
        return f"{value} ({expected[key]:{form}})" if key in expected else value

    return [
        r["cell"],
        f"{r['decode_tok_s']:.1f}",
        beside(f"{r['decode_ms']:.2f}", "decode_ms", ".2f"),
        beside(f"{r.get('cpu_lane_ms', 0.0):.2f}", "cpu_lane_ms", ".2f"),
        expected.get("bound", "-"),
        ", ".join(f"{k} {v:.2f}" for k, v in r.get("generate_ms", {}).items()),
        f"{r['floor_ms']:.2f}",
        f"{r['of_floor']:.0%}",
        beside(f"{r['prefill_tok_s']:.0f}", "prefill_tok_s", ".0f") + f" of {r['prefill_tokens']}",
        expected.get("prefill_bound", "-"),
        f"{r['gpu_bytes'] / 2**30:.1f}",
        f"{min(r['dram']) / 1e9:.0f} to {max(r['dram']) / 1e9:.0f}",
        f"{r['hbm'] / 1e12:.2f}",
        f"{hot['slots']:.0f}: {hot['share']:.0%}" if hot else "-",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Whole models on a GPU and the CPU together.")
    parser.add_argument("what", choices=("prepare", "run", "table"))
    parser.add_argument("cells", nargs="*", help="default: all")
    parser.add_argument("--profile", action="store_true", help="also print where time goes")
    parser.add_argument("--timelines", type=Path, help="a folder for measured timelines")
    args = parser.parse_args()
    unknown = sorted(set(args.cells) - CELLS.keys())
    if unknown:
        parser.error(f"no cell {', '.join(unknown)}; known: {', '.join(CELLS)}")
    chosen = [CELLS[n] for n in args.cells or CELLS]
    if args.what == "prepare":
        for cell in chosen:
            print(prepare(cell), flush=True)
    if args.what == "run":
        done = finished()
        for cell in chosen:
            if cell.name in done and not args.cells:
                continue
            found = run(cell, args.profile, args.timelines)
            RESULTS.parent.mkdir(parents=True, exist_ok=True)
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
            print(json.dumps(found), flush=True)
    print(table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
