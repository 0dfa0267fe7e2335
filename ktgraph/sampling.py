"""From a row of logits to the next token, in transformers' order of steps.

repetition penalty -> temperature -> top-k -> top-p -> min-p -> draw.  Temperature 0 is greedy: the
penalty still applies, the filters cannot change the largest logit.  It is the op `sample.tokens`,
on the host as on a GPU (`ktgraph/ops/sample.py`).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ktgraph.errors import UnsupportedInputError, is_whole
from ktgraph.ops.sample import MOST_TOKENS, POSITION, choose, mark, penalized, seen_words, settings
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
        if not sampling.is_greedy and vocabulary > MOST_TOKENS:
            raise UnsupportedInputError(
                f"temperature={sampling.temperature!r}: tokens are drawn from vocabularies of up "
                f"to {MOST_TOKENS}, and this one has {vocabulary}. Use temperature=0, or draw from "
                "`logits` in a way of your own"
            )
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        self._settings = settings(
            sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, seed, len(prompt),
            sampling.repetition_penalty,
        )  # fmt: skip
        self.seen: Ints | None = None  # bits of the tokens that a penalty is for
        if sampling.repetition_penalty != 1:
            self.seen = np.zeros(seen_words(vocabulary), np.int32)
            mark(self.seen, prompt)

    def settings(self, ahead: int = 0) -> Ints:
        """The row of `sample.tokens` for the next token, or the one `ahead` of that."""
        if not ahead:
            return self._settings
        row = self._settings.copy()
        row[POSITION] += ahead
        return row

    def choose(self, logits: Tensor) -> int:
        """The next token, given f32[VOC]; counts it as taken."""
        # numpy: torch's argmax of a large vocabulary wakes OpenMP threads that spin for a while
        scores = logits.numpy()
        if self.seen is not None:
            scores = penalized(scores, self._settings, self.seen)
        token = choose(scores, self._settings)
        self.take(token)
        return token

    def take(self, token: int) -> None:
        """Count a token that was chosen elsewhere: the next one stands behind it."""
        self._settings[POSITION] += 1
        if self.seen is not None:
            mark(self.seen, [token])


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _require(condition: bool, name: str, value: object, expected: str) -> None:
    if not condition:
        raise UnsupportedInputError(f"{name}={value!r}: expected {expected}")
