"""Dims: arithmetic, normal form, canonical spelling."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ktgraph.ir import Dim, parse_dim

NAMES = st.sampled_from(["D", "H", "N", "P", "R"])
MONOMIALS = st.lists(NAMES, max_size=3).map(lambda n: tuple(sorted(n)))
DIMS = st.dictionaries(MONOMIALS, st.integers(-4, 9), max_size=5).map(Dim)
SIZES = {"D": 251, "H": 7, "N": 11, "P": 6, "R": 13}


@given(DIMS)
def test_spelling_parses_back_and_is_canonical(dim: Dim):
    assert parse_dim(str(dim)) == dim
    assert str(parse_dim(str(dim))) == str(dim)


@given(DIMS, DIMS)
def test_arithmetic_agrees_with_integers(a: Dim, b: Dim):
    assert (a + b).at(SIZES) == a.at(SIZES) + b.at(SIZES)
    assert (a - b).at(SIZES) == a.at(SIZES) - b.at(SIZES)
    assert (a * b).at(SIZES) == a.at(SIZES) * b.at(SIZES)


@given(DIMS, DIMS)
def test_division_undoes_multiplication(a: Dim, b: Dim):
    quotient = (a * b).divide(b)
    assert quotient == a if b.terms else quotient is None


def test_division_that_leaves_a_rest_is_refused():
    assert parse_dim("H*N+1").divide(Dim.of("H")) is None
    assert parse_dim("3*H").divide(Dim.of(2)) is None


@pytest.mark.parametrize(
    ("text", "spelling"),
    [
        ("H*N + H*P + R + P", "H*(N+P)+P+R"),
        ("(N+V)*H", "H*(N+V)"),
        ("2*F+0", "2*F"),
        ("D-D", "0"),
        ("-H+7", "7-H"),
    ],
)
def test_spellings(text: str, spelling: str):
    assert str(parse_dim(text)) == spelling
