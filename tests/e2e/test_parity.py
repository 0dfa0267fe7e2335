"""Logits are those of transformers, however the tokens are fed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .conftest import Pair

LIMIT = 1e-10  # NMSE of float32 logits
LENGTHS = (1, 5, 33, 17, 2)


def nmse(got: Tensor, want: Tensor) -> float:
    got, want = got.double(), want.double()
    return float((got - want).square().sum() / want.square().sum())


def test_whole_prompt(pair: Pair) -> None:
    (prompt,) = pair.prompts(40)
    found = pair.exe(torch.tensor([prompt]))
    assert found.shape == (1, 40, pair.vocabulary)
    assert nmse(found[0], pair.wanted(prompt)) <= LIMIT


def test_every_phase_is_one_native_call(pair: Pair) -> None:
    """An op that falls back to its torch reference is right, slow, and easily unseen."""
    phases = pair.exe.runner.plan.phases
    assert {p.name: [i.kernel for i in p.instructions if not i.is_native] for p in phases} == {
        p.name: [] for p in phases
    }


def test_chunked_prefill(pair: Pair) -> None:
    (prompt,) = pair.prompts(37)
    runner = pair.exe.runner
    seq = runner.open()
    rows = [runner.forward([(seq, prompt[at : at + 9])], logits="all") for at in range(0, 37, 9)]
    runner.close(seq)
    assert nmse(torch.cat(rows), pair.wanted(prompt)) <= LIMIT


def test_step_by_step(pair: Pair) -> None:
    (prompt,) = pair.prompts(34)  # crosses a page border of the cache
    runner = pair.exe.runner
    seq = runner.open()
    rows = [runner.forward([(seq, [token])]) for token in prompt]
    runner.close(seq)
    assert nmse(torch.cat(rows), pair.wanted(prompt)) <= LIMIT


def test_ragged_batch(pair: Pair) -> None:
    prompts = pair.prompts(*LENGTHS)
    for got, prompt in zip(pair.exe(prompts), prompts, strict=True):
        assert nmse(got, pair.wanted(prompt)) <= LIMIT


def test_ragged_decode_and_prefill_in_one_call(pair: Pair) -> None:
    """Five sequences at different places, each call mixing one token with whole pieces."""
    prompts = pair.prompts(*LENGTHS)
    runner = pair.exe.runner
    seqs = [runner.open() for _ in prompts]
    left = [list(p) for p in prompts]
    rows: list[list[Tensor]] = [[] for _ in prompts]
    pieces = [1, 4, 7, 1, 1]
    while any(left):
        taken = [rest[:n] for rest, n in zip(left, pieces, strict=True)]
        work = [i for i, tokens in enumerate(taken) if tokens]
        found = runner.forward([(seqs[i], taken[i]) for i in work], logits="all")
        for i, part in zip(work, found.split([len(taken[i]) for i in work]), strict=True):
            rows[i].append(part)
            del left[i][: len(taken[i])]
    for seq in seqs:
        runner.close(seq)
    for got, prompt in zip(rows, prompts, strict=True):
        assert nmse(torch.cat(got), pair.wanted(prompt)) <= LIMIT


def test_truncated_sequence_goes_on_from_there(pair: Pair) -> None:
    first, second = pair.prompts(20, 12)
    runner = pair.exe.runner
    seq = runner.open()
    runner.forward([(seq, first)])
    runner.truncate(seq, 7)
    assert runner.length(seq) == 7
    got = runner.forward([(seq, second)], logits="all")
    runner.close(seq)
    assert nmse(got, pair.wanted(first[:7] + second)[7:]) <= LIMIT
