"""From a conversation to the text that a model continues: its own Jinja template, or a plain one.

Templates are rendered by transformers' sandboxed Jinja, so that they see what they see there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ktgraph.errors import UnsupportedInputError
from ktgraph.model_input import ModelCard

Message = Mapping[str, str]  # role (system, user, assistant) and content

_PLAIN = """\
{{ bos_token }}{% for m in messages %}\
{{ m.role | capitalize }}:{{ '' if m.role == 'assistant' else ' ' }}{{ m.content }}
{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"""


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja text, and the texts at which an answer ends besides the model's end tokens."""

    text: str
    stop: tuple[str, ...] = ()
    name: str = "the model's chat template"

    def render(self, messages: Sequence[Message], special_tokens: Mapping[str, str]) -> str:
        """The conversation up to where the next answer begins.

        Raises UnsupportedInputError when the template refuses it or is no Jinja.
        """
        from jinja2 import TemplateError

        utils: Any = import_module("transformers.utils.chat_template_utils")
        names: dict[str, Any] = dict(special_tokens)
        try:
            (text,), _ = utils.render_jinja_template(
                conversations=[[dict(m) for m in messages]],
                chat_template=self.text,
                add_generation_prompt=True,
                **names,
            )
        except (TemplateError, TypeError) as error:
            raise UnsupportedInputError(
                f"{self.name} refuses this conversation: {error}. --template plain is a simple one"
            ) from None
        return text


def chat_template(card: ModelCard, given: str | Path | None = None) -> ChatTemplate:
    """The template to use.

    given: None for the model's own, "plain" for `User: …` and `Assistant: …`, else a Jinja file.
    """
    if given == "plain":
        return ChatTemplate(_PLAIN, ("\nUser:",), "the plain template")
    if given is not None:
        path = Path(given)
        if not path.is_file():
            raise UnsupportedInputError(
                f"template={str(given)!r}: no such file; expected plain, or a Jinja file"
            )
        return ChatTemplate(path.read_text(encoding="utf-8"), name=str(path))
    own = card.need_tokenizer("a chat").chat_template
    if own is None:
        raise UnsupportedInputError(
            f"{card.name} has no chat template (neither in tokenizer_config.json nor in "
            "chat_template.jinja): it may be a base model, which continues text and was not taught "
            'to answer. Use --template plain (in Python chat(template="plain")) for a simple one, '
            "--template FILE for a Jinja file, or `ktgraph run`"
        )
    return ChatTemplate(own)


__all__ = ["ChatTemplate", "Message", "chat_template"]
