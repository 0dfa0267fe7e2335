"""Elementwise kernels against torch: bit for bit where torch rounds once or twice."""

import pytest
import torch

from ktgraph.ops import op_def
from ktgraph.triton_kernels import elementwise as _file  # noqa: F401  (registers)
from ktgraph.triton_kernels.activations import ACTIVATIONS
from ktgraph.triton_kernels.registry import launcher
from tests.triton_kernels.close import DTYPES, check, poisoned, strided

SHAPES = [(1, 33), (7, 256), (3, 1500), (150, 24), (5, 3, 17), (65, 1)]


def _run(op: str, kernel: str, *operands: torch.Tensor, **attrs: object) -> None:
    """The same bits as the reference."""
    wanted = op_def(op).reference(*(x.cpu() for x in operands), **attrs)
    out = poisoned(*wanted.shape, dtype=wanted.dtype, device=operands[0].device)
    launcher(op, kernel)(*operands, out=(out,), **attrs)
    assert torch.equal(out.cpu(), wanted)


def _random(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return (2 * torch.randn(shape)).to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_add_mul_add3_scale(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    x, y, z = (_random(*shape, dtype=dtype, device=device) for _ in range(3))
    _run("tensor.add", "triton.add", x, y)
    _run("tensor.mul", "triton.mul", strided(x), y)
    _run("tensor.add3", "triton.add3", x, strided(y), z)
    _run("tensor.scale", "triton.scale", x, by=0.3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shapes",
    [
        ((7, 40), (7, 1)),
        ((7, 1), (7, 40)),
        ((7, 40), (40,)),
        ((5, 3, 16), (5, 1, 16)),
        ((4, 9), (1,)),
    ],
)
def test_broadcasting(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> None:
    x, y = (_random(*shape, dtype=dtype, device=device) for shape in shapes)
    _run("tensor.add", "triton.add", x, y)
    _run("tensor.mul", "triton.mul", x, y)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations(act: str, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.cat(
        [_random(1200, dtype=dtype, device=device), torch.tensor([0.0, -60, 60]).to(device, dtype)]
    )
    out = poisoned(*x.shape, dtype=dtype, device=device)
    launcher("nn.act", "triton.act")(x, out=(out,), act=act)
    check(out, op_def("nn.act").reference(x.cpu(), act=act), 1e-6)


def test_unknown_activation(device: torch.device) -> None:
    x = torch.ones(4, device=device)
    with pytest.raises(ValueError, match="swish"):
        launcher("nn.act", "triton.act")(x, out=(x.clone(),), act="swish")


@pytest.mark.parametrize("given", [*DTYPES, torch.int32])
@pytest.mark.parametrize("wanted", ["bf16", "f16", "f32", "i32", "i64"])
def test_cast(given: torch.dtype, wanted: str, device: torch.device) -> None:
    x = (100 * torch.randn(9, 130)).to(device, given)
    _run("tensor.cast", "triton.copy", strided(x.float()).to(given), dtype=wanted)


def test_cast_edges(device: torch.device) -> None:
    """Ties go to even; what is too large for the dtype becomes infinite."""
    x = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, -0.0, 1e-30, float("inf")], device=device)
    _run("tensor.cast", "triton.copy", x, dtype="bf16")
    _run("tensor.cast", "triton.copy", x, dtype="f16")


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int32])
def test_reshape_copies_views(dtype: torch.dtype, device: torch.device) -> None:
    x = (50 * torch.randn(5, 6, 40)).to(device, dtype)
    _run("tensor.reshape", "triton.copy", x.transpose(0, 1), shape=[30, 40])
    _run("tensor.reshape", "triton.copy", x[..., 8:24], shape=[5, 96])
    _run("tensor.reshape", "triton.copy", x.permute(2, 0, 1), shape=[1200])


def test_four_strides_are_refused(device: torch.device) -> None:
    x = torch.randn(3, 4, 5, 6, device=device).permute(3, 2, 1, 0)
    with pytest.raises(ValueError, match="strides"):
        launcher("tensor.reshape", "triton.copy")(x, out=(x.new_empty(360),), shape=[360])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int32])
@pytest.mark.parametrize("widths", [(33,), (16, 8), (512, 64), (3, 5, 7), (1100, 1, 2, 9)])
@pytest.mark.parametrize("rows", [(1,), (7,), (150,), (5, 3)])
def test_concat(
    rows: tuple[int, ...], widths: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    pieces = [(50 * torch.randn(*rows, w)).to(device, dtype) for w in widths]
    if dtype.is_floating_point:
        pieces[0] = strided(pieces[0])
    _run("tensor.concat", "triton.concat", *pieces, axis=-1)


def test_nothing_to_do(device: torch.device) -> None:
    x = torch.empty(0, 4, device=device)
    launcher("tensor.add", "triton.add")(x, x, out=(x.clone(),))
    launcher("tensor.concat", "triton.concat")(x, x, out=(x.new_empty(0, 8),), axis=-1)
