"""Sizes of packed weights against the native packer; unpacking on the GPU, bit by bit."""

import pytest
import torch
from tile_weights import FORMATS, packed

from ktgraph.cpu_kernels import packed_nbytes
from ktgraph.triton_kernels.packed import PackedWeight
from ktgraph.triton_kernels.unpack import UnpackConfig, unpack

SMALL = UnpackConfig(kb=16, warps=4)


@pytest.mark.parametrize(("format", "group"), FORMATS)
@pytest.mark.parametrize("gate_up", [False, True])
def test_sizes_are_those_of_the_packer(format: str, group: int, gate_up: bool) -> None:
    for rows, cols, count in ((2, 1, 1), (66, 130, 3), (128, 2048, 2)):
        nbytes = packed_nbytes(format, rows, cols, group, count, gate_up)
        data = torch.empty(nbytes, dtype=torch.uint8)
        weight = PackedWeight(data, format, rows, cols, count, group, gate_up)
        assert weight.stride * count == nbytes
        assert weight.scales_at == weight.tiles * weight.blocks * 64
        with pytest.raises(ValueError, match="takes uint8"):
            PackedWeight(data[1:], format, rows, cols, count, group, gate_up)


@pytest.mark.parametrize(("format", "group"), FORMATS)
@pytest.mark.parametrize("gate_up", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_unpack(
    format: str, group: int, gate_up: bool, dtype: torch.dtype, device: torch.device
) -> None:
    source = torch.randn(3, 42, 203) * torch.logspace(-1, 1, 203)
    weight, values = packed(source, format, group, device, gate_up=gate_up)
    out = torch.full((2, 42, 203), float("nan"), dtype=dtype, device=device)
    unpack(weight, out, 1, SMALL)
    assert torch.equal(out, values[1:].to(dtype))


def test_unpack_into_strided_rows(device: torch.device) -> None:
    weight, values = packed(torch.randn(2, 32, 64), "int4", 32, device)
    wide = torch.full((2, 33, 80), 7.0, device=device)
    unpack(weight, wide[:, :32, 8:72])
    assert torch.equal(wide[:, :32, 8:72], values)
    wide[:, :32, 8:72] = 7.0
    assert torch.equal(wide, torch.full_like(wide, 7.0))
