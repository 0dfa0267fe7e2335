"""sample.tokens: token for token the reference's, for every kind of row beside every other."""

import itertools

import numpy as np
import pytest
import torch

from ktgraph.ir.parser import parse_module
from ktgraph.ops import sample
from ktgraph.ops.registry import kernels_for
from ktgraph.triton_kernels import sample_tokens as _file  # noqa: F401  (registers)
from ktgraph.triton_kernels.registry import launcher
from tests.triton_kernels.close import poisoned, strided

SAMPLE = launcher("sample.tokens", "triton.sample_tokens")

GREEDY = {"temperature": 0.0}
DRAWN = {"temperature": 0.8}
FILTERS = [
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 50},
    {"temperature": 2.5, "top_k": 400, "min_p": 0.1},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_p": 1e-4},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.01},
    {"temperature": 3.0, "top_k": 10_000, "top_p": 0.99},
]


VOCABULARY = """ktgraph.ir 1
module @m home cpu
dim VOC = SIZE
sym O in 1..8

func @f(%logits: f32[O, VOC], %how: i32[O, 8]) -> (i32[O]) {
  %y = sample.tokens %logits, %how : i32[O]
  return %y
}
"""


@pytest.mark.parametrize(("size", "taken"), [(1 << 19, True), ((1 << 19) + 1, False)])
def test_takes_as_many_words_as_can_be_summed(size: int, taken: bool) -> None:
    module = parse_module(VOCABULARY.replace("SIZE", str(size)))
    (kernel,) = kernels_for("sample.tokens", "cuda")[:1]
    answer = kernel.supports(next(iter(module.walk())), module)
    assert bool(answer) is taken
    assert taken or "a vocabulary of 524289: it has 524288 at most" in str(answer)


def rows(kinds: list[dict[str, float]], seed: int = 0) -> torch.Tensor:
    full = [{"top_k": 0, "top_p": 1.0, "min_p": 0.0} | k for k in kinds]
    seeds = [seed * 1_000_003 - n * 0x9E3779B97F4A7C15 for n in range(len(kinds))]
    made = [
        sample.settings(**f, seed=s, position=7 + 11 * n)  # pyright: ignore[reportArgumentType]
        for n, (f, s) in enumerate(zip(full, seeds, strict=True))
    ]
    return torch.from_numpy(np.stack(made))


def same(
    logits: torch.Tensor, how: torch.Tensor, device: torch.device, *more: torch.Tensor | None
) -> None:
    most = sample.most_needed(how.numpy())
    seen, last = more or (None, None)
    wanted = sample.tokens(logits, how, seen, last, most=most)
    out = poisoned(len(how), dtype=torch.int32, device=device)
    given = [None if m is None else m.to(device) for m in (seen, last)]
    SAMPLE(strided(logits.to(device)), how.to(device), *given, out=(out,), most=most)
    assert torch.equal(out.cpu(), wanted)


@pytest.mark.parametrize(
    ("vocabulary", "dtype"),
    [
        (1, torch.float32),
        (31, torch.float16),
        (512, torch.float32),
        (513, torch.bfloat16),
        (1999, torch.float32),
        (1999, torch.bfloat16),
    ],
)
def test_rows_of_every_kind(vocabulary: int, dtype: torch.dtype, device: torch.device) -> None:
    """Sixteen bits tie often."""
    kinds = [GREEDY, DRAWN, *FILTERS]
    rng = torch.Generator().manual_seed(vocabulary)
    logits = (torch.randn(len(kinds), vocabulary, generator=rng) * 4).to(dtype)
    same(logits, rows(kinds, seed=vocabulary), device)


@pytest.mark.parametrize("most", ["greedy", "draw", "filter"])
def test_kernels_that_do_more_than_is_needed(most: str, device: torch.device) -> None:
    kinds = [GREEDY, GREEDY] if most == "greedy" else [GREEDY, DRAWN]
    logits, how = torch.randn(2, 1300, device=device) * 3, rows(kinds)
    out = poisoned(2, dtype=torch.int32, device=device)
    SAMPLE(logits, how.to(device), None, None, out=(out,), most=most)
    assert torch.equal(out.cpu(), sample.tokens(logits.cpu(), how, most=most))


def test_a_large_vocabulary(device: torch.device) -> None:
    logits = torch.randn(2, 152_064).bfloat16() * 3
    same(logits, rows([DRAWN, {"temperature": 0.4, "top_p": 0.8}]), device)


def test_flat_rows_and_more_choices_than_blocks(device: torch.device) -> None:
    """All tokens are listed: several chunks."""
    logits = torch.randn(2, 5000) * 1e-3
    kinds = [{"temperature": 1.0, "top_p": p, "top_k": k} for p, k in ((0.5, 0), (0.9, 4100))]
    same(logits, rows(kinds), device)


@pytest.mark.parametrize("kind", [GREEDY, DRAWN, FILTERS[7]])
@pytest.mark.parametrize("with_last", [False, True])
def test_penalties(kind: dict[str, float], with_last: bool, device: torch.device) -> None:
    """Rows with and without one; the likeliest tokens were seen, or were the last."""
    vocabulary, kinds = 1030, [kind | {"penalty": p} for p in (1.3, 1.0, 0.7, 1.1)]
    logits = torch.randn(4, vocabulary) * 3
    seen = np.zeros((4, sample.seen_words(vocabulary)), np.int32)
    for row, ids in zip(seen, logits.topk(8).indices.tolist(), strict=True):
        sample.mark(row, [*ids[2:], 0, 31, 32, vocabulary - 1])
    last = logits.argmax(-1).int() if with_last else None
    same(logits, rows(kinds, seed=3), device, torch.from_numpy(seen), last)


INF, NAN = float("inf"), float("nan")
ODD = {
    "all minus infinity": [-INF] * 5,
    "infinities tie": [0.0, INF, 3.0, INF, -INF],
    "one finite": [-INF, -INF, 2.0, -INF, -INF],
    "zeros of both signs": [-1.0, -0.0, 0.0, -0.0, -1.0],
    "a NaN": [1.0, 9.0, NAN, NAN, INF],
    "huge": [3e38, -3e38, 1e38, 3e38, 0.0],
    "tiny": [1e-42, 2e-42, 0.0, -1e-42, 2e-42],
}


@pytest.mark.parametrize("name", ODD)
def test_odd_values(name: str, device: torch.device) -> None:
    kinds = [GREEDY, DRAWN, {"temperature": 1e-30}, {"temperature": 1e30}, *FILTERS[1:6:2]]
    logits = torch.tensor(ODD[name]).repeat(len(kinds), 1)
    same(logits, rows(kinds), device)


def test_many_draws(device: torch.device) -> None:
    """Other seeds and positions of one row: each random point is the reference's."""
    logits = torch.randn(1, 700).repeat(24, 1)
    kinds = list(itertools.islice(itertools.cycle([DRAWN, FILTERS[3]]), 24))
    same(logits, rows(kinds, seed=5), device)
