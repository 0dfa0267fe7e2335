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
            backend = RustTokenizer.from_file(str(path))
        except Exception as error:  # the binding raises bare Exception
            raise UnsupportedInputError(f"{path}: not a tokenizer file: {error}") from None
        config = Path(folder) / "tokenizer_config.json"
        return Tokenizer(backend, _read_json(config) if config.is_file() else {})

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
        """
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

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        return self.backend.decode(list(ids), skip_special_tokens=True)

    def _id_of(self, key: str) -> int | None:
        entry = self.config.get(key)
        name = entry.get("content") if isinstance(entry, dict) else entry  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        return self.backend.token_to_id(name) if isinstance(name, str) else None


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


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnsupportedInputError(f"{path}: not valid JSON: {error}") from None
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}
