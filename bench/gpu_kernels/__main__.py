"""Run the cases of kernel files: parity first, then time against the floor and against torch."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from datetime import date
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import torch

from bench.gpu_kernels import Case

_REPEATS, _ROUNDS = 20, 5


def seconds(run: Callable[[int], object], sets: int) -> float:
    """Median seconds of a call, replayed from a CUDA graph over all input sets in turn."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(max(2, sets)):
            run(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    count = max(_REPEATS, sets)
    with torch.cuda.graph(graph, stream=stream):
        for i in range(count):
            run(i)
    graph.replay()
    times: list[float] = []
    for _ in range(_ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / count)
    return statistics.median(times)


def hbm_bandwidth() -> float:
    """Bytes per second that a sum over 4 GB reads."""
    data = torch.ones(1 << 30, dtype=torch.float32, device="cuda")
    return data.nbytes / seconds(lambda i: data.sum(), 1)


def bf16_rate() -> float:
    """FLOP/s of an 8192^3 product on random data."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * 8192**3 / seconds(lambda i: torch.mm(a, b, out=out), 1)


def line(case: Case, bandwidth: float, rate: float) -> tuple[str, bool]:
    """A row of the table, and whether the case is right."""
    error = case.error()
    if not error <= case.bound:
        return f"| {case.kernel} | {case.label} | WRONG: NMSE {error:.2g} > {case.bound:g} |", False
    spent = seconds(case.run, case.sets)
    floor = max(case.nbytes / bandwidth, case.flops / rate)
    peers = []
    for name, peer in case.peers.items():
        try:
            peers.append(f"{name} {seconds(peer, case.sets) / spent:.2f}x")
        except Exception as failure:
            peers.append(f"{name}: {type(failure).__name__}")
    bound = "memory" if case.nbytes / bandwidth >= case.flops / rate else "compute"
    wanted = f"{case.wanted:.0%}" if case.wanted else ""
    return (
        f"| {case.kernel} | {case.label} | {spent * 1e6:.1f} | {case.nbytes / spent / 1e9:.0f} | "
        f"{case.flops / spent / 1e12:.1f} | {floor / spent:.0%} of {bound} | {wanted} | "
        f"{', '.join(peers)} | {error:.1g} |"
    ), True


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_kernels", description=__doc__)
    parser.add_argument("names", nargs="*", help="kernel files; default: all")
    parser.add_argument("--out", type=Path, help="also write the table there")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA device: this benchmark needs one")
    package = import_module("bench.gpu_kernels")
    known = [m.name for m in iter_modules(package.__path__) if not m.name.startswith("_")]
    unknown = sorted(set(options.names) - set(known))
    if unknown:
        parser.error(f"no {', '.join(unknown)}; known: {', '.join(known)}")
    bandwidth, rate = hbm_bandwidth(), bf16_rate()
    lines = [
        f"{torch.cuda.get_device_name()}, {date.today()}: HBM read {bandwidth / 1e12:.2f} TB/s, "
        f"bf16 {rate / 1e12:.0f} TFLOP/s (both measured in this run); "
        f"command: python -m bench.gpu_kernels {' '.join(options.names)}".rstrip(),
        "",
        "| kernel | shape | µs | GB/s | TFLOP/s | of the limit | wanted | torch / ours | NMSE |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    right = True
    for name in options.names or known:
        for case in import_module(f"bench.gpu_kernels.{name}").cases():
            shown, is_right = line(case, bandwidth, rate)
            right &= is_right
            lines.append(shown)
            print(shown, flush=True)
        torch.cuda.empty_cache()
    if options.out:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
