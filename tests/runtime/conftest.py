"""Runners over small models, made once a session."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
from lowered_models import MIXED, NATIVE, Pair, make_pair

CASES = {
    "mla": ("mla", NATIVE),
    "gqa": ("gqa", NATIVE),
    "mla-mixed": ("mla", MIXED),
    "gqa-mixed": ("gqa", MIXED),
}


@functools.cache
def _pair(name: str) -> Pair:
    model, pipeline = CASES[name]
    return make_pair(model, pipeline, threads=2 if pipeline == NATIVE else 1)


def _emptied(found: Pair) -> Iterator[Pair]:
    yield found
    for seq in list(found.runner.sequences):
        found.close(seq)
    assert found.runner.sequences.pool.free == found.runner.shape.pages


@pytest.fixture(params=CASES)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Each model, all native and with fallbacks in between; sequences are closed at the end."""
    yield from _emptied(_pair(request.param))


@pytest.fixture
def mla() -> Iterator[Pair]:
    """The latent attention model, all native."""
    yield from _emptied(_pair("mla"))


@pytest.fixture(scope="session", autouse=True)
def forget_pairs() -> Iterator[Callable[[], None]]:
    yield _pair.cache_clear
    _pair.cache_clear()  # engines end before the interpreter does
