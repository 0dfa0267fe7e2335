"""From a row of logits to the next token, in transformers' order of steps.

repetition penalty -> temperature -> top-k -> top-p -> min-p -> draw.  Temperature 0 is greedy: the
penalty still applies, the filters cannot change the largest logit.  All but the penalty is the op
`sample.tokens`, on the host as on a GPU (`ktgraph/ops/sample.py`).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ktgraph.errors import UnsupportedInputError, is_whole
from ktgraph.ops.sample import POSITION, choose, settings
from ktgraph.runtime.window_pages import Ints


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

    What is drawn depends on the seed, the number of tokens before and the logits: not on the rest
    of the batch, nor on where it is drawn (`ktgraph/ops/sample.py`).
    """

    def __init__(self, sampling: Sampling, vocabulary: int, prompt: Sequence[int]) -> None:
        self.sampling = sampling
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        self._settings = settings(
            sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, seed, len(prompt)
        )
        self._seen: Tensor | None = None
        if sampling.repetition_penalty != 1:
            self._seen = torch.zeros(vocabulary, dtype=torch.bool)
            self._seen[torch.tensor(list(prompt), dtype=torch.long)] = True

    @property
    def needs_logits(self) -> bool:
        """Whether the host must choose: only it knows which tokens a penalty is for."""
        return self._seen is not None

    def settings(self, ahead: int = 0) -> Ints:
        """The row of `sample.tokens` for the next token, or the one `ahead` of that."""
        if not ahead:
            return self._settings
        row = self._settings.copy()
        row[POSITION] += ahead
        return row

    def choose(self, logits: Tensor) -> int:
        """The next token, given f32[VOC]; counts it as taken."""
        if self._seen is not None:
            logits = penalize(logits, self._seen, self.sampling.repetition_penalty)
        # numpy: torch's argmax of a large vocabulary wakes OpenMP threads that spin for a while
        token = choose(logits.numpy(), self._settings)
        self.take(token)
        return token

    def take(self, token: int) -> None:
        """Count a token that was chosen elsewhere: the next one stands behind it."""
        self._settings[POSITION] += 1
        if self._seen is not None:
            self._seen[token] = True


def penalize(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Logits[VOC], those of `seen` tokens (bool[VOC]) moved down (arXiv 1909.05858, sec. 4.1)."""
    if penalty == 1.0:
        return logits
    moved = torch.where(logits < 0, logits * penalty, logits / penalty)
    return torch.where(seen, moved, logits)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _require(condition: bool, name: str, value: object, expected: str) -> None:
    if not condition:
        raise UnsupportedInputError(f"{name}={value!r}: expected {expected}")
