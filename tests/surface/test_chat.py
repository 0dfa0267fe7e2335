"""Chats: the model's template, cache rows kept over turns, overflow, interruption, the command."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import transformers

import ktgraph as kt
from ktgraph.chat import Chat
from ktgraph.chat_template import chat_template
from ktgraph.cli import main
from ktgraph.errors import ContextLimitError, UnsupportedInputError
from ktgraph.generate import Endings
from ktgraph.model_input import read_model
from ktgraph.sampling import Sampling

QUESTIONS = ("Who is at the door?", "What did he say?", "And then?")
GREEDY: dict[str, Any] = {"temperature": 0.0}


@pytest.fixture(scope="module")
def exe(packed_folder: Path) -> kt.Compiled:
    return kt.load(packed_folder, context=256, cache_rows=512)


def afresh(chat: Chat, exe: kt.Compiled, count: int) -> list[int]:
    """What the last prompt of a chat gives in an empty cache."""
    assert chat.last is not None
    return exe.generate(chat.last.continuations[0].prompt, count, eos=tuple(chat.endings.eos))


def ids(chat: Chat) -> list[int]:
    assert chat.last is not None
    return chat.last.continuations[0].ids


def test_the_prompt_is_the_one_of_transformers(talking_model: Path) -> None:
    card = read_model(talking_model).card
    assert card.tokenizer is not None
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello\nyou"},
    ]
    theirs = transformers.AutoTokenizer.from_pretrained(talking_model)
    text = chat_template(card).render(messages, card.tokenizer.special_tokens)
    assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    wanted = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    assert card.tokenizer.encode(text, special=False) == wanted["input_ids"]


def test_a_turn_runs_only_what_is_new(exe: kt.Compiled) -> None:
    chat = exe.chat("Be brief.", max_new_tokens=12, **GREEDY)
    for number, question in enumerate(QUESTIONS):
        answer = chat.say(question)
        assert chat.last is not None
        found, timing = chat.last.continuations[0], chat.last.timing
        assert answer == found.text == chat.messages[-1]["content"]
        assert found.ids == afresh(chat, exe, 12)
        new = len(exe.tokenizer.encode(f"[user] {question}\n[assistant] ")) if exe.tokenizer else 0
        assert (timing.prefill_tokens <= new + 4) == (number > 0)
    assert [m["role"] for m in chat.messages] == ["system", *["user", "assistant"] * 3]
    chat.reset()
    assert chat.messages == [{"role": "system", "content": "Be brief."}]
    assert len(exe.runner.sequences) == 0


def test_a_template_that_forgets_thoughts_stays_right(exe: kt.Compiled, tmp_path: Path) -> None:
    """Only the last messages show, so that early rows of the cache are no longer the prompt's."""
    path = tmp_path / "last.jinja"
    path.write_text("{% for m in messages[-2:] %}[{{ m.role }}] {{ m.content }}\n{% endfor %}>")
    chat = exe.chat(template=path, max_new_tokens=8, **GREEDY)
    for question in QUESTIONS:
        chat.say(question)
        assert ids(chat) == afresh(chat, exe, 8)
    chat.close()


def test_the_oldest_exchanges_make_room(exe: kt.Compiled) -> None:
    chat = exe.chat("Be brief.", max_new_tokens=40, **GREEDY)
    dropped = []
    for _ in range(6):
        chat.say(QUESTIONS[0] * 2)
        dropped.append(chat.dropped)
        assert ids(chat) == afresh(chat, exe, 40)
        assert chat.messages[0]["role"] == "system"
        assert chat.messages[1]["role"] == "user"
    assert dropped[0] == 0
    assert dropped[-1] > 0
    chat.close()


def test_a_message_that_is_too_long_changes_nothing(exe: kt.Compiled) -> None:
    chat = exe.chat(max_new_tokens=8, **GREEDY)
    chat.say(QUESTIONS[0])
    before = list(chat.messages)
    with pytest.raises(ContextLimitError, match=r"makes \d+ tokens, and the context is 256"):
        chat.say("word " * 400)
    assert chat.messages == before
    chat.say(QUESTIONS[1])
    assert ids(chat) == afresh(chat, exe, 8)
    chat.close()


def test_without_a_limit_an_answer_ends_with_the_context(exe: kt.Compiled) -> None:
    chat = exe.chat(**GREEDY)
    chat.endings = Endings()  # no end token either
    chat.say(QUESTIONS[0])
    assert chat.last is not None
    answer = chat.last.continuations[0]
    assert answer.finish == "context"
    assert len(answer.prompt) + len(answer.ids) == 257  # the last token needs no row
    chat.say(QUESTIONS[1])
    assert chat.dropped == 1
    chat.close()


def test_an_answer_left_early_stays_as_far_as_it_got(exe: kt.Compiled) -> None:
    chat = exe.chat(max_new_tokens=12, **GREEDY)
    pieces = chat.stream(QUESTIONS[0])
    got = next(pieces) + next(pieces)
    pieces.close()
    assert chat.messages[-1]["content"].startswith(got)
    assert chat.last is not None
    assert chat.last.continuations[0].finish == "interrupted"
    chat.say(QUESTIONS[1])
    assert ids(chat) == afresh(chat, exe, 12)
    chat.close()


def test_interrupted_before_a_token_nothing_was_said(
    exe: kt.Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    chat = exe.chat(max_new_tokens=8, **GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(exe.runner, "_call", stop)
        with pytest.raises(KeyboardInterrupt):
            chat.say(QUESTIONS[0])
    assert chat.messages == []
    chat.say(QUESTIONS[1])
    assert ids(chat) == afresh(chat, exe, 8)
    chat.close()


def test_sampling_begins_as_the_model_advises(exe: kt.Compiled) -> None:
    assert exe.chat().sampling == Sampling(temperature=1.0, top_p=0.8)
    assert exe.chat(temperature=0.0, seed=3).sampling.is_greedy
    first = exe.chat(max_new_tokens=10, seed=1).say("Hello")
    assert first == exe.chat(max_new_tokens=10, seed=1).say("Hello")


def test_plain_template(tiny_qwen: Path) -> None:
    card = read_model(tiny_qwen).card
    plain = chat_template(card, "plain")
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": " Hi."},
        {"role": "user", "content": "Bye"},
    ]
    text = plain.render(messages, {"bos_token": "<s>"})
    assert text == "<s>System: Be brief.\nUser: Hello\nAssistant: Hi.\nUser: Bye\nAssistant:"
    assert plain.stop == ("\nUser:",)


def test_a_template_that_refuses_is_one_error(tiny_qwen: Path, tmp_path: Path) -> None:
    card = read_model(tiny_qwen).card
    for text in ("{{ raise_exception('no system message') }}", "{% for %}"):
        path = tmp_path / "t.jinja"
        path.write_text(text)
        with pytest.raises(UnsupportedInputError, match=r"t\.jinja refuses this conversation: "):
            chat_template(card, path).render([], {})


# ---- the command


def talk(monkeypatch: pytest.MonkeyPatch, folder: Path, lines: str, *options: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    return main(["chat", str(folder), "--temperature", "0", "--max-new-tokens", "6", *options])


def test_the_command_answers_lines(
    packed_folder: Path,
    exe: kt.Compiled,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = f"{QUESTIONS[0]}\n\n/who\n/reset\n{QUESTIONS[0]}\nAnd \\\nthen?\n/quit\nnever read\n"
    assert talk(monkeypatch, packed_folder, lines) == 1  # /who is no command
    out, err = capsys.readouterr()
    chat = exe.chat(max_new_tokens=6, **GREEDY)
    first = chat.say(QUESTIONS[0])
    second = chat.say("And \nthen?")
    assert out == f"{first}\n{first}\n{second}\n"
    assert "/who is no command: /reset begins anew" in err
    assert "(begun anew)" in err
    rates = [line for line in err.splitlines() if line.startswith("[")]
    assert len(rates) == 3
    assert all("tok/s); decode " in line for line in rates)
    assert rates[1].endswith("; 0 tokens of before kept]")
    assert not rates[2].endswith("; 0 tokens of before kept]")


def test_ctrl_c_stops_the_answer_only(
    packed_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ktgraph.runtime.runner import Runner

    call, calls = Runner._call, [0]

    def stop_third(self: Any, *args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise KeyboardInterrupt
        return call(self, *args)

    monkeypatch.setattr(Runner, "_call", stop_third)
    assert talk(monkeypatch, packed_folder, f"{QUESTIONS[0]}\n{QUESTIONS[1]}\n") == 0
    out, err = capsys.readouterr()
    assert err.count("[stopped; ") == 1
    assert err.count("[cut at --max-new-tokens; ") == 1
    assert out.endswith("\n")


def test_a_full_context_is_told_and_the_chat_goes_on(
    packed_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "\n".join([QUESTIONS[0] * 4, "word " * 100, QUESTIONS[1] * 4, QUESTIONS[2] * 4])
    assert talk(monkeypatch, packed_folder, lines, "--context", "64") == 1
    out, err = capsys.readouterr()
    assert "ktgraph chat: this message makes " in err
    assert "Shorten it, or compile with context=" in err
    assert "(the context is full: 1 oldest exchange(s) left out)" in err
    assert err.count("[cut at --max-new-tokens") == 3
    assert len(out) > 20


def test_no_template_is_told_before_anything_is_loaded(
    tiny_qwen: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(monkeypatch, tiny_qwen, "Hello\n") == 2
    err = capsys.readouterr().err
    assert err.startswith("ktgraph chat: tiny-qwen3-moe has no chat template")
    assert "--template plain" in err
    assert talk(monkeypatch, tiny_qwen, "Hello\n", "--template", "none.jinja") == 2
    assert "template='none.jinja': no such file" in capsys.readouterr().err
