"""Launch configurations of kernels side by side: what the tables in the kernel files come from.

    python -m bench.gpu_kernels._sweep NAME [--only TEXT] [--warm N]     where a CUDA device is

Compiling is what takes long: `--warm N` lets N processes compile and run everything once, so that
the measuring that follows finds all of it in Triton's cache.  A kernel's benchmark file lists its
candidates in ``sweep()``; labels read "shape with configuration".  Wrong or failing ones are shown,
never ranked.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from contextlib import suppress
from importlib import import_module

import torch

from bench.gpu_kernels import Case
from bench.gpu_kernels.__main__ import seconds

_SHOWN = 5


def measured(case: Case) -> float | None:
    """Seconds of a call; None, after saying why, when it fails or is wrong."""
    try:
        error = case.error()
        if error <= case.bound:
            return seconds(case.run, case.sets)
        print(f"WRONG {case.label}: NMSE {error:.2g} > {case.bound:g}", flush=True)
    except Exception as failure:
        print(f"FAILED {case.label}: {failure!r}"[:300], flush=True)
    return None


def warm(name: str, only: str, count: int) -> None:
    """Compile every case, in `count` processes side by side."""
    command = [sys.executable, "-m", "bench.gpu_kernels._sweep", name, "--only", only, "--share"]
    running = [subprocess.Popen([*command, f"{i}/{count}"]) for i in range(count)]
    for process in running:
        process.wait()


def compile_share(cases: list[Case], share: str) -> None:
    """Run every n-th case once, whatever it gives."""
    number, _, count = share.partition("/")
    for case in cases[int(number) :: int(count)]:
        with suppress(Exception):
            case.run(0)
    torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_kernels._sweep", description=__doc__)
    parser.add_argument("name", help="a benchmark file that has sweep()")
    parser.add_argument("--only", default="", help="shapes whose label contains this")
    parser.add_argument("--warm", type=int, default=0, help="processes that compile beforehand")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA device: this benchmark needs one")
    module = import_module(f"bench.gpu_kernels.{options.name}")
    cases = [c for c in module.sweep() if options.only in c.label]
    if options.share:
        compile_share(cases, options.share)
        return 0
    if options.warm:
        warm(options.name, options.only, options.warm)
    results: dict[str, list[tuple[float, str, Case]]] = {}
    for case in cases:
        shape, _, config = case.label.partition(" with ")
        spent = measured(case)
        if spent is not None:
            results.setdefault(shape, []).append((spent, config or "the table's choice", case))
    for shape, found in results.items():
        print(shape)
        for spent, config, case in sorted(found, key=lambda f: f[0])[:_SHOWN]:
            print(
                f"  {spent * 1e6:8.1f} µs {case.nbytes / spent / 1e9:6.0f} GB/s "
                f"{case.flops / spent / 1e12:6.1f} TFLOP/s  {config}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
