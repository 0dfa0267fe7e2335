"""Packed linear and gated MLP against the op references on the values of the packed bytes."""

from dataclasses import replace

import pytest
import torch
from tile_weights import FORMATS, packed

from ktgraph.ops import op_def
from ktgraph.triton_kernels.linear_packed import (
    Config,
    linear_packed,
    product_of_tiles,
    swiglu_packed,
)
from ktgraph.triton_kernels.packed_forms import MOST_DIRECT
from ktgraph.triton_kernels.packed_row import RowConfig
from ktgraph.triton_kernels.packed_rows import RowsConfig
from ktgraph.triton_kernels.packed_tokens import TokenConfig
from ktgraph.triton_kernels.tile_bytes import in_quads
from ktgraph.triton_kernels.tile_mma import in_octets
from tests.triton_kernels.close import DTYPES, check, poisoned, strided

BOUND = 1e-5  # bf16 results: 2^-9 relative each
BYTES = 5e-5  # of x: E(largest of 16 normal numbers ^ 2) / (12 * 127^2) = 2.5e-5, and its scatter


def reference(name: str, *operands: torch.Tensor | None, **attrs: object) -> torch.Tensor:
    return op_def(name).reference(*operands, **attrs)


@pytest.mark.parametrize(("format", "group"), FORMATS)
@pytest.mark.parametrize(("rows", "cols"), [(33, 203), (64, 1024), (80, 64)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_of_one_token(
    format: str, group: int, rows: int, cols: int, dtype: torch.dtype, device: torch.device
) -> None:
    exact, values = packed(torch.randn(rows, cols) / cols**0.5, format, group, device)
    x = torch.randn(1, cols, device=device).to(dtype)
    b = torch.randn(rows, device=device).to(dtype)
    for row_form, bias in (("f32", None), ("f32", b), ("int8", b)):
        w = replace(exact, row_form=row_form)
        y = poisoned(1, rows, dtype=dtype, device=device)
        linear_packed(x, w, bias, out=(y,))
        wanted = reference("nn.linear", x.float(), values, bias).to(dtype)
        check(y, wanted, BYTES if w.rounds(dtype) else BOUND)


@pytest.mark.parametrize("format", ["int4", "int4p"])
@pytest.mark.parametrize("cols", [32, 204, 1024])
def test_bytes_of_a_row_that_is_aligned_and_of_one_that_is_not(
    format: str, cols: int, device: torch.device
) -> None:
    """64-bit words of x, and single columns: the same bytes."""
    w, _ = packed(torch.randn(40, cols), format, 32, device, row_form="int8")
    row = torch.randn(1, cols + 1, device=device).bfloat16()
    aligned, shifted = row[:, 1:].clone(), row[:, 1:]
    assert in_quads(aligned)
    assert not in_quads(shifted)
    y, again = (poisoned(1, 40, dtype=row.dtype, device=device) for _ in range(2))
    linear_packed(aligned, w, out=(y,))
    linear_packed(shifted, w, out=(again,))
    assert torch.equal(y, again)


def test_bytes_of_columns_share_a_scale_by_16(device: torch.device) -> None:
    """A column of 1e4 spoils its 16, no others."""
    w, values = packed(torch.randn(32, 64), "int4", 32, device, row_form="int8")
    x = torch.randn(1, 64, device=device).bfloat16()
    x[0, 20] = 1e4
    y = poisoned(1, 32, dtype=x.dtype, device=device)
    linear_packed(x, w, out=(y,))
    rounded = x.float()
    rounded[0, 16:32] = (rounded[0, 16:32] / (1e4 / 127)).round() * (1e4 / 127)
    assert rounded[0, 16:32].count_nonzero() == 1
    check(y, reference("nn.linear", rounded, values).to(x.dtype), 1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bytes_keep_what_is_not_finite(bad: float, device: torch.device) -> None:
    w, _ = packed(torch.randn(32, 64), "int4", 32, device, row_form="int8")
    x = torch.randn(1, 64, device=device).bfloat16()
    x[0, 33] = bad
    y = torch.zeros(1, 32, device=device).bfloat16()
    linear_packed(x, w, out=(y,))
    assert not y.isfinite().any()


@pytest.mark.parametrize(("format", "group"), FORMATS)
@pytest.mark.parametrize("tokens", [2, 7, 17, 32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_of_few_tokens(
    format: str, group: int, tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    rows, cols = (45, 203) if tokens != 7 else (64, 512)
    w, values = packed(torch.randn(rows, cols) / cols**0.5, format, group, device)
    x = strided(torch.randn(tokens, cols, device=device).to(dtype))
    bias = torch.randn(rows, device=device).to(dtype) if tokens % 2 else None
    y = strided(poisoned(tokens, rows, dtype=dtype, device=device))
    linear_packed(x, w, bias, out=(y,))
    wanted = reference("nn.linear", x.float(), values, None if bias is None else bias.float())
    check(y, wanted.to(dtype), BOUND)


@pytest.mark.parametrize(("tokens", "config"), [
    (3, TokenConfig(2, 2, 1, splits=2)), (9, TokenConfig(4, 2, 2)),
    (2, TokenConfig(2, 1, 4, splits=3)), (18, TokenConfig(2, 2, 8)),
])  # fmt: skip
@pytest.mark.parametrize(("format", "group", "rows", "cols"), [
    ("int8", 0, 32, 256), ("int4", 64, 40, 300), ("int4", 128, 32, 256), ("int4p", 32, 40, 140),
    ("fp8", 128, 40, 140),
])  # fmt: skip
def test_token_configs(
    format: str,
    group: int,
    rows: int,
    cols: int,
    tokens: int,
    config: TokenConfig,
    device: torch.device,
) -> None:
    """Teams of warps, shares and splits of columns; columns that are whole steps, and others."""
    w, values = packed(torch.randn(rows, cols) / cols**0.5, format, group, device)
    x = torch.randn(tokens, cols, device=device).bfloat16()
    y = poisoned(tokens, rows, dtype=x.dtype, device=device)
    product_of_tiles(x, w, None, y, act=None, config=config)
    check(y, reference("nn.linear", x.float(), values).to(x.dtype), BOUND)


@pytest.mark.parametrize("cols", [256, 200, 204])
def test_rows_that_are_aligned_to_16_bytes_and_others(cols: int, device: torch.device) -> None:
    w, _ = packed(torch.randn(40, cols), "int4", 32, device)
    wide = torch.randn(5, cols + 8, device=device).bfloat16()
    aligned, shifted = wide[:, 1 : cols + 1].clone(), wide[:, 1 : cols + 1]
    assert in_octets(aligned) == (cols % 8 == 0)
    assert not in_octets(shifted)
    y, again = (poisoned(5, 40, dtype=wide.dtype, device=device) for _ in range(2))
    linear_packed(aligned, w, out=(y,))
    linear_packed(shifted, w, out=(again,))
    assert torch.equal(y, again)


@pytest.mark.parametrize("format", ["int4", "int4p", "fp8"])
def test_half_a_group_at_the_end(format: str, device: torch.device) -> None:
    """Columns are padded to 64, groups have 128: the last scale is there for one half."""
    w, values = packed(torch.randn(40, 576) / 576**0.5, format, 128, device)
    x = torch.randn(3, 576, device=device).bfloat16()
    y = poisoned(3, 40, dtype=x.dtype, device=device)
    linear_packed(x, w, out=(y,))
    check(y, reference("nn.linear", x.float(), values).to(x.dtype), BOUND)


@pytest.mark.parametrize("cols", [200, 504])  # padded to 512 they are whole steps
def test_rows_behind_the_last_one_are_not_read(cols: int, device: torch.device) -> None:
    """Nor are columns: NaN there would reach every sum of a row of x."""
    w, values = packed(torch.randn(33, cols), "int8", 0, device)
    wide = torch.full((8, 576), float("nan"), device=device).bfloat16()
    wide[:3, :cols] = torch.randn(3, cols, device=device)
    y = poisoned(3, 33, dtype=wide.dtype, device=device)
    linear_packed(wide[:3, :cols], w, out=(y,))
    check(y, reference("nn.linear", wide[:3, :cols].float(), values).to(y.dtype), BOUND)


def test_no_tokens(device: torch.device) -> None:
    w, _ = packed(torch.randn(32, 64), "int4", 32, device)
    x, y = (torch.empty(0, n, device=device).bfloat16() for n in (64, 32))
    linear_packed(x, w, out=(y,))


@pytest.mark.parametrize(("format", "group"), FORMATS)
@pytest.mark.parametrize("bias", [False, True])
def test_linear_of_many_tokens(format: str, group: int, bias: bool, device: torch.device) -> None:
    tokens = MOST_DIRECT + 33
    w, values = packed(torch.randn(45, 203), format, group, device)
    x = torch.randn(tokens, 203, device=device)
    b = torch.randn(45, device=device) if bias else None
    y = poisoned(tokens, 45, dtype=x.dtype, device=device)
    linear_packed(x, w, b, out=(y,))
    check(y, reference("nn.linear", x, values, b), BOUND)


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_rows_of_gate_and_up_tiles_are_put_in_order(tokens: int, device: torch.device) -> None:
    w, values = packed(torch.randn(42, 100), "int4", 32, device, gate_up=True)
    x = torch.randn(tokens, 100, device=device)
    y = poisoned(tokens, 42, dtype=x.dtype, device=device)
    linear_packed(x, w, out=(y,))
    check(y, reference("nn.linear", x, values), BOUND)


@pytest.mark.parametrize(("tokens", "config"), [
    (1, RowConfig(4, 32, 2, 1)), (1, RowConfig(8, 128, 8, 3)),
    (1, RowConfig(1, 16, 2, 1, ahead=True)), (1, RowConfig(2, 64, 4, 1, ahead=True)),
    (3, RowsConfig(1, 16, 2, 2)), (3, RowsConfig(2, 16, 2, 3)),
])  # fmt: skip
@pytest.mark.parametrize(("format", "group"), [("int8", 0), ("int4", 64), ("int4p", 64)])
def test_configs(
    format: str, group: int, tokens: int, config: Config, device: torch.device
) -> None:
    w, values = packed(torch.randn(77, 530), format, group, device, row_form="int8")
    for dtype in (torch.float32, torch.bfloat16) if tokens == 1 else (torch.float32,):
        x = torch.randn(tokens, 530, device=device).to(dtype)
        y = poisoned(tokens, 77, dtype=dtype, device=device)
        product_of_tiles(x, w, None, y, act=None, config=config)
        wanted = reference("nn.linear", x.float(), values).to(dtype)
        check(y, wanted, BYTES if w.rounds(dtype) else BOUND)


ACTIVATIONS = ["silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid"]


@pytest.mark.parametrize(("act", "tokens", "gate_up"), [
    *((act, 1, True) for act in ACTIVATIONS),
    *((act, 7, True) for act in ACTIVATIONS),
    *(("silu", tokens, False) for tokens in (1, 7, 35)), ("relu2", 35, True),
])  # fmt: skip
def test_swiglu(act: str, tokens: int, gate_up: bool, device: torch.device) -> None:
    width, depth = 42, 96
    exact, v13 = packed(torch.randn(2 * width, depth) / 9, "int4", 32, device, gate_up=gate_up)
    w2, v2 = packed(torch.randn(depth, width) / 6, "int8", 0, device)
    forms = [(torch.float32, "f32"), (torch.bfloat16, "f32"), (torch.bfloat16, "int8")]
    for dtype, row_form in forms if tokens == 1 and gate_up else forms[:2]:
        w13 = replace(exact, row_form=row_form)
        x = torch.randn(tokens, depth, device=device).to(dtype)
        y = poisoned(tokens, depth, dtype=dtype, device=device)
        swiglu_packed(x, w13, w2, out=(y,), act=act)
        rounds = w13.rounds(dtype) and tokens == 1
        check(y, reference("nn.swiglu", x, v13, v2, act=act), 5e-4 if rounds else 1e-4)
