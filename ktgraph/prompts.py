"""Prompts in every form that `Compiled.generate` takes, and results in the form they came in."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from ktgraph.errors import UnsupportedInputError
from ktgraph.generate import Event
from ktgraph.model_input import ModelCard


@dataclass(frozen=True)
class Prompts:
    """Prompts as token ids, and how they were given, which is how results are given back."""

    ids: list[list[int]]
    is_text: bool
    is_single: bool


def read_prompts(given: Any, card: ModelCard) -> Prompts:
    """Prompts as `Compiled.generate` takes them; raises UnsupportedInputError."""
    plain = cast("Any", given.tolist()) if isinstance(given, Tensor) else given  # pyright: ignore[reportUnknownMemberType]
    if isinstance(plain, str):
        return Prompts([_encode(plain, card)], is_text=True, is_single=True)
    if not isinstance(plain, Sequence) or not plain:
        raise _wrong_prompt(given)
    items = cast("Sequence[Any]", plain)
    if all(isinstance(p, str) for p in items):
        return Prompts([_encode(p, card) for p in items], is_text=True, is_single=False)
    if all(isinstance(p, int) for p in items):
        return Prompts([list(items)], is_text=False, is_single=True)
    if all(isinstance(p, Sequence) and not isinstance(p, str) for p in items):
        return Prompts([list(p) for p in items], is_text=False, is_single=False)
    raise _wrong_prompt(given)


def _encode(text: str, card: ModelCard) -> list[int]:
    return card.need_tokenizer("a text prompt").encode(text)


def _wrong_prompt(given: object) -> UnsupportedInputError:
    return UnsupportedInputError(
        f"prompt of type {type(given).__name__}: expected a text, a list of texts, token ids, or a "
        "list of token id lists"
    )


def pieces(events: Generator[Event], prompts: Prompts) -> Iterator[Any]:
    """What a streamed `generate` yields: pieces, with several prompts (index, piece)."""
    with closing(events):
        for event in events:
            piece = event.piece if prompts.is_text else event.token
            if piece is not None and piece != "":
                yield piece if prompts.is_single else (event.index, piece)


__all__ = ["Prompts", "pieces", "read_prompts"]
