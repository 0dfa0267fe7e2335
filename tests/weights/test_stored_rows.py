"""Rows of quantized weights as bytes: nothing is lost, and any choice of rows means the same."""

from __future__ import annotations

import pytest
import torch

from ktgraph.ir.parser import parse_module
from ktgraph.weights.encodings import (
    EncodingError,
    empty_packed,
    parse_encoding,
    round_trip,
    to_float,
)
from ktgraph.weights.sources import EncodedSource, RandomSource
from ktgraph.weights.stored_rows import (
    from_rows,
    pack_rows,
    quantized,
    row_values,
    stored_row_nbytes,
    to_rows,
)

INTS = [
    "int8",
    "int8(group=64)",
    "int4(group=32)",
    "int4z(group=128)",
    "mxfp4(group=32)",
    "fp8(group=128)",
]
BLOCKS = ["gguf.q4_0", "gguf.q8_0", "gguf.q4_k", "gguf.q5_k", "gguf.q6_k", "gguf.iq4_xs"]


@pytest.mark.parametrize("text", INTS)
@pytest.mark.parametrize("columns", [100, 256])
def test_rows_hold_integers_and_scales(text: str, columns: int) -> None:
    encoding, matrix = parse_encoding(text), torch.randn(7, columns)
    ints = quantized(matrix, encoding)
    rows = to_rows(ints)
    assert rows.shape == (7, stored_row_nbytes(encoding, columns))
    back = from_rows(rows, encoding, columns)
    assert torch.equal(back.q, ints.q)
    assert torch.equal(back.scales, ints.scales)
    assert (back.zeros is None) == (ints.zeros is None)
    want = round_trip(matrix, encoding)
    assert torch.equal(row_values(rows, encoding, columns), want)
    other = rows[[3, 0, 5]]  # any choice of rows
    assert torch.equal(row_values(other, encoding, columns), want[[3, 0, 5]])


@pytest.mark.parametrize("text", INTS)
def test_packing_takes_the_very_integers(text: str) -> None:
    encoding = parse_encoding(text)
    tile = parse_encoding(f"tile.{text}")
    matrices = torch.randn(2, 20, 128)
    packed = empty_packed([2, 20, 128], tile)
    for number, matrix in enumerate(matrices):
        rows = to_rows(quantized(matrix, encoding))
        pack_rows(packed, number, rows, [2, 20, 128], encoding, tile)
    got = to_float((packed,), [2, 20, 128], tile)
    assert torch.equal(got, round_trip(matrices, encoding))


def test_packing_into_another_format_is_refused() -> None:
    encoding, tile = parse_encoding("int4(group=32)"), parse_encoding("tile.int4(group=64)")
    rows = to_rows(quantized(torch.randn(16, 64), encoding))
    with pytest.raises(EncodingError, match="does not hold the integers of int4"):
        pack_rows(empty_packed([16, 64], tile), 0, rows, [16, 64], encoding, tile)


@pytest.mark.parametrize("text", [*INTS, *BLOCKS])
def test_random_weights_in_an_encoding(text: str) -> None:
    """Miniatures and synthetic benchmarks see one set of values, packed or not."""
    module = parse_module(
        "ktgraph.ir 1\nmodule @m\ndim D = 256, E = 3\n"
        f'weight @w : f32[E, 8, D]<{text}> from "w"\nweight @q : f32[8, D]<{text}> from "q"\n'
    )
    source, encoding = RandomSource(module), parse_encoding(text)
    assert isinstance(source, EncodedSource)
    for name in ("w", "q"):
        assert str(source.encoding(name)) == str(module.weights[name].type.encoding)
    whole, rows = source.get("w"), source.rows("w")
    for expert in range(3):
        assert torch.equal(source.get("w", expert), whole[expert])
        assert torch.equal(source.rows("w", expert), rows[expert])
        assert torch.equal(row_values(rows[expert], encoding, 256), whole[expert])
    assert 0.3 < float(whole.std()) * 16 < 3
    assert torch.equal(row_values(source.rows("q"), encoding, 256), source.get("q"))
