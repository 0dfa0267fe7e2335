"""Packed bytes: the C++ packer against the numpy specification, and golden bytes."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from ktgraph.cpu_kernels import reference_layouts as ref

FORMATS = [
    ("f32", 0), ("bf16", 0), ("int8", 0), ("int4", 32), ("int4", 64), ("int4", 128),
    ("int4p", 32), ("int4p", 64), ("int4p", 128), ("f16", 0), ("fp8", 128), ("int8", 32),
    ("int8", 64), ("int8", 128), ("int4z", 32), ("int4z", 64), ("int4z", 128), ("mxfp4", 32),
]  # fmt: skip
GOLDEN = Path(__file__).with_name("golden_layouts.json")


def pack(native, fmt, w, group=0, gate_up=False, isa=""):
    data = np.full(native.packed_nbytes(fmt, *w.shape, group, 1, gate_up), 0xEE, np.uint8)
    native.pack_into(data.ctypes.data, 0, fmt, *w.shape, group, 1, gate_up, w, isa)
    return data


@pytest.mark.parametrize(("fmt", "group"), FORMATS)
@pytest.mark.parametrize(
    ("rows", "cols", "gate_up"), [(1, 1, False), (16, 64, False), (40, 250, False), (30, 48, True)]
)
def test_bytes_equal_the_specification(tools, isa, fmt, group, rows, cols, gate_up):
    rng = np.random.default_rng(rows * cols)
    w = rng.standard_normal((rows, cols)).astype(np.float32) * np.exp(
        rng.standard_normal((rows, 1))
    ).astype(np.float32)
    w[rows // 2] = 0
    got = pack(tools.native, fmt, w, group, gate_up, isa)
    want = ref.from_float(fmt, w, group, gate_up)
    np.testing.assert_array_equal(got, want)
    back = tools.native.unpack(got.ctypes.data, 0, fmt, rows, cols, group, 1, gate_up)
    np.testing.assert_array_equal(back, ref.to_float(fmt, got, rows, cols, group, gate_up))


@pytest.mark.parametrize(("fmt", "group"), FORMATS)
def test_odd_values_equal_the_specification(tools, isa, fmt, group):
    tiny, huge = 1e-41, 3e38
    w = np.zeros((17, 130), np.float32)
    w[0], w[1], w[2], w[3, 5], w[4, 129] = tiny, huge, -huge, 1.0, -1.0
    w[5], w[6], w[7, :2] = np.tile([1, -1], 65), np.arange(130), (7.5, -7.5)  # ties
    if fmt == "f16":
        w = w.clip(-65504, 65504)
    with np.errstate(all="ignore"):
        want = ref.from_float(fmt, w, group)
    np.testing.assert_array_equal(pack(tools.native, fmt, w, group, isa=isa), want)


def golden_matrix():
    return np.stack([np.arange(9), np.arange(9) - 8]).astype(np.float32)


@pytest.mark.parametrize(
    ("fmt", "group"),
    [
        ("f32", 0), ("bf16", 0), ("f16", 0), ("fp8", 128), ("int8", 0), ("int8", 32), ("int4", 32),
        ("int4p", 32), ("int4z", 32), ("mxfp4", 32),
    ],
)  # fmt: skip
def test_golden_bytes(tools, fmt, group):
    every = json.loads(GOLDEN.read_text())
    golden = every["int8(group=32)" if (fmt, group) == ("int8", 32) else fmt]
    assert ref.from_float(fmt, golden_matrix(), group).tobytes().hex() == golden
    assert pack(tools.native, fmt, golden_matrix(), group).tobytes().hex() == golden


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sources(tools, dtype):
    """numpy, torch and raw pointers give the same bytes; a row stride is honoured."""
    wide = torch.randn(20, 70, generator=torch.Generator().manual_seed(0)).to(dtype)
    w = wide[:, 3:51]
    want = ref.from_float("int4", w.float().numpy(), 32)
    name = "f32" if dtype == torch.float32 else "bf16"
    pointer = tools.native.Tensor(w.data_ptr(), name, [20, 48], [70, 1])
    for source in (w, w.contiguous(), pointer):
        data = np.zeros(len(want), np.uint8)
        tools.native.pack_into(data.ctypes.data, 0, "int4", 20, 48, 32, 1, False, source)
        np.testing.assert_array_equal(data, want)


def test_quantize_error(tools):
    w = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).numpy()
    for fmt, group, limit in [("int8", 0, 0.01), ("int4", 32, 0.09), ("int4", 128, 0.12)]:
        q, s = tools.native.quantize(fmt, group, w)
        back = q.astype(np.float32) * (np.repeat(s, group, axis=1) if group else s)
        assert np.linalg.norm(back - w) / np.linalg.norm(w) < limit


def test_stack_and_padding(tools):
    native = tools.native
    w = np.random.default_rng(0).standard_normal((3, 24, 40)).astype(np.float32)
    n = native.packed_nbytes("int8", 24, 40, 0, 3)
    data = np.zeros(n, np.uint8)
    for i in range(3):
        native.pack_into(data.ctypes.data, i, "int8", 24, 40, 0, 3, False, w[i])
    np.testing.assert_array_equal(data, np.concatenate([ref.from_float("int8", m) for m in w]))
    assert native.packed_nbytes("f32", 16, 64) == 4096 + 64  # not a multiple of 4 KiB


def test_errors(tools):
    native, w = tools.native, np.zeros((16, 32), np.float32)
    dst = np.zeros(8192, np.uint8).ctypes.data
    with pytest.raises(ValueError, match="unknown format"):
        native.packed_nbytes("int3", 16, 32)
    with pytest.raises(ValueError, match="group 32, 64 or 128"):
        native.packed_nbytes("int4", 16, 32, 48)
    with pytest.raises(ValueError, match=r"source is \[16, 32\], the weight \[16, 33\]"):
        native.pack_into(dst, 0, "int8", 16, 33, 0, 1, False, w)
    with pytest.raises(ValueError, match="index 2"):
        native.pack_into(dst, 2, "int8", 16, 32, 0, 1, False, w)
    with pytest.raises(ValueError, match="mxfp4 needs group 32"):
        native.packed_nbytes("mxfp4", 16, 32, 64)
    with pytest.raises(ValueError, match="fp8 needs group 128"):
        native.packed_nbytes("fp8", 16, 32)
    with pytest.raises(ValueError, match="have no groups"):
        native.packed_nbytes("f16", 16, 32, 32)
    w[2, 1] = 65520.0
    with pytest.raises(ValueError, match="row 2 holds inf or NaN, or more than f16's 65504"):
        native.pack_into(dst, 0, "f16", 16, 32, 0, 1, False, w)
    w[3, 4] = np.inf
    with pytest.raises(ValueError, match="row 3 holds inf or NaN"):
        native.pack_into(dst, 0, "int8", 16, 32, 0, 1, False, w)
    with pytest.raises(ValueError, match="64-byte aligned"):
        native.Weight("f32", 16, 32, 1, 0, False, 8, 10**6)
    with pytest.raises(ValueError, match="bytes given"):
        native.Weight("f32", 16, 32, 1, 0, False, 64, 100)
