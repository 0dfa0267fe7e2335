"""Perplexity's protocol on a language model small enough to sum by hand."""

import math
from collections.abc import Sequence
from typing import Literal

import pytest
import torch
from torch import Tensor

from ktgraph.errors import UnsupportedInputError
from ktgraph.generate import Limits
from ktgraph.perplexity import perplexity

VOC = 5
LIMITS = Limits(max_tokens=4, max_batch=2, context=12, cache_rows=24, page_size=4, vocabulary=VOC)


class CountRunner:
    """Gives token (n + previous token) % VOC the logit 1, n = rows so far: position counts."""

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}

    def open(self) -> int:
        self.rows[len(self.rows)] = 0
        return len(self.rows) - 1

    def close(self, seq: int) -> None:
        self.rows[seq] = -1000

    def length(self, seq: int) -> int:
        return self.rows[seq]

    def truncate(self, seq: int, n: int) -> None:
        self.rows[seq] = n

    def forward(
        self, requests: Sequence[tuple[int, Sequence[int]]], logits: Literal["last", "all"] = "last"
    ) -> Tensor:
        assert logits == "all"
        found: list[int] = []
        for seq, tokens in requests:
            for token in tokens:
                self.rows[seq] += 1
                found.append((self.rows[seq] + token) % VOC)
        return torch.eye(VOC)[found]


HIT = math.log(math.e + VOC - 1) - 1  # -log p of the token with logit 1
MISS = HIT + 1


def by_hand(ids: list[int]) -> list[float]:
    return [HIT if (n + 1 + ids[n]) % VOC == ids[n + 1] else MISS for n in range(len(ids) - 1)]


TOKENS = [3, 0, 1, 4, 2, 2, 1, 0, 3, 4, 1, 1, 2, 0, 0, 4, 3]


def test_every_token_is_scored_once_behind_the_begin_token() -> None:
    found = perplexity(CountRunner(), LIMITS, TOKENS, window=7, bos=0)
    windows = [by_hand([0, *TOKENS[at : at + 7]]) for at in (0, 7, 14)]
    total = [x for w in windows for x in w]
    assert found.tokens == len(TOKENS) == len(total)
    assert found.mean_nll == pytest.approx(sum(total) / len(total), rel=1e-12)
    assert found.window_nll == pytest.approx([sum(w) / len(w) for w in windows], rel=1e-12)
    assert float(found) == found.value == math.exp(found.mean_nll)
    assert str(found).endswith(" over 17 tokens in 3 windows")


def test_without_a_begin_token_the_first_of_a_window_is_context() -> None:
    found = perplexity(CountRunner(), LIMITS, TOKENS, window=4, bos=None)
    windows = [by_hand(TOKENS[at : at + 4]) for at in (0, 4, 8, 12)]
    total = [x for w in windows for x in w]
    assert found.tokens == 12  # the last window holds one token: nothing to score
    assert found.mean_nll == pytest.approx(sum(total) / len(total), rel=1e-12)


@pytest.mark.parametrize("window", [0, 12])
def test_window_must_fit(window: int) -> None:
    with pytest.raises(UnsupportedInputError) as error:
        perplexity(CountRunner(), LIMITS, TOKENS, window=window, bos=0)
    assert str(error.value) == (
        f"window={window}: expected 1 to 11, what the compiled cache of 12 rows a sequence holds; "
        "compile with a larger context"
    )


def test_too_little_to_score() -> None:
    with pytest.raises(UnsupportedInputError, match="two tokens or more"):
        perplexity(CountRunner(), LIMITS, [1], window=4, bos=None)
