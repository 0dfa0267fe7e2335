"""Every e4m3 code, in every byte of a word, in each form of the packed kernels: exact values."""

import pytest
import torch

from ktgraph.ops import op_def
from ktgraph.triton_kernels.grouped_mlp_packed import decode_down, decode_gate_up
from ktgraph.triton_kernels.linear_packed import linear_packed
from ktgraph.triton_kernels.packed import PackedWeight
from ktgraph.triton_kernels.unpack import unpack
from ktgraph.weights.encodings import Tile, empty_packed
from ktgraph.weights.relayout import RelayoutError, StoredInts, pack_stored
from tests.triton_kernels.close import DTYPES, poisoned

COLS = 140  # two groups, the second one short
TINY = 2.0**-40  # scales of ordinary checkpoints lie far from it
NAN = 0x7F


def codes(count: int) -> torch.Tensor:
    """[count, 256, COLS]: each code in each column of a block; no NaN."""
    row, col = torch.arange(256)[:, None], torch.arange(COLS)
    found = torch.stack([(row + 3 * col + matrix) % 256 for matrix in range(count)])
    return found.where(found & NAN != NAN, 0).to(torch.uint8)


def packed(
    q: torch.Tensor, scale: float, device: torch.device, *, gate_up: bool = False
) -> tuple[PackedWeight, torch.Tensor]:
    """The codes in tiles, with scales of powers of two times 1 to 1.5; and their f32 values."""
    count, rows, cols = q.shape
    packed = empty_packed(q.shape, Tile("fp8", 128, gate_up).encoding)
    values: list[torch.Tensor] = []
    for number, matrix in enumerate(q):
        scales = scale * (1 + torch.rand(rows, 2) / 2)
        stored = StoredInts("fp8", 128, matrix, scales)
        pack_stored(packed, number, stored, count, gate_up)
        values.append(stored.values())
    weight = PackedWeight(packed.to(device), "fp8", rows, cols, count, 128, gate_up)
    return weight, torch.stack(values).to(device)


def one_hot(first: int, tokens: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Row t selects column first + t."""
    x = torch.zeros(tokens, COLS, dtype=dtype, device=device)
    x[torch.arange(tokens), first + torch.arange(tokens)] = 1.0
    return x


def test_254_codes_and_both_zeros_are_there() -> None:
    assert len(codes(1).unique()) == 254
    values = codes(1).view(torch.float8_e4m3fn).float()
    assert values.abs().max() == 448
    assert values.abs()[values != 0].min() == 2.0**-9


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [2.0**-12, TINY])
def test_unpack(scale: float, dtype: torch.dtype, device: torch.device) -> None:
    weight, values = packed(codes(2), scale, device)
    out = poisoned(2, 256, COLS, dtype=dtype, device=device)
    unpack(weight, out)
    assert torch.equal(out, values.to(dtype))
    assert torch.equal(out.signbit(), values.signbit())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("first", "tokens"), [(0, 1), (1, 1), (2, 1), (135, 1), (125, 12)])
def test_linear(first: int, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    """One token, and the matrix units: a sum of one value is that value, rounded once."""
    weight, values = packed(codes(1), 2.0**-4, device)
    y = poisoned(tokens, 256, dtype=dtype, device=device)
    linear_packed(one_hot(first, tokens, dtype, device), weight, out=(y,))
    assert torch.equal(y, values[0, :, first : first + tokens].T.to(dtype))


def test_experts_of_one_token(device: torch.device) -> None:
    """The decode form's two launches, in float32: relu keeps the product of two values."""
    w13, v13 = packed(codes(3), 2.0**-4, device, gate_up=True)
    x = one_hot(7, 1, torch.float32, device)
    ids = torch.tensor([[2, 0]], dtype=torch.int32, device=device)
    hidden = decode_gate_up(x, ids, w13, None, "relu", 1.0, 7.0)
    gate, up = v13[[2, 0], :, 7].chunk(2, dim=-1)
    assert torch.equal(hidden, gate.relu() * up)
    w2, v2 = packed(codes(3), 2.0**-4, device)
    h = one_hot(9, 2, torch.float32, device)
    out = poisoned(1, 256, dtype=torch.float32, device=device)
    decode_down(h, ids, torch.tensor([[1.0, 0.0]], device=device), w2, None, out)
    assert torch.equal(out[0], v2[2, :, 9])


def test_products_with_a_scale_of_any_size(device: torch.device) -> None:
    """Sums are kept divided by 256 and unscaled: neither end of float32's range is near."""
    for scale in (2.0**-100, 2.0**100):
        weight, values = packed(codes(1), scale, device)
        x = torch.randn(1, COLS, device=device)
        y = poisoned(1, 256, dtype=x.dtype, device=device)
        linear_packed(x, weight, out=(y,))
        wanted = op_def("nn.linear").reference(x.double(), values[0].double(), None)
        assert float((y - wanted).square().sum() / wanted.square().sum()) < 1e-12


def test_nan_never_reaches_a_kernel() -> None:
    q = torch.zeros(1, 16, 128, dtype=torch.uint8)
    q[0, 3, 5] = NAN
    with pytest.raises((RelayoutError, ValueError), match="NaN at row 3, column 5"):
        packed(q[:, :, :128].repeat(1, 1, 2)[:, :, :COLS], 1.0, torch.device("cpu"))
