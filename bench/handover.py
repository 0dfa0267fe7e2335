"""What a hand-over from the GPU to the CPU and back takes inside a CUDA graph.

    python bench/handover.py [--threads N]     on a machine with a CUDA device

A graph of 100 hand-overs in a row: rows of the hidden size, ids and weights go to the CPU, whose
plan is one addition, and the sum comes back.  Time of the graph over 100, less the plan's own.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from ktgraph.cpu_kernels import load_native
from ktgraph.runtime.gpu.cuda import CudaDevice
from ktgraph.runtime.gpu.mailboxes import Mailboxes

COUNT, ROUNDS = 100, 30


def measure(tokens: int, hidden: int, top_k: int, threads: int) -> tuple[float, float]:
    """Seconds of one hand-over, and seconds of the CPU's plan in it."""
    native, device = load_native(), CudaDevice()
    engine = native.Engine(threads)
    sent = [
        torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16),
        torch.zeros(tokens, top_k, device="cuda", dtype=torch.int32),
        torch.rand(tokens, top_k, device="cuda"),
    ]
    there = [device.host(x.nbytes).view(x.dtype).view(x.shape) for x in sent]
    answer = device.host(sent[0].nbytes).view(torch.bfloat16).view(tokens, hidden)
    back = torch.full_like(sent[0], float("nan"))
    plan = native.Plan(engine, tokens, tokens)

    def tensor(x: torch.Tensor) -> object:
        return native.Tensor(x.data_ptr(), "bf16", [-1, hidden])

    plan.add("cpu.add", [tensor(there[0]), tensor(there[0]), tensor(answer)], {})
    boxes = Mailboxes(device, engine, 1)
    boxes.answer(0, plan)
    boxes.start()
    boxes.set_sizes(tokens, tokens)
    box = boxes.boxes[0]
    steps = [device.post(sent, there, box), device.receive([answer], [back], box)]
    device.run(steps)
    assert device.finish(boxes.check, 10.0)
    assert torch.equal(back, sent[0] + sent[0]), "the answer is wrong"
    graph = device.capture(steps * COUNT)
    times: list[float] = []
    before = boxes.busy_seconds
    for _ in range(ROUNDS):
        start = time.perf_counter()
        device.run([graph])
        assert device.finish(boxes.check, 10.0)
        times.append((time.perf_counter() - start) / COUNT)
    busy = (boxes.busy_seconds - before) / ROUNDS / COUNT
    boxes.close()
    return statistics.median(times), busy


def main() -> None:
    parser = argparse.ArgumentParser(description="A hand-over from the GPU to the CPU and back.")
    parser.add_argument("--threads", type=int, help="default: the CPUs that may be used less one")
    args = parser.parse_args()
    threads = args.threads or max(1, len(load_native().default_cpus()) - 1)
    print(f"{torch.cuda.get_device_name()}, {threads} threads")
    print("| tokens | hidden | µs | of it the CPU's plan | hand-over alone |")
    print("|---:|---:|---:|---:|---:|")
    for tokens, hidden in ((1, 2048), (1, 5120), (1, 7168), (16, 2048), (16, 7168)):
        total, busy = measure(tokens, hidden, 8, threads)
        print(
            f"| {tokens} | {hidden} | {total * 1e6:.1f} | {busy * 1e6:.1f} "
            f"| {(total - busy) * 1e6:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
