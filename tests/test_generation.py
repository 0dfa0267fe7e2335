"""Generation on a toy language model whose next token depends on every token before it."""

import functools
import itertools
from collections.abc import Sequence
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from ktgraph.errors import ContextLimitError, UnsupportedInputError
from ktgraph.generate import (
    Decoder,
    Endings,
    Event,
    Generation,
    Limits,
    StopFilter,
    packed_calls,
    prompt_logits,
)
from ktgraph.sampling import Sampling
from ktgraph.tokenizer import TextPieces, Tokenizer

VOC = 256  # byte tokens
LIMITS = Limits(
    max_tokens=8, max_batch=3, context=40, cache_rows=80, page_size=4, vocabulary=VOC, positions=100
)
PROMPTS = [[1], [5, 6, 7], list(range(20)), [9] * 11, [250, 3]]


class ToyRunner:
    """Logits are a hash of the whole sequence; anything outside the limits is an error."""

    def __init__(self, limits: Limits = LIMITS, script: bytes | None = None) -> None:
        self.limits = limits
        self.script = script  # what is generated whatever the prompt
        self.sequences: dict[int, list[int]] = {}
        self.scripted: dict[int, int] = {}
        self.calls: list[list[int]] = []
        self.fail_at: int | None = None
        self._names = itertools.count()

    def open(self) -> int:
        seq = next(self._names)
        self.sequences[seq] = []
        return seq

    def close(self, seq: int) -> None:
        del self.sequences[seq]

    def length(self, seq: int) -> int:
        return len(self.sequences[seq])

    def truncate(self, seq: int, n: int) -> None:
        del self.sequences[seq][n:]

    def forward(
        self, requests: Sequence[tuple[int, Sequence[int]]], logits: Literal["last", "all"] = "last"
    ) -> Tensor:
        if self.fail_at is not None and len(self.calls) == self.fail_at:
            raise KeyboardInterrupt
        self.calls.append([len(tokens) for _, tokens in requests])
        assert len({seq for seq, _ in requests}) == len(requests) <= self.limits.max_batch
        assert 1 <= sum(len(tokens) for _, tokens in requests) <= self.limits.max_tokens
        rows: list[Tensor] = []
        for seq, tokens in requests:
            assert tokens
            for n, token in enumerate(tokens):
                self.sequences[seq].append(token)
                if logits == "all" or n == len(tokens) - 1:
                    rows.append(self._row(seq))
            assert len(self.sequences[seq]) <= self.limits.context
        pages = sum(self.limits.pages(len(s)) for s in self.sequences.values())
        assert pages * self.limits.page_size <= self.limits.cache_rows
        return torch.stack(rows)

    def _row(self, seq: int) -> Tensor:
        if self.script is not None:
            at = self.scripted[seq] = self.scripted.get(seq, -1) + 1
            return torch.nn.functional.one_hot(torch.tensor(self.script[at]), VOC).float()
        return toy_logits(self.sequences[seq])


def toy_logits(tokens: Sequence[int]) -> Tensor:
    state = 1
    for token in tokens:
        state = (state * 6364136223846793005 + token + 1442695040888963407) % 2**63
    return torch.randn(VOC, generator=torch.Generator().manual_seed(state))


def toy_greedy(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(toy_logits(tokens).argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def bytewise() -> Tokenizer:
    return bytewise_tokenizer()


@functools.cache
def bytewise_tokenizer() -> Tokenizer:
    """One token per byte, so that characters and stop strings cross token borders."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    order = bytes_of(alphabet)
    backend = RustTokenizer(models.BPE({c: order[c] for c in alphabet}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return Tokenizer(backend)


def bytes_of(alphabet: list[str]) -> dict[str, int]:
    """GPT-2's byte alphabet: printable bytes stand for themselves, the others follow from 256."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in own]
    table = {chr(b): b for b in own} | {chr(256 + n): b for n, b in enumerate(others)}
    assert sorted(table) == alphabet
    return table


def run(
    runner: ToyRunner,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    sampling: Sampling | None = None,
    tokenizer: Tokenizer | None = None,
    **endings: object,
) -> tuple[Generation, list[Event]]:
    decoder = Decoder(runner, runner.limits, tokenizer)
    each = [sampling or Sampling()] * len(prompts)
    generation, events = decoder.start(prompts, each, Endings(**endings))  # pyright: ignore[reportArgumentType]
    return generation, list(events)


def test_a_ragged_batch_is_each_prompt_alone() -> None:
    runner = ToyRunner()
    generation, events = run(runner, max_new_tokens=9)
    assert generation.ids == [toy_greedy(p, 9) for p in PROMPTS]
    assert {c.finish for c in generation.continuations} == {"length"}
    assert len(events) == 9 * len(PROMPTS)
    assert not runner.sequences


def test_sequences_share_calls_and_leave_when_finished() -> None:
    runner = ToyRunner()
    run(runner, max_new_tokens=9)
    assert max(len(call) for call in runner.calls) == LIMITS.max_batch
    assert len(runner.calls) < sum(len(p) / 8 + 9 for p in PROMPTS) / 2


@given(st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=40), min_size=1, max_size=6))
def test_any_batch_keeps_to_the_limits(prompts: list[list[int]]) -> None:
    runner = ToyRunner()
    generation, _ = run(runner, prompts, max_new_tokens=1)
    assert generation.ids == [toy_greedy(p, 1) for p in prompts]
    assert not runner.sequences


def test_draws_do_not_depend_on_the_batch() -> None:
    sampling = Sampling(temperature=1.0, seed=11)
    together, _ = run(ToyRunner(), sampling=sampling, max_new_tokens=8)
    alone = [run(ToyRunner(), [p], sampling, max_new_tokens=8)[0].ids[0] for p in PROMPTS]
    assert together.ids == alone


def test_end_token_ends_a_sequence_and_is_not_given_out() -> None:
    want = toy_greedy(PROMPTS[1], 6)
    generation, _ = run(ToyRunner(), [PROMPTS[1]], max_new_tokens=9, eos=frozenset({want[3], 999}))
    assert generation.ids == [want[:3]]
    assert generation.continuations[0].finish == "eos"


def test_without_a_maximum_the_context_is_filled() -> None:
    generation, _ = run(ToyRunner(), [PROMPTS[2]])
    assert len(generation.ids[0]) == LIMITS.context - 20 + 1  # the last token needs no row
    assert generation.continuations[0].finish == "context"


def test_text_pieces_never_split_a_character(bytewise: Tokenizer) -> None:
    script = "naïve 🙂 façade".encode()
    runner = ToyRunner(script=script)
    generation, events = run(runner, [[65]], tokenizer=bytewise, max_new_tokens=len(script))
    assert [e.piece for e in events if e.piece] == list("naïve 🙂 façade")
    assert generation.texts == ["naïve 🙂 façade"]


def test_a_character_cut_off_by_the_end_shows_as_a_replacement(bytewise: Tokenizer) -> None:
    script = "a🙂".encode()[:-1]
    generation, _ = run(
        ToyRunner(script=script), [[65]], tokenizer=bytewise, max_new_tokens=len(script)
    )
    assert generation.texts[0][0] == "a"
    assert set(generation.texts[0][1:]) == {"�"}


def test_stop_string_across_tokens_never_leaks(bytewise: Tokenizer) -> None:
    script = b"one END two ENDING three"
    runner = ToyRunner(script=script)
    generation, events = run(
        runner, [[65]], tokenizer=bytewise, max_new_tokens=20, stop=("ENDING", "never")
    )
    pieces = [e.piece for e in events]
    assert "".join(pieces) == generation.texts[0] == "one END two "
    assert generation.continuations[0].finish == "stop"
    text = ""
    for piece in pieces:  # at no time was the beginning of the stop string shown
        text += piece
        assert not any(text.endswith(s) for s in ("E", "EN", "END", "ENDI", "ENDIN"))


def test_held_back_text_is_given_out_at_the_end(bytewise: Tokenizer) -> None:
    generation, events = run(
        ToyRunner(script=b"one END"), [[65]], tokenizer=bytewise, max_new_tokens=7, stop=("ENDING",)
    )
    assert generation.texts == ["one END"]
    assert "".join(e.piece for e in events) == "one END"
    assert generation.continuations[0].finish == "length"


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_stop_filter_is_find(text: str, stops: list[str]) -> None:
    """Whatever the pieces, the result is the text before the stop string that completes first."""
    filter = StopFilter(stops)
    shown = ""
    for letter in text:
        shown += filter.push(letter)
        if filter.hit:
            break
    shown += filter.finish()
    ends = [text.find(s) + len(s) for s in stops if s in text]
    if not ends:
        assert shown == text
        return
    seen = text[: min(ends)]
    assert shown == seen[: min(seen.find(s) for s in stops if s in seen)]


def test_interruption_keeps_what_was_generated_and_closes_everything() -> None:
    runner = ToyRunner()
    runner.fail_at = 6
    decoder = Decoder(runner, LIMITS, None)
    generation, events = decoder.start(PROMPTS[:2], [Sampling()] * 2, Endings(max_new_tokens=30))
    with pytest.raises(KeyboardInterrupt):
        list(events)
    assert generation.ids == [toy_greedy(p, 6) for p in PROMPTS[:2]]
    assert {c.finish for c in generation.continuations} == {"interrupted"}
    assert not runner.sequences
    runner.fail_at = None
    again, _ = run(runner, max_new_tokens=2)
    assert again.ids == [toy_greedy(p, 2) for p in PROMPTS]


def test_leaving_the_stream_early_closes_everything() -> None:
    runner = ToyRunner()
    generation, events = Decoder(runner, LIMITS, None).start(
        PROMPTS, [Sampling()] * 5, Endings(max_new_tokens=9)
    )
    next(iter(events))
    assert runner.sequences
    events.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert not runner.sequences
    assert generation.continuations[0].finish == "interrupted"


def test_timing_tells_prefill_from_decode() -> None:
    generation, _ = run(ToyRunner(), [list(range(12))], max_new_tokens=5)
    assert generation.timing.prefill_tokens == 12
    assert generation.timing.decode_tokens == 4
    assert "prefill 12 tokens in " in str(generation.timing)


@pytest.mark.parametrize(
    ("prompt", "new", "kind", "message"),
    [
        ([], 1, UnsupportedInputError, "prompt 0 has no tokens: expected one or more"),
        (
            [1, 256],
            1,
            UnsupportedInputError,
            "prompt 0 holds token 256: expected ids 0 to 255",
        ),
        ([1], 0, UnsupportedInputError, "max_new_tokens=0: expected 1 or more"),
        (
            [1] * 41,
            None,
            ContextLimitError,
            "prompt 0 has 41 tokens, and the cache was compiled for 40 rows a sequence. Shorten "
            "the prompt, or compile with context=41 or more",
        ),
        (
            [1] * 30,
            12,
            ContextLimitError,
            "prompt 0 has 30 tokens and max_new_tokens=12, and the cache was compiled for 40 rows "
            "a sequence. Use max_new_tokens=11 or less, or compile with context=41 or more",
        ),
        (
            [1] * 30,
            72,
            ContextLimitError,
            "prompt 0 has 30 tokens and max_new_tokens=72, and the cache was compiled for 40 rows "
            "a sequence. Use max_new_tokens=11 or less: the model was made for 100 positions",
        ),
    ],
)
def test_wrong_prompts(
    prompt: list[int], new: int | None, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind) as error:
        run(ToyRunner(), [prompt], max_new_tokens=new)
    assert str(error.value) == message


def test_stop_needs_a_tokenizer() -> None:
    with pytest.raises(UnsupportedInputError, match="stop strings need a tokenizer"):
        run(ToyRunner(), stop=("x",))


def test_prompt_logits_are_those_of_each_prompt() -> None:
    runner = ToyRunner()
    found = prompt_logits(runner, LIMITS, PROMPTS)
    for prompt, rows in zip(PROMPTS, found, strict=True):
        want = torch.stack([toy_logits(prompt[: n + 1]) for n in range(len(prompt))])
        assert torch.equal(rows, want)
    assert not runner.sequences
    assert [1, 3, 4] in runner.calls  # a whole prompt, a whole prompt, and a piece of the third


@given(st.lists(st.integers(1, 40), max_size=8))
def test_packed_calls_cover_every_token_once_in_order(lengths: list[int]) -> None:
    calls = list(packed_calls(LIMITS, lengths))
    tokens = [(p.prompt, n) for call in calls for p in call for n in range(p.start, p.stop)]
    assert tokens == [(i, n) for i, length in enumerate(lengths) for n in range(length)]
    assert all(len(call) <= LIMITS.max_batch for call in calls)


@given(st.text(max_size=12))
def test_pieces_are_the_text(text: str) -> None:
    tokenizer = bytewise_tokenizer()
    pieces = TextPieces(tokenizer)
    shown = [pieces.push(t) for t in tokenizer.encode(text)]
    assert "".join(shown) + pieces.finish() == text
