"""What the attention benchmarks share: paged caches, an f64 reference, sweeps."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.gpu_kernels import Case
from ktgraph.runtime.batch import Batch
from ktgraph.runtime.state import State
from ktgraph.triton_kernels.batch import DeviceBatch

PAGE = 32
L2_BYTES = 60e6
DEVICE, DTYPE = "cuda", torch.bfloat16


@dataclass(frozen=True)
class Paged:
    """Sequences of `context` rows whose last `new` are new, pages shuffled; layers are the sets."""

    batch: DeviceBatch
    state: State
    slots: torch.Tensor  # [sequences, context] cache rows

    @property
    def layers(self) -> int:
        return self.state.parts[0].shape[0]

    @staticmethod
    def make(sequences: int, context: int, new: int, *rows: Sequence[int]) -> Paged:
        """One part per row shape, random, with as many layers as make reads miss the L2 cache."""
        pages = -(-context // PAGE)
        order = torch.randperm(sequences * pages).reshape(sequences, pages)
        batch = Batch.build([context - new] * sequences, [new] * sequences, order.tolist(), PAGE)
        elements = sum(torch.Size(r).numel() for r in rows) * sequences * pages * PAGE
        layers = max(2, min(128, int(2 * L2_BYTES / (2 * elements)) + 1))
        parts = tuple(
            torch.randn(layers, sequences * pages * PAGE, *r, device=DEVICE, dtype=DTYPE)
            for r in rows
        )
        rows_of = torch.stack([batch.rows(s) for s in range(sequences)]).to(DEVICE)
        return Paged(DeviceBatch.of(batch, DEVICE), State(parts), rows_of)

    def rows(self, part: int, layer: int, sequence: int) -> torch.Tensor:
        return self.state.parts[part][layer, self.slots[sequence]]


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE)


def poisoned(*shape: int) -> torch.Tensor:
    return torch.full(shape, float("nan"), device=DEVICE, dtype=DTYPE)


def some_tokens(new: int) -> torch.Tensor:
    """Up to 48 tokens of a sequence, the first and the last among them."""
    if new <= 48:
        return torch.arange(new, device=DEVICE)
    middle = torch.randperm(new - 2, device=DEVICE)[:46] + 1
    return torch.cat([torch.tensor([0, new - 1], device=DEVICE), middle])


def exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, scale: float
) -> torch.Tensor:
    """f64 attention of q [t, H, A] over k [s, G, A], v [s, G, V], a head at a time."""
    heads, groups = q.shape[1], k.shape[1]
    seen = torch.arange(k.shape[0], device=k.device)[None] <= positions[:, None]
    out: list[torch.Tensor] = []
    for head in range(heads):
        group = head * groups // heads
        scores = q[:, head].double() @ k[:, group].double().T * scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out.append(weights @ v[:, group].double())
    return torch.stack(out, 1)


class Error:
    """NMSE gathered over pieces."""

    def __init__(self) -> None:
        self.off = self.size = 0.0

    def add(self, got: torch.Tensor, want: torch.Tensor) -> None:
        self.off += float((got.double() - want).square().sum())
        self.size += float(want.square().sum())

    @property
    def nmse(self) -> float:
        return self.off / self.size


def causal_pairs(context: int, new: int) -> int:
    """(token, row) pairs that a sequence's new tokens see."""
    return new * (context - new) + new * (new + 1) // 2


def sweep(label: str, configs: Sequence[Any], case: Callable[[Any], Case]) -> None:
    """Time of every configuration on one shape, fastest first; a wrong one is told, not timed."""
    from bench.gpu_kernels.__main__ import seconds

    print(f"## {label}", flush=True)
    found: list[tuple[float, str]] = []
    for config in configs:
        try:
            made = case(config)
            error = made.error()
            spent = seconds(made.run, made.sets) if error <= made.bound else float("nan")
        except Exception as failure:  # a tile too large for this GPU must not end the sweep
            print(f"{config}: {type(failure).__name__} {str(failure)[:80]}", file=sys.stderr)
            torch.cuda.synchronize()
            continue
        if spent != spent:
            print(f"{config}: WRONG, NMSE {error:.2g}", flush=True)
            continue
        rates = f"{made.nbytes / spent / 1e9:.0f} GB/s {made.flops / spent / 1e12:.0f} TFLOP/s"
        found.append((spent, f"{spent * 1e6:9.1f} µs  {rates}  {config}"))
    for _, line in sorted(found):
        print(line, flush=True)
