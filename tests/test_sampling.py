"""Sampling against transformers' own processors, step by step and all together."""

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ktgraph.errors import UnsupportedInputError
from ktgraph.ops import sample
from ktgraph.ops.sample import choose, distances, kept, philox, random_point, settings, weights
from ktgraph.runtime.window_pages import Ints
from ktgraph.sampling import Sampler, Sampling

VOC = 97


def logits(seed: int) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(VOC, generator=rng) * 4


def how(sampling: Sampling, seed: int = 0, position: int = 0) -> Ints:
    s = sampling
    return settings(s.temperature, s.top_k, s.top_p, s.min_p, seed, position)


def kept_ids(scores: Tensor, sampling: Sampling) -> list[int]:
    return kept(scores.numpy(), how(sampling))[0].tolist()


def processed(step: transformers.LogitsProcessor, scores: Tensor, ids: list[int]) -> Tensor:
    found: Tensor = step(torch.tensor([ids]), scores[None].clone())[0]  # pyright: ignore[reportArgumentType]
    return found


@given(st.integers(0, 10**6), st.floats(0.05, 0.999))
def test_each_filter_is_transformers(seed: int, p: float) -> None:
    scores = logits(seed)
    k = 1 + seed % VOC
    pairs = [
        (Sampling(1.0, top_k=k), transformers.TopKLogitsWarper(k)),
        (Sampling(1.0, top_p=p), transformers.TopPLogitsWarper(p)),
        (Sampling(1.0, min_p=p), transformers.MinPLogitsWarper(p)),
    ]
    for ours, step in pairs:
        want = processed(step, scores.double(), [0]).isfinite().nonzero().flatten().tolist()
        assert kept_ids(scores, ours) == want


@given(st.integers(0, 10**6), st.floats(0.5, 2.0))
def test_repetition_penalty_is_transformers(seed: int, penalty: float) -> None:
    scores, ids = logits(seed), [seed % VOC, 3, 3, 50]
    step = transformers.RepetitionPenaltyLogitsProcessor(penalty)
    seen = np.zeros(sample.seen_words(VOC), np.int32)
    sample.mark(seen, ids[:3])
    row = settings(0.0, 0, 1.0, 0.0, 0, penalty=penalty)
    found = torch.from_numpy(sample.penalized(scores.numpy(), row, seen, last=ids[3]))
    assert torch.equal(found, processed(step, scores, ids))


@given(st.integers(0, 10**6))
def test_order_is_transformers(seed: int) -> None:
    """All steps together: another order keeps other tokens.  Weights are the probabilities."""
    sampling = Sampling(temperature=1.7, top_k=40, top_p=0.8, min_p=0.05)
    want = logits(seed).double()
    for step in (
        transformers.TemperatureLogitsWarper(1.7),
        transformers.TopKLogitsWarper(40),
        transformers.TopPLogitsWarper(0.8),
        transformers.MinPLogitsWarper(0.05),
    ):
        want = processed(step, want, [0])
    ids, weight = kept(logits(seed).numpy(), how(sampling))
    found = torch.zeros(VOC, dtype=torch.float64)
    found[torch.from_numpy(ids)] = torch.from_numpy(weight / weight.sum())
    assert (want.softmax(-1) - found).abs().max() < 3e-7  # float32 logits over the temperature


def test_tokens_that_tie_stay_together() -> None:
    scores = torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0, 0.0])
    assert kept_ids(scores, Sampling(1.0, top_k=1)) == [1, 3]
    assert kept_ids(scores, Sampling(1.0, top_k=3)) == [1, 2, 3, 4]
    assert kept_ids(scores, Sampling(1.0, top_p=0.1)) == [1, 3]


def test_weights_are_powers_of_two_and_never_rise() -> None:
    q = np.arange(0, 3 << 24, 5, dtype=np.int32)
    found = weights(q)
    assert found[0] == 1 << 43
    assert (np.diff(found) <= 0).all()
    assert np.abs(found / 2.0**43 * 2.0 ** (q / 2.0**24) - 1).max() < 1e-8
    assert weights(np.array([sample.FARTHEST - 1, sample.FARTHEST], np.int32)).tolist() == [0, 0]


def test_distances_are_cut_off() -> None:
    scores = torch.tensor([0.0, -1.0, -100.0, -torch.inf]).numpy()
    found = distances(scores, how(Sampling(1.0)))
    assert found[[0, 2, 3]].tolist() == [0, sample.FARTHEST, sample.FARTHEST]
    assert abs(int(found[1]) - 1.4426950408889634 * 2**24) < 2


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            "408f276d 41c83b0e a20bc7c6 6d5451fd",
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_is_random123(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: str
) -> None:
    """Known answers of the authors' library (kat_vectors, philox4x32 10)."""
    assert " ".join(f"{w:08x}" for w in philox(counter, key)) == words


@given(st.integers(1, 1 << 62), st.integers(-(1 << 63), 1 << 63), st.integers(0, 1 << 20))
def test_a_random_point_is_inside(total: int, seed: int, position: int) -> None:
    assert 0 <= random_point(total, how(Sampling(), seed, position)) < total


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


def chi_square(counts: Tensor, odds: Tensor) -> float:
    want = odds * counts.sum()
    return float(((counts - want).square() / want).sum())


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=1.5, top_k=12),
        Sampling(temperature=2.0, top_p=0.9),
        Sampling(temperature=1.2, min_p=0.1),
    ],
    ids=["temperature", "top_k", "top_p", "min_p"],
)
@pytest.mark.parametrize("vary", ["seed", "position"])
def test_draws_follow_the_distribution(sampling: Sampling, vary: str) -> None:
    """Pearson's test at fixed seeds: below the 99.9 % point, by Wilson and Hilferty."""
    scores, count = (logits(5) / 3).numpy(), 6000
    ids, weight = kept(scores, how(sampling))
    rows = [how(sampling, **{"seed": 9, "position": 9, vary: n}) for n in range(count)]
    drawn = torch.tensor([choose(scores, row) for row in rows])
    assert set(drawn.tolist()) <= set(ids.tolist())
    odds = torch.from_numpy(weight / weight.sum())
    counts = torch.bincount(drawn, minlength=VOC)[torch.from_numpy(ids)].double()
    rare = odds * count < 5  # as one class
    odds = torch.cat([odds[~rare], odds[rare].sum()[None]])
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    if odds[-1] == 0:
        odds, counts = odds[:-1], counts[:-1]
    free = len(odds) - 1
    limit = free * (1 - 2 / (9 * free) + 3.09 * (2 / (9 * free)) ** 0.5) ** 3
    assert chi_square(counts, odds) < limit


def test_the_place_in_the_text_decides_not_what_was_drawn_before() -> None:
    """A sampler that begins later draws as one that came there."""
    sampling = Sampling(temperature=1.0, seed=4)
    whole, late = Sampler(sampling, VOC, [0]), Sampler(sampling, VOC, [0] * 8)
    drawn = [whole.choose(logits(i)) for i in range(12)]
    assert [late.choose(logits(i)) for i in range(7, 12)] == drawn[7:]


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


def test_a_vocabulary_that_is_too_large_to_draw_from() -> None:
    """Weights of 2^43 are summed in 64 bits."""
    large = sample.MOST_TOKENS + 1
    for sampling in (Sampling(), Sampling(repetition_penalty=1.5)):
        assert Sampler(sampling, large, [1]).choose(torch.arange(large).float()) == large - 1
    Sampler(Sampling(temperature=1.0), sample.MOST_TOKENS, [1])
    with pytest.raises(UnsupportedInputError, match="up to 524288, and this one has 524289"):
        Sampler(Sampling(temperature=1.0), large, [1])
