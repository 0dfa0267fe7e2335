"""From a row of logits to the next token, in transformers' order of steps.

repetition penalty -> temperature -> top-k -> top-p -> min-p -> draw.  Temperature 0 is greedy: the
penalty still applies, the filters cannot change the largest logit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ktgraph.errors import UnsupportedInputError, is_whole

_NEVER = -math.inf


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    temperature: 0 is greedy.  top_k: 0 keeps all.  top_p: 1 keeps all, as does min_p = 0.
    repetition_penalty: above 1 makes tokens of the prompt and of the text so far less likely.
    seed: None draws a fresh one.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            _require(_is_number(getattr(self, name)), name, getattr(self, name), "a number")
        _require(is_whole(self.top_k), "top_k", self.top_k, "a whole number")
        seeded = self.seed is None or (is_whole(self.seed) and abs(self.seed) < 1 << 63)
        _require(seeded, "seed", self.seed, "a whole number of 64 bits or None")
        _require(self.temperature >= 0, "temperature", self.temperature, "0 (greedy) or more")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (keep all) or more")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1 (keep all)")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "from 0 (keep all) to 1")
        _require(self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "> 0")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


class Sampler:
    """Chooses the tokens of one sequence.

    It has a generator of its own, so what is drawn does not depend on the rest of the batch.
    """

    def __init__(self, sampling: Sampling, vocabulary: int, prompt: Sequence[int]) -> None:
        self.sampling = sampling
        self._seen = torch.zeros(vocabulary, dtype=torch.bool)
        self._seen[torch.tensor(list(prompt), dtype=torch.long)] = True
        self._rng = torch.Generator()
        if sampling.seed is None:
            self._rng.seed()
        else:
            self._rng.manual_seed(sampling.seed)

    def choose(self, logits: Tensor) -> int:
        """The next token, given f32[VOC]; it counts as seen from then on."""
        scores = penalize(logits, self._seen, self.sampling.repetition_penalty)
        # numpy: torch's argmax of a large vocabulary wakes OpenMP threads that spin for a while
        token = int(scores.numpy().argmax()) if self.sampling.is_greedy else self._draw(scores)
        self._seen[token] = True
        return token

    def _draw(self, scores: Tensor) -> int:
        """Inverts the cumulative distribution at one uniform draw."""
        steps = filtered(scores, self.sampling).double().softmax(-1).cumsum(-1)
        point = torch.rand(1, generator=self._rng, dtype=torch.float64) * steps[-1]
        return min(int(torch.searchsorted(steps, point, right=True)), steps.numel() - 1)


def penalize(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Logits[VOC], those of `seen` tokens (bool[VOC]) moved down (arXiv 1909.05858, sec. 4.1)."""
    if penalty == 1.0:
        return logits
    moved = torch.where(logits < 0, logits * penalty, logits / penalty)
    return torch.where(seen, moved, logits)


def filtered(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits[VOC] scaled by the temperature, with the tokens that are never drawn at -inf."""
    scores = logits / sampling.temperature
    scores = keep_top_k(scores, sampling.top_k)
    scores = keep_top_p(scores, sampling.top_p)
    return keep_min_p(scores, sampling.min_p)


def keep_top_k(scores: Tensor, k: int) -> Tensor:
    """The k largest, and what ties with the last of them."""
    if k == 0 or k >= scores.numel():
        return scores
    return scores.masked_fill(scores < scores.topk(k).values[-1], _NEVER)


def keep_top_p(scores: Tensor, p: float) -> Tensor:
    """The fewest most likely tokens whose probability sums to p or more (arXiv 1904.09751)."""
    if p == 1.0:
        return scores
    ordered, places = scores.sort()
    dropped = ordered.softmax(-1).cumsum(-1) <= 1 - p
    dropped[-1] = False
    return scores.masked_fill(torch.zeros_like(dropped).scatter(0, places, dropped), _NEVER)


def keep_min_p(scores: Tensor, p: float) -> Tensor:
    """Tokens at least p times as likely as the likeliest (arXiv 2407.01082)."""
    if p == 0.0:
        return scores
    odds = scores.softmax(-1)
    return scores.masked_fill(odds < p * odds.max(), _NEVER)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _require(condition: bool, name: str, value: object, expected: str) -> None:
    if not condition:
        raise UnsupportedInputError(f"{name}={value!r}: expected {expected}")
