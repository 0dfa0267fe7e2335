"""Every phase against the interpreter, however tokens are fed; errors leave nothing behind."""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import Any

import pytest
import torch
from lowered_models import NATIVE, Pair, make_pair, nmse, prompts

from ktgraph.errors import ContextLimitError, UnsupportedInputError
from ktgraph.runtime.cache import CacheFullError, UnknownSequenceError
from ktgraph.runtime.runner import RunnerBusyError

LIMIT = 1e-12  # NMSE in float32


def test_a_call_of_a_native_plan_is_one_native_call(mla: Pair) -> None:
    executor: Any = mla.runner.executor
    for phase in mla.runner.plan.phases:
        assert not phase.fallbacks
        assert executor.segments(phase.name) == 1


def test_whole_ragged_prompts(pair: Pair) -> None:
    texts = prompts(5, 1, 7, 3)
    seqs = [pair.open() for _ in texts]
    assert pair.forward(list(zip(seqs, texts, strict=True)), "all") <= LIMIT


def test_prefill_chunk_decode(pair: Pair) -> None:
    """Prompts longer than a call, then ragged decode steps across page borders."""
    texts = prompts(37, 2, 18)
    seqs = [pair.open() for _ in texts]
    assert pair.forward(list(zip(seqs, texts, strict=True))) <= LIMIT
    for step in range(4):
        tokens = prompts(1, 1, 1, seed=step + 1)
        assert pair.forward(list(zip(seqs, tokens, strict=True))) <= LIMIT
    assert pair.forward([(seqs[1], prompts(9)[0]), (seqs[0], [4])], "all") <= LIMIT
    assert [pair.runner.length(s) for s in seqs] == [42, 15, 22]


def test_more_sequences_than_a_call_holds(mla: Pair) -> None:
    seqs = [mla.open() for _ in range(9)]
    texts = prompts(3, 1, 8, 5, 2, 1, 4, 9, 6)
    assert mla.forward(list(zip(seqs, texts, strict=True))) <= LIMIT
    tokens = prompts(*[1] * 9, seed=5)
    assert mla.forward(list(zip(seqs, tokens, strict=True))) <= LIMIT


def test_how_a_prompt_is_cut_changes_little(mla: Pair) -> None:
    (text,) = prompts(40)
    runner = mla.runner
    whole, cut = mla.open(), mla.open()
    want = runner.forward([(whole, text)], "all")
    cuts = [0, 1, 2, 11, 27, 40]
    rows = [runner.forward([(cut, text[a:b])], "all") for a, b in pairwise(cuts)]
    assert nmse(torch.cat(rows), want) <= LIMIT


def test_rows_of_all_tokens_and_of_the_last(mla: Pair) -> None:
    texts = prompts(6, 20)
    seqs = [mla.open() for _ in range(4)]
    runner = mla.runner
    every = runner.forward(list(zip(seqs[:2], texts, strict=True)), "all")
    last = runner.forward(list(zip(seqs[2:], texts, strict=True)))
    assert every.shape == (26, 61)
    assert every.dtype == torch.float32
    assert nmse(last, every[[5, 25]]) <= LIMIT


def test_results_are_copies(mla: Pair) -> None:
    seq = mla.open()
    first = mla.runner.forward([(seq, [3])])
    kept = first.clone()
    mla.runner.forward([(seq, [4])])
    assert torch.equal(first, kept)


def test_bits_repeat(mla: Pair) -> None:
    """Neither pages nor neighbours nor timing change a sequence's bits in the same phase."""
    (text,) = prompts(11)
    runner = mla.runner
    alone = mla.open()
    want = runner.forward([(alone, text)], "all")
    other, again = mla.open(), mla.open()
    both = runner.forward([(other, prompts(3, seed=8)[0]), (again, text)], "all")
    assert torch.equal(both[3:], want)


def test_truncate_goes_back(mla: Pair) -> None:
    (text,) = prompts(13)
    seq, runner = mla.open(), mla.runner
    want = runner.forward([(seq, text)])
    runner.forward([(seq, prompts(20, seed=3)[0])])
    runner.truncate(seq, 12)
    assert runner.length(seq) == 12
    assert nmse(runner.forward([(seq, text[12:])]), want) <= LIMIT


def test_phase_follows_the_longest_request(mla: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    call = mla.runner.executor.call

    def noted(name: str, ids: list[int], step: Any) -> torch.Tensor:
        called.append(name)
        return call(name, ids, step)

    monkeypatch.setattr(mla.runner.executor, "call", noted)
    a, b = mla.open(), mla.open()
    mla.runner.forward([(a, [1]), (b, [2, 3])])
    mla.runner.forward([(a, [1]), (b, [2])])
    mla.runner.forward([(a, prompts(33)[0])])
    assert called == ["prefill", "decode", "prefill", "prefill", "prefill"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failed_call_leaves_no_trace(
    mla: Pair, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """The third call of a long prompt fails: lengths, pages and further results are as before."""
    runner = mla.runner
    seq, other = mla.open(), mla.open()
    texts = prompts(5, 3)
    mla.forward([(seq, texts[0]), (other, texts[1])])
    free = runner.sequences.pool.free
    calls: list[int] = []
    call = runner.executor.call

    def failing(name: str, ids: list[int], step: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise error
        return call(name, ids, step)

    with monkeypatch.context() as patch:
        patch.setattr(runner.executor, "call", failing)
        with pytest.raises(error):
            runner.forward([(other, [7]), (seq, prompts(50)[0])])
    assert [runner.length(seq), runner.length(other)] == [5, 3]
    assert runner.sequences.pool.free == free
    assert mla.forward([(seq, prompts(21, seed=9)[0]), (other, [2])]) <= LIMIT


def test_a_second_caller_is_told(mla: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, errors = mla.runner, list[BaseException]()
    a, b = mla.open(), mla.open()
    call = runner.executor.call

    def second() -> None:
        try:
            runner.forward([(b, [1])])
        except RunnerBusyError as error:
            errors.append(error)

    def meanwhile(name: str, ids: list[int], step: Any) -> torch.Tensor:
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
        return call(name, ids, step)

    with monkeypatch.context() as patch:
        patch.setattr(runner.executor, "call", meanwhile)
        runner.forward([(a, [1])])
    assert len(errors) == 1
    assert (runner.length(a), runner.length(b)) == (1, 0)
    runner.forward([(b, [1])])


def test_too_long_says_how_long(mla: Pair) -> None:
    seq = mla.open()
    mla.runner.forward([(seq, prompts(60)[0])])
    with pytest.raises(ContextLimitError, match=r"65 rows.*64.*at most 4 tokens.*context=65"):
        mla.runner.forward([(seq, [1, 2, 3, 4, 5])])
    mla.runner.forward([(seq, [1, 2, 3, 4])])
    assert mla.runner.length(seq) == 64


def test_full_says_which_option(mla: Pair) -> None:
    """60 pages of 4 rows: four sequences take 15 each, a fifth finds none."""
    seqs = [mla.open() for _ in range(5)]
    for seq in seqs[:4]:
        mla.runner.forward([(seq, prompts(60)[0])])
    with pytest.raises(CacheFullError, match=r"1 more pages.*0 of 60 are free.*cache_rows=244"):
        mla.runner.forward([(seqs[4], [1])])
    assert [mla.runner.length(s) for s in seqs] == [60] * 4 + [0]
    mla.runner.truncate(seqs[0], 50)
    mla.runner.forward([(seqs[4], [1])])


def test_wrong_requests(mla: Pair) -> None:
    seq, runner = mla.open(), mla.runner
    with pytest.raises(UnknownSequenceError, match="sequence 9999 is not open"):
        runner.forward([(9999, [1])])
    with pytest.raises(UnsupportedInputError, match="token 61 is outside the vocabulary of 61"):
        runner.forward([(seq, [1, 61])])
    with pytest.raises(UnsupportedInputError, match="once"):
        runner.forward([(seq, [1]), (seq, [2])])
    with pytest.raises(UnsupportedInputError, match="no tokens"):
        runner.forward([(seq, [])])
    with pytest.raises(UnsupportedInputError, match="at least one"):
        runner.forward([])
    with pytest.raises(UnsupportedInputError, match='"last" or "all"'):
        runner.forward([(seq, [1])], "some")  # type: ignore[arg-type]
    assert runner.length(seq) == 0


def test_timeline_names_every_instruction(pair: Pair) -> None:
    seq = pair.open()
    (text,) = prompts(20)
    trace = pair.runner.timeline([(seq, text)])  # two calls of prefill
    events = trace["traceEvents"]
    (phase,) = {e["args"]["phase"] for e in events}
    assert {e["tid"] for e in events} == {"cpu"}
    assert len(events) == 2 * len(pair.runner.plan.phase(phase).instructions)
    assert all(e["ph"] == "X" and e["dur"] >= 0 for e in events)
    assert [e["ts"] for e in events] == sorted(e["ts"] for e in events)
    assert events[0]["args"]["op"].startswith("%")
    assert pair.runner.length(seq) == 20


@pytest.mark.parametrize(
    ("quantize", "activations", "bound"),
    [
        ("int8", "f32", 1e-4),
        ("int4(group=32)", "f32", 1e-4),
        # rows rounded to 8 bits as well
        ("int8", "auto", 2e-3),
        ("int4p(group=32)", "auto", 2e-3),
        ("down_proj=keep,*=int8", "auto", 2e-3),
    ],
)
def test_quantized_weights_give_the_interpreters_numbers(
    quantize: str, activations: str, bound: float
) -> None:
    """Packed integers hold what the recipe says: the interpreter's rounded values."""
    pipeline = NATIVE.replace("pack-weights", "quantize,pack-weights")
    pair = make_pair("mla", pipeline, quantize=quantize, activations=activations)
    seqs = [pair.open(), pair.open()]
    texts = prompts(9, 4)
    assert pair.forward(list(zip(seqs, texts, strict=True)), "all") <= bound
