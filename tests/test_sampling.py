"""Sampling against transformers' own processors, step by step and all together."""

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ktgraph.errors import UnsupportedInputError
from ktgraph.sampling import Sampler, Sampling, filtered, keep_min_p, keep_top_k, keep_top_p
from ktgraph.sampling import penalize as penalized

VOC = 97


def logits(seed: int) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(VOC, generator=rng) * 4


def processed(step: transformers.LogitsProcessor, scores: Tensor, ids: list[int]) -> Tensor:
    found: Tensor = step(torch.tensor([ids]), scores[None].clone())[0]  # pyright: ignore[reportArgumentType]
    return found


@given(st.integers(0, 10**6), st.floats(0.05, 0.999))
def test_each_filter_is_transformers(seed: int, p: float) -> None:
    scores = logits(seed)
    k = 1 + seed % VOC
    pairs = [
        (keep_top_k(scores, k), transformers.TopKLogitsWarper(k)),
        (keep_top_p(scores, p), transformers.TopPLogitsWarper(p)),
        (keep_min_p(scores, p), transformers.MinPLogitsWarper(p)),
    ]
    for ours, step in pairs:
        assert torch.equal(ours, processed(step, scores, [0]))


@given(st.integers(0, 10**6), st.floats(0.5, 2.0))
def test_repetition_penalty_is_transformers(seed: int, penalty: float) -> None:
    scores, ids = logits(seed), [seed % VOC, 3, 3, 50]
    seen = torch.zeros(VOC, dtype=torch.bool)
    seen[torch.tensor(ids)] = True
    step = transformers.RepetitionPenaltyLogitsProcessor(penalty)
    assert torch.equal(penalized(scores, seen, penalty), processed(step, scores, ids))


@given(st.integers(0, 10**6))
def test_order_is_transformers(seed: int) -> None:
    """All steps together: another order keeps other tokens."""
    sampling = Sampling(temperature=1.7, top_k=40, top_p=0.8, min_p=0.05)
    steps = [
        transformers.TemperatureLogitsWarper(1.7),
        transformers.TopKLogitsWarper(40),
        transformers.TopPLogitsWarper(0.8),
        transformers.MinPLogitsWarper(0.05),
    ]
    want = logits(seed)
    for step in steps:
        want = processed(step, want, [0])
    assert torch.equal(filtered(logits(seed), sampling), want)


def test_greedy_takes_the_largest_and_the_penalty_counts() -> None:
    scores = torch.zeros(VOC)
    scores[7], scores[9] = 2.0, 1.5
    assert Sampler(Sampling(), VOC, [7]).choose(scores) == 7
    assert Sampler(Sampling(repetition_penalty=2.0), VOC, [7]).choose(scores) == 9


def test_chosen_tokens_count_as_seen() -> None:
    scores = torch.zeros(VOC)
    scores[7], scores[9] = 2.0, 1.5
    sampler = Sampler(Sampling(repetition_penalty=2.0), VOC, [1])
    assert [sampler.choose(scores) for _ in range(2)] == [7, 9]


def test_same_seed_same_draws_other_seed_other_draws() -> None:
    def draws(seed: int | None) -> list[int]:
        sampler = Sampler(Sampling(temperature=1.0, seed=seed), VOC, [0])
        return [sampler.choose(logits(i)) for i in range(20)]

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)
    assert draws(None) != draws(None)


def test_draws_follow_the_distribution() -> None:
    scores = torch.tensor([0.1, 0.2, 0.7]).log()
    sampler = Sampler(Sampling(temperature=1.0, seed=0), 3, [0])
    counts = torch.bincount(torch.tensor([sampler.choose(scores) for _ in range(4000)]))
    assert torch.allclose(counts / 4000, scores.exp(), atol=0.025)


def test_a_token_filtered_out_is_never_drawn() -> None:
    sampler = Sampler(Sampling(temperature=5.0, top_k=2, seed=0), VOC, [0])
    best = set(logits(3).topk(2).indices.tolist())
    assert {sampler.choose(logits(3)) for _ in range(200)} == best


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1}, "temperature=-1: expected 0 (greedy) or more"),
        ({"top_k": -2}, "top_k=-2: expected 0 (keep all) or more"),
        ({"top_p": 0.0}, "top_p=0.0: expected above 0 and at most 1 (keep all)"),
        ({"min_p": 1.5}, "min_p=1.5: expected from 0 (keep all) to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty=0: expected > 0"),
    ],
)
def test_settings_out_of_range(settings: dict[str, float], message: str) -> None:
    with pytest.raises(UnsupportedInputError) as error:
        Sampling(**settings)  # pyright: ignore[reportArgumentType]
    assert str(error.value) == message
