"""`Chat`: a conversation whose cache rows are kept, so that a turn runs only what is new.

Each turn renders the whole conversation and keeps the cache rows of as many first tokens as are the
same as before: all but the new message as a rule, fewer where a template leaves out what it showed
earlier (thoughts), none but the system message where the oldest exchanges had to go.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from itertools import takewhile

from ktgraph.chat_template import ChatTemplate, Message
from ktgraph.errors import ContextLimitError
from ktgraph.generate import Decoder, Endings, Generation, Limits
from ktgraph.generate import Runner as Rows
from ktgraph.model_input import ModelCard
from ktgraph.sampling import Sampling

_ANSWER = 512  # tokens kept free for an answer of no given length, at most a quarter of the context


class Chat:
    """A conversation with a compiled model (`Compiled.chat`).

    messages: what was said, the oldest first.  last: ids, text and timing of the last answer, None
        before one was begun.  dropped: exchanges left out of the last turn, for want of room.
    """

    def __init__(
        self,
        runner: Rows,
        limits: Limits,
        card: ModelCard,
        template: ChatTemplate,
        *,
        system: str | None = None,
        max_new_tokens: int | None = None,
        sampling: Sampling | None = None,
    ) -> None:
        self.tokenizer = card.need_tokenizer("a chat")
        self.limits = limits
        self.template = template
        self.sampling = sampling or Sampling()
        ends = {*card.eos, *([] if self.tokenizer.eos_id is None else [self.tokenizer.eos_id])}
        self.endings = Endings(max_new_tokens, frozenset(ends), template.stop)
        self.last: Generation | None = None
        self.dropped = 0
        self.messages: list[Message] = []
        self._system = [{"role": "system", "content": system}] if system else []
        self._runner = runner
        self._seq: int | None = None
        self._ids: list[int] = []  # tokens whose rows the sequence has
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.close()
        self.messages = list(self._system)

    def close(self) -> None:
        """Give the cache rows back; a later turn runs the whole conversation again."""
        if self._seq is not None:
            self._runner.close(self._seq)
        self._seq, self._ids = None, []

    def say(self, text: str) -> str:
        """The answer to a message."""
        return "".join(self.stream(text))

    def stream(self, text: str) -> Generator[str]:
        """The answer in pieces as they come.

        An answer that is left early (Ctrl-C, `close()`) stays in the conversation as far as it got.
        Raises ContextLimitError when the message alone does not fit; the conversation stays as it
        was.
        """
        before, self.last = self.messages, None
        messages, prompt = self._fitting([*before, {"role": "user", "content": text}])
        self._keep_common(prompt)
        assert self._seq is not None
        decoder = Decoder(self._runner, self.limits, self.tokenizer)
        self.last, events = decoder.resume(self._seq, prompt, self.sampling, self.endings)
        answer = self.last.continuations[0]
        try:
            with closing(events):
                for event in events:
                    if event.piece:
                        yield event.piece
        finally:
            self._ids = [*prompt, *answer.ids][: self._runner.length(self._seq)]
            answered = answer.finish != "interrupted" or answer.ids
            said = [*messages, {"role": "assistant", "content": answer.text}]
            self.messages = said if answered else before

    def _fitting(self, messages: list[Message]) -> tuple[list[Message], list[int]]:
        """The conversation and its tokens, without the oldest exchanges if it is too long."""
        first = len(self._system)
        self.dropped = 0
        while True:
            prompt = self._encode(messages)
            is_whole = len(prompt) + self._reserve() <= self.limits.rows
            following = self._second_exchange(messages, first)
            if is_whole or (following is None and len(prompt) < self.limits.rows):
                return messages, prompt
            if following is None:
                need = len(prompt) + self._reserve()
                raise ContextLimitError(
                    f"this message makes {len(prompt)} tokens, and the context is "
                    f"{self.limits.rows}. {self.limits.way_out('Shorten it', need)}"
                )
            messages = [*messages[:first], *messages[following:]]
            self.dropped += 1

    def _reserve(self) -> int:
        wanted = self.endings.max_new_tokens
        return min(_ANSWER, self.limits.rows // 4) if wanted is None else wanted

    def _second_exchange(self, messages: list[Message], first: int) -> int | None:
        """Where the second user message is: what lies before it can be dropped."""
        users = [n for n, m in enumerate(messages) if n >= first and m["role"] == "user"]
        return users[1] if len(users) > 1 else None

    def _encode(self, messages: list[Message]) -> list[int]:
        text = self.template.render(messages, self.tokenizer.special_tokens)
        return self.tokenizer.encode(text, special=False)

    def _keep_common(self, prompt: list[int]) -> None:
        """Forget rows of tokens that are not the prompt's; its last token is always run again."""
        same = takewhile(lambda pair: pair[0] == pair[1], zip(self._ids, prompt[:-1], strict=False))
        common = sum(1 for _ in same)
        if self._seq is None:
            self._seq = self._runner.open()
        self._runner.truncate(self._seq, common)
        self._ids = self._ids[:common]


__all__ = ["Chat"]
