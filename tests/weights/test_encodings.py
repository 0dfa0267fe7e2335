"""Encodings: sizes, round trips, and agreement of plain and tile forms with the specification."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ktgraph.cpu_kernels import reference_layouts
from ktgraph.ir.parser import parse_type
from ktgraph.ir.types import Encoding, TensorType
from ktgraph.weights.encodings import (
    EncodingError,
    Tile,
    all_encodings,
    empty_packed,
    encoding_def,
    from_float,
    nbytes,
    pack_matrix,
    parse_encoding,
    round_trip,
    shape_nbytes,
    to_float,
)

PLAIN = ["f32", "bf16", "f16", "fp8", "int8", "int8(group=32)", "int8(group=128)",
         "int4(group=32)", "int4(group=64)", "int4(group=128)", "int4z(group=32)",
         "int4z(group=128)", "mxfp4"]  # fmt: skip
TILES = ["tile.f32", "tile.bf16", "tile.int8", "tile.int4(group=32)", "tile.int4(group=64)",
         "tile.int8(gate_up=yes)", "tile.int4(group=32, gate_up=yes)", "tile.f16", "tile.fp8",
         "tile.int8(group=64)", "tile.int4z(group=64)", "tile.mxfp4(gate_up=yes)"]  # fmt: skip
# NMSE on normal values; mxfp4 makes 6 of a lone value just under 8
BOUND = {"f32": 0.0, "bf16": 2**-16, "f16": 2**-22, "int8": 1e-4, "int4": 2e-2,
         "int4z": 3e-2, "mxfp4": 2**-4, "fp8": 2e-3}  # fmt: skip

sizes = st.tuples(st.integers(1, 3), st.integers(1, 20).map(lambda n: 2 * n), st.integers(1, 150))


def values(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("text", PLAIN + TILES)
@given(shape=sizes, seed=st.integers(0, 1000))
def test_round_trip(text: str, shape: tuple[int, int, int], seed: int) -> None:
    encoding, x = parse_encoding(text), values(shape, seed)
    stored = from_float(x, encoding)
    assert sum(a.nbytes for a in stored) == shape_nbytes(shape, encoding)
    back = to_float(stored, shape, encoding)
    assert back.shape == x.shape
    error = float((back - x).square().sum() / x.square().sum())
    assert error <= BOUND[encoding.name.removeprefix("tile.")]


@pytest.mark.parametrize("text", PLAIN)
def test_zeros_and_single_columns_survive(text: str) -> None:
    encoding = parse_encoding(text)
    assert torch.equal(round_trip(torch.zeros(3, 40), encoding), torch.zeros(3, 40))
    one = torch.tensor([[1.0], [-2.0], [0.0]])
    assert torch.allclose(round_trip(one, encoding), one, rtol=1e-2)


@pytest.mark.parametrize(
    "text",
    ["int8", "int8(group=32)", "int4(group=32)", "int4(group=64)", "int4z(group=64)", "mxfp4",
     "fp8", "bf16", "f16", "f32"],
)  # fmt: skip
def test_tiles_hold_the_numbers_of_the_plain_form(text: str) -> None:
    x = values((2, 40, 70))
    plain, tiled = parse_encoding(text), parse_encoding(f"tile.{text}")
    assert torch.equal(round_trip(x, plain), round_trip(x, tiled))


@pytest.mark.parametrize("text", TILES)
def test_tiles_are_those_of_the_specification(text: str) -> None:
    encoding, x = parse_encoding(text), values((40, 70))
    tile = Tile.of(encoding)
    assert tile is not None
    want = reference_layouts.from_float(tile.format, x.numpy(), tile.group, tile.gate_up)
    assert np.array_equal(from_float(x, encoding)[0].numpy(), want)
    assert tile.encoding == encoding


def test_int4_keeps_two_columns_a_byte() -> None:
    x = torch.tensor([[-8.0, 7.0, 1.0]])
    packed, scales = from_float(x, parse_encoding("int4"))
    assert packed.tolist() == [[0xF0, 0x89]]
    assert scales.tolist() == [[1.0]]
    assert scales.dtype == torch.bfloat16


def test_float64_values_keep_their_dtype() -> None:
    x = values((4, 32)).double()
    assert round_trip(x, parse_encoding("int8")).dtype == torch.float64


def test_a_stack_is_packed_matrix_by_matrix() -> None:
    encoding, x = parse_encoding("tile.int4"), values((3, 20, 40))
    packed = empty_packed(x.shape, encoding)
    for number in (2, 0, 1):
        pack_matrix(packed, number, x[number].to(torch.bfloat16), x.shape, encoding)
    assert torch.equal(packed, from_float(x.to(torch.bfloat16).float(), encoding)[0])


def test_nbytes_of_a_type_follows_its_encoding() -> None:
    dims = {"D": 64, "F": 20}
    for text, size in [("f32[F, D]", 5120), ("f32[F, D]<bf16>", 2560), ("f32[F, D]<int8>", 1360),
                       ("f32[F, D]<int4(group=32)>", 720), ("i32[D]", 256)]:  # fmt: skip
        found = parse_type(text)
        assert isinstance(found, TensorType)
        assert nbytes(found, dims) == size


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int5", "unknown encoding int5 .did you mean int8, int4"),
        ("int4(group=48)", "group must be one of 32, 64, 128"),
        ("int8(group=48)", "group must be one of 0, 32, 64, 128"),
        ("bf16(group=32)", "unknown parameter group .known: none"),
    ],
)
def test_wrong_encodings_are_explained(text: str, message: str) -> None:
    with pytest.raises(EncodingError, match=message):
        parse_encoding(text)


def test_values_and_shapes_that_do_not_fit() -> None:
    with pytest.raises(EncodingError, match="inf or NaN"):
        from_float(torch.tensor([[1.0, float("nan")]]), parse_encoding("int8"))
    with pytest.raises(EncodingError, match="rows and columns"):
        from_float(torch.zeros(3), parse_encoding("int8"))
    with pytest.raises(EncodingError, match="gate and up rows"):
        from_float(torch.zeros(3, 8), parse_encoding("tile.bf16(gate_up=yes)"))


def test_every_encoding_is_documented() -> None:
    for name, definition in all_encodings().items():
        assert definition.doc
        assert encoding_def(Encoding(name)) is definition
