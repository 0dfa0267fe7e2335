"""A quick look at this machine: ``python -m ktgraph.cpu_kernels.speed [threads]``.

One MoE layer (hidden 2048, expert width 1408, 64 experts, top 6), a few layers in rotation so that
weights come from memory.  GB/s counts the bytes of the experts in use.
"""

from __future__ import annotations

import sys
import time

import torch

from ktgraph.cpu_kernels import load_native

HIDDEN, WIDTH, EXPERTS, TOP_K, LAYERS = 2048, 1408, 64, 6, 3


def main(threads: int = 0) -> None:
    native = load_native()
    engine = native.Engine(threads)
    print(f"{engine.isa}, {engine.threads} threads; {native.isa_info()['why']}")
    for fmt, group in (("int4", 64), ("int8", 0), ("bf16", 0)):
        stacks = [
            (_stack(fmt, 2 * WIDTH, HIDDEN, group, True), _stack(fmt, HIDDEN, WIDTH, group, False))
            for _ in range(LAYERS)
        ]
        for tokens in (1, 4, 16, 64, 256):
            _measure(engine, fmt, stacks, tokens)


def _stack(fmt: str, rows: int, cols: int, group: int, gate_up: bool):
    """The same random matrix EXPERTS times: values do not matter here, bytes do."""
    native = load_native()
    nbytes = native.packed_nbytes(fmt, rows, cols, group, EXPERTS, gate_up)
    data = native.empty_packed(nbytes)
    source = torch.randn(rows, cols) * cols**-0.5
    native.pack_into(data.ctypes.data, 0, fmt, rows, cols, group, EXPERTS, gate_up, source)
    each = data.reshape(EXPERTS, -1)
    each[1:] = each[0]
    spec = (fmt, rows, cols, EXPERTS, group, gate_up, data.ctypes.data, nbytes)
    return native.Weight(*spec), data


def _measure(engine, fmt: str, stacks: list, tokens: int) -> None:
    native = load_native()
    view = lambda t, dtype: native.Tensor(t.data_ptr(), dtype, [-1, t.shape[1]])  # noqa: E731
    x, wts = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16), torch.rand(tokens, TOP_K)
    y, plan, keep, used = torch.empty_like(x), native.Plan(engine), [], 0
    for (w13, data13), (w2, data2) in stacks:
        ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(tokens)]).int()
        keep.append(ids)
        used += len(ids.unique()) * (data13.size + data2.size) // EXPERTS
        operands = [view(x, "bf16"), view(ids, "i32"), view(wts, "f32"), w13, w2, None, None]
        plan.add("cpu.grouped_mlp", [*operands, view(y, "bf16")], {"act": "silu"})
    times = []
    for _ in range(7):
        start = time.perf_counter()
        plan.run(tokens)
        times.append((time.perf_counter() - start) / LAYERS)
    best = min(times)
    flops = tokens * TOP_K * 6 * HIDDEN * WIDTH
    print(
        f"  {fmt:4} T={tokens:3}: {best * 1e3:8.2f} ms a layer, "
        f"{used / LAYERS / best / 1e9:6.1f} GB/s, {flops / best / 1e9:6.0f} GFLOP/s",
        flush=True,
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
