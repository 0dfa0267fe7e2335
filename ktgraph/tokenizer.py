"""Text to token ids and back, from a checkpoint folder's tokenizer.json, piece by piece."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer as RustTokenizer

from ktgraph.errors import UnsupportedInputError

_CONTEXT = 6  # tokens of the prompt that decide how the first new token is spelled
_BROKEN = "�"  # what the decoder writes for bytes that are no character (yet)


class Tokenizer:
    """A model's tokenizer; special tokens are added as tokenizer_config.json says."""

    def __init__(self, backend: RustTokenizer, config: dict[str, Any] | None = None) -> None:
        self.backend = backend
        self.config = config or {}
        self.bos_id = self._id_of("bos_token")
        self.eos_id = self._id_of("eos_token")

    @staticmethod
    def from_folder(folder: str | Path) -> Tokenizer | None:
        """The folder's tokenizer, None when it has no tokenizer.json."""
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            return None
        try:
            backend = RustTokenizer.from_buffer(path.read_bytes())  # a path may be no UTF-8
        except Exception as error:  # the binding raises bare Exception
            raise UnsupportedInputError(f"{path}: not a tokenizer file: {error}") from None
        config = _read_json(Path(folder) / "tokenizer_config.json")
        return Tokenizer(backend, {**config, **_template_file(Path(folder))})

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Tokenizer:
        """Reads back what `to_json` gave."""
        return Tokenizer(RustTokenizer.from_str(data["tokenizer"]), data["config"])

    def to_json(self) -> dict[str, Any]:
        """Both files, for a saved plan."""
        return {"tokenizer": self.backend.to_str(), "config": self.config}

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text; `special` adds <s> (and </s>) where the model expects them.

        tokenizer.json's own post-processor decides, as in transformers; where it adds nothing, the
        flags add_bos_token and add_eos_token of tokenizer_config.json do (DeepSeek-V2).
        Raises UnsupportedInputError for bytes that are no UTF-8, as a shell may hand them on.
        """
        if not is_unicode(text):
            raise UnsupportedInputError(f"text {text[:60]!r}: it is not UTF-8; give it in UTF-8")
        ids = list(self.backend.encode(text, add_special_tokens=special).ids)
        if not special:
            return ids
        if self._adds("add_bos_token", self.bos_id) and ids[:1] != [self.bos_id]:
            ids = [cast(int, self.bos_id), *ids]
        if self._adds("add_eos_token", self.eos_id) and ids[-1:] != [self.eos_id]:
            ids = [*ids, cast(int, self.eos_id)]
        return ids

    def _adds(self, flag: str, token: int | None) -> bool:
        return token is not None and bool(self.config.get(flag))

    @property
    def chat_template(self) -> str | None:
        """The model's own Jinja template of a conversation; of several the default one."""
        found = self.config.get("chat_template")
        if isinstance(found, list):
            named = {e["name"]: e["template"] for e in cast("list[dict[str, str]]", found)}
            return named.get("default")
        return found if isinstance(found, str) else None

    @property
    def special_tokens(self) -> dict[str, str]:
        """Texts of bos_token, eos_token and the like, as chat templates name them."""
        names = [k for k in self.config if k.endswith("_token") and not k.startswith("add_")]
        found = {name: self._text_of(name) for name in names}
        return {name: text for name, text in found.items() if text is not None}

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        return self.backend.decode(list(ids), skip_special_tokens=True)

    def _id_of(self, key: str) -> int | None:
        name = self._text_of(key)
        return None if name is None else self.backend.token_to_id(name)

    def _text_of(self, key: str) -> str | None:
        entry = self.config.get(key)
        name = entry.get("content") if isinstance(entry, dict) else entry  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        return name if isinstance(name, str) else None


class TextPieces:
    """Turns a growing list of token ids into pieces of text that never split a character.

    `prompt` only decides how the first new token is spelled (a leading space); it is not given out.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-_CONTEXT:])
        self._given = len(self._ids)  # tokens whose text was given out
        self._before = self._decode()  # their text

    def push(self, token: int) -> str:
        """The text that `token` completes; empty inside a character."""
        self._ids.append(token)
        text = self._decode()
        return "" if text.endswith(_BROKEN) else self._give(text)

    def finish(self) -> str:
        """What is left at the end; bytes that form no character show as U+FFFD."""
        return self._give(self._decode())

    def _give(self, text: str) -> str:
        piece = text[len(self._before) :]
        self._ids = self._ids[self._given :]
        self._given = len(self._ids)
        self._before = self._decode()
        return piece

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids)


def is_unicode(text: str) -> bool:
    """Whether a text has no halves of surrogate pairs, which stand for bytes that are no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _template_file(folder: Path) -> dict[str, Any]:
    """A chat template in a file of its own, which goes before that of tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return {"chat_template": path.read_text(encoding="utf-8")}
    return _read_json(folder / "chat_template.json")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnsupportedInputError(f"{path}: not valid JSON: {error}") from None
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}
