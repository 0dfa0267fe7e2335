"""Packed bytes: the C++ packer against the numpy specification, and golden bytes."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_blocks import FORMATS as GGUF
from gguf_blocks import random_blocks, sizes, values

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


def repack(native, fmt, blocks, gate_up=False):
    rows, cols = len(blocks), blocks.shape[1] // sizes(fmt)[1] * sizes(fmt)[0]
    data = np.full(native.packed_nbytes(fmt, rows, cols, 0, 1, gate_up), 0xEE, np.uint8)
    native.repack_into(data.ctypes.data, 0, fmt, rows, cols, 0, 1, gate_up, blocks)
    return data


@pytest.mark.parametrize("fmt", GGUF)
@pytest.mark.parametrize(
    ("rows", "blocks", "gate_up"), [(1, 1, False), (16, 2, False), (40, 5, False), (30, 3, True)]
)
def test_blocks_keep_every_bit(tools, fmt, rows, blocks, gate_up):
    cols = blocks * sizes(fmt)[0]
    source = random_blocks(fmt, rows, cols, np.random.default_rng(rows), 1e-3)
    got = repack(tools.native, fmt, source, gate_up)
    np.testing.assert_array_equal(got, ref.from_blocks(fmt, source, gate_up))
    np.testing.assert_array_equal(ref.to_blocks(fmt, got, rows, cols, gate_up), source)
    back = tools.native.unpack(got.ctypes.data, 0, fmt, rows, cols, 0, 1, gate_up)
    np.testing.assert_array_equal(back, values(fmt, source))


def golden_blocks(fmt):
    """Two rows of one block; scales are 1 and -2."""
    nbytes = sizes(fmt)[1]
    rows = np.arange(2 * nbytes, dtype=np.uint8).reshape(2, nbytes)
    at = 208 if fmt == "q6_k" else 0
    rows[:, at : at + 2] = [[0x00, 0x3C], [0x00, 0xC0]]
    if fmt in ("q4_k", "q5_k"):
        rows[:, 2:4] = [[0x00, 0x3C], [0x00, 0xC0]]
    return rows


@pytest.mark.parametrize("fmt", GGUF)
def test_golden_blocks(tools, fmt):
    """The file has rows 0 and 1 of each line; the others are padding."""
    got = repack(tools.native, fmt, golden_blocks(fmt))
    lines = got.reshape(-1, 16, 4)
    assert lines[:, :2].tobytes().hex() == json.loads(GOLDEN.read_text())[fmt]
    assert not lines[:, 2:].any()


def test_errors_of_blocks(tools):
    native, dst = tools.native, np.zeros(65536, np.uint8).ctypes.data
    blocks = random_blocks("q4_k", 16, 512, np.random.default_rng(0))
    for fmt, cols, message in [
        ("q4_0", 48, "whole blocks of 32"),
        ("q6_k", 128, "whole blocks of 256"),
        ("q4_k", 256, r"q4_k \[16, 256\] has the bytes \[16, 144\], got \[16, 288\]"),
        ("int8", 512, "int8 is no GGUF format; use pack_into"),
    ]:
        with pytest.raises(ValueError, match=message):
            native.repack_into(dst, 0, fmt, 16, cols, 0, 1, False, blocks)
    with pytest.raises(ValueError, match="q4_k comes from a GGUF file; use repack_into"):
        native.pack_into(dst, 0, "q4_k", 16, 512, 0, 1, False, np.zeros((16, 512), np.float32))
    with pytest.raises(ValueError, match="index 1 of a stack of 1"):
        native.repack_into(dst, 1, "q4_k", 16, 512, 0, 1, False, blocks)
    blocks[3, 144 + 2 : 144 + 4] = [0x00, 0x7C]
    with pytest.raises(ValueError, match="row 3 has a block whose scale is inf or NaN"):
        native.repack_into(dst, 0, "q4_k", 16, 512, 0, 1, False, blocks)
