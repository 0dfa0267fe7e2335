"""Perplexity of a text: windows behind a begin token, every token scored once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ktgraph.errors import UnsupportedInputError
from ktgraph.generate import Limits, Runner, prompt_logits


@dataclass(frozen=True)
class Perplexity:
    """`window_nll` is each window's mean negative log likelihood, in nats a token."""

    tokens: int
    mean_nll: float
    window_nll: tuple[float, ...]

    @property
    def value(self) -> float:
        return math.exp(self.mean_nll)

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        return f"{self.value:.4f} over {self.tokens} tokens in {len(self.window_nll)} windows"


def perplexity(
    runner: Runner, limits: Limits, tokens: Sequence[int], *, window: int, bos: int | None
) -> Perplexity:
    """Score `tokens` in windows of `window`, each behind `bos`.

    With no begin token a window's first token only serves as context and is not scored.
    """
    _check(limits, tokens, window, bos)
    first = [] if bos is None else [bos]
    means: list[float] = []
    counts: list[int] = []
    for at in range(0, len(tokens), window):
        ids = [*first, *tokens[at : at + window]]
        if len(ids) < 2:
            continue
        losses = token_losses(prompt_logits(runner, limits, [ids])[0], ids)
        means.append(float(losses.mean()))
        counts.append(losses.numel())
    total = sum(counts)
    mean = sum(m * n for m, n in zip(means, counts, strict=True)) / total
    return Perplexity(total, mean, tuple(means))


def token_losses(logits: Tensor, ids: Sequence[int]) -> Tensor:
    """-log p of each token but the first, f64[len(ids) - 1], from f32[len(ids), VOC]."""
    target = torch.tensor(ids[1:])
    return torch.nn.functional.cross_entropy(logits[:-1].double(), target, reduction="none")


def _check(limits: Limits, tokens: Sequence[int], window: int, bos: int | None) -> None:
    longest = limits.rows - (bos is not None)
    if not 1 <= window <= longest:
        raise UnsupportedInputError(
            f"window={window}: expected 1 to {longest}, what the compiled cache of {limits.rows} "
            "rows a sequence holds; compile with a larger context"
        )
    if len(tokens) + (bos is not None) < 2:
        raise UnsupportedInputError("perplexity needs two tokens or more, the begin token included")
