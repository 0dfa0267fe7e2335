"""Quantized checkpoints -> packed weights: the very values that each format's definition gives.

Here every format is encoded and decoded element by element, as its definition says, on arrays that
the re-layout under test has not touched.
"""

import numpy as np
import pytest
import torch

from ktgraph.cpu_kernels import load_native
from ktgraph.cpu_kernels import reference_layouts as ref
from ktgraph.weights import relayout
from ktgraph.weights.encodings import empty_packed, to_float
from ktgraph.weights.relayout import RelayoutError, StoredInts, pack_stored

Weight = load_native().Weight
AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight outputs nibble i holds


def rng(seed=0):
    return np.random.default_rng(seed)


def words_along(values, axis, places=(0, 1, 2, 3, 4, 5, 6, 7)):
    """Eight 4-bit values along `axis` in one i32."""
    values = np.moveaxis(values.astype(np.uint32), axis, -1)
    words = np.zeros((*values.shape[:-1], values.shape[-1] // 8), np.uint32)
    for i, place in enumerate(places):
        words |= values[..., place::8] << np.uint32(4 * i)
    return torch.from_numpy(np.moveaxis(words.view(np.int32), -1, axis).copy())


def nibble(word, i):
    return (int(word) & 0xFFFFFFFF) >> (4 * i) & 15


def halves(*shape):
    return torch.from_numpy(rng(7).uniform(1e-4, 0.02, shape).astype(np.float16))


def gptq_case(rows, cols, group, version):
    q, zeros = rng(1).integers(0, 16, (cols, rows)), rng(2).integers(0, 16, (cols // group, rows))
    zeros[0, :2] = 0, 15
    qweight, qzeros = words_along(q, 0), words_along(zeros, 1)
    scales = halves(cols // group, rows)
    value = np.zeros((rows, cols), np.float32)
    for o in range(rows):
        for k in range(cols):
            g = k // group
            zero = nibble(qzeros[g, o // 8], o % 8) + (version == 1)
            value[o, k] = np.float32(nibble(qweight[k // 8, o], k % 8) - zero) * np.float32(
                scales[g, o].item()
            )
    g_idx = torch.arange(cols, dtype=torch.int32) // group
    return relayout.gptq(qweight, qzeros, scales, g_idx, version=version), value


def awq_case(rows, cols, group):
    q, zeros = rng(3).integers(0, 16, (cols, rows)), rng(4).integers(0, 16, (cols // group, rows))
    qweight, qzeros = words_along(q, 1, AWQ_PLACES), words_along(zeros, 1, AWQ_PLACES)
    scales = halves(cols // group, rows)
    value = np.zeros((rows, cols), np.float32)
    for o in range(rows):
        at = AWQ_PLACES.index(o % 8)
        for k in range(cols):
            g = k // group
            q_zero = nibble(qweight[k, o // 8], at) - nibble(qzeros[g, o // 8], at)
            value[o, k] = np.float32(q_zero) * np.float32(scales[g, o].item())
    return relayout.awq(qweight, qzeros, scales), value


def compressed_case(rows, cols, group, with_zeros):
    wide, groups = -(-cols // 8) * 8, -(-cols // group)
    q = rng(5).integers(-8, 8, (rows, wide))
    q[:, cols:] = 0
    zeros = rng(6).integers(-8, 8, (rows, groups)) if with_zeros else np.zeros((rows, groups), int)
    packed = words_along(q + 8, 1)
    scales = torch.from_numpy(rng(7).uniform(1e-3, 0.02, (rows, groups))).to(torch.bfloat16)
    value = np.zeros((rows, cols), np.float32)
    for o in range(rows):
        for k in range(cols):
            at = k // group
            whole = nibble(packed[o, k // 8], k % 8) - 8 - zeros[o, at]
            value[o, k] = np.float32(whole) * np.float32(scales[o, at].item())
    zero_points = words_along(zeros + 8, 0) if with_zeros else None
    found = relayout.compressed_tensors_int4(packed, scales, (rows, cols), zero_points)
    return found, value


def mxfp4_case(rows, cols):
    blocks = torch.from_numpy(rng(8).integers(0, 256, (rows, cols // 32, 16)).astype(np.uint8))
    scales = torch.from_numpy(rng(9).integers(110, 130, (rows, cols // 32)).astype(np.uint8))
    scales[0, 0], scales[1, 0], scales[2, 0] = 0, 1, 251
    blocks[2, 0] = 0x13
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    value = np.zeros((rows, cols), np.float32)
    for r in range(rows):
        for k in range(cols):
            byte = int(blocks[r, k // 32, k % 32 // 2])
            code = byte >> 4 if k % 2 else byte & 15
            sign = -1.0 if code & 8 else 1.0
            exponent = int(scales[r, k // 32]) - 127
            value[r, k] = np.float32(sign * magnitudes[code & 7] * 2.0**exponent)
    return relayout.mxfp4(blocks, scales), value


def fp8_case(rows, cols):
    codes = rng(10).integers(0, 256, (rows, cols)).astype(np.uint8)
    codes[codes & 0x7F == 0x7F] = 0x80  # e4m3fn has NaN only there
    shape = (-(-rows // 128), -(-cols // 128))
    scales = rng(11).uniform(1e-5, 1e-2, shape).astype(np.float32)
    value = np.zeros((rows, cols), np.float32)
    for r in range(rows):
        for k in range(cols):
            c = int(codes[r, k])
            fraction, exponent = c & 7, c >> 3 & 15
            v = 2.0**-9 * fraction if exponent == 0 else (8 + fraction) * 2.0 ** (exponent - 10)
            value[r, k] = np.float32(-v if c & 128 else v) * scales[r // 128, k // 128]
    weight = torch.from_numpy(codes).view(torch.float8_e4m3fn)
    return relayout.fp8_blocks(weight, torch.from_numpy(scales)), value


def int8_case(rows, cols, group):
    q = rng(12).integers(-128, 128, (rows, cols)).astype(np.int8)
    groups = -(-cols // group) if group else 1
    scales = rng(13).uniform(1e-4, 1e-2, (rows, groups)).astype(np.float32)
    value = q.astype(np.float32) * scales[:, np.arange(cols) // (group or cols)]
    found = relayout.compressed_tensors_int8(torch.from_numpy(q), torch.from_numpy(scales))
    return found, value


CASES = {
    "gptq": lambda: gptq_case(40, 160, 32, 1),
    "gptq_v2": lambda: gptq_case(24, 384, 128, 2),
    "gptq, one group per row": lambda: gptq_case(16, 256, 256, 1),
    "awq": lambda: awq_case(40, 192, 64),
    "compressed-tensors": lambda: compressed_case(37, 100, 32, False),
    "compressed-tensors, group 128": lambda: compressed_case(16, 300, 128, False),
    "compressed-tensors with zeros": lambda: compressed_case(40, 100, 32, True),
    "mxfp4": lambda: mxfp4_case(37, 96),
    "fp8": lambda: fp8_case(150, 300),
    "int8": lambda: int8_case(21, 70, 0),
    "int8 with groups": lambda: int8_case(21, 70, 32),
}


@pytest.fixture(params=CASES, scope="module")
def case(request):
    """What a re-layout made, and the values by definition."""
    return CASES[request.param]()


def packed(found: StoredInts, gate_up=False):
    bytes = empty_packed(found.q.shape, found.encoding(gate_up))
    bytes.fill_(0xEE)
    pack_stored(bytes, 0, found, 1, gate_up)
    return bytes


def test_values_are_those_of_the_definition(case):
    found, value = case
    back = to_float((packed(found),), found.q.shape, found.encoding())
    np.testing.assert_array_equal(back.numpy(), value)


def test_bytes_equal_the_specification(case):
    found, _ = case
    zeros = None if found.zeros is None else found.zeros.numpy()
    want = ref.from_ints(found.format, found.q.numpy(), found.scales.numpy(), zeros, found.group)
    size = len(want)
    np.testing.assert_array_equal(packed(found).numpy()[:size], want)


def test_gate_and_up_rows_alternate_by_tile():
    found, value = awq_case(48, 64, 64)
    back = to_float((packed(found, gate_up=True),), (48, 64), found.encoding(gate_up=True))
    np.testing.assert_array_equal(back.numpy(), value)


def test_bytes_must_be_enough():
    found, _ = awq_case(48, 64, 64)
    with pytest.raises(RelayoutError, match="take 2240 bytes, got 64"):
        pack_stored(torch.zeros(64, dtype=torch.uint8), 0, found, 1, gate_up=True)


@pytest.mark.parametrize("activations", ["f32", "int8"])
@pytest.mark.parametrize("T", [1, 5, 33])
def test_linear(lab, case, activations, T):
    """Against float64, every level; mxfp4's extreme scales left out, as they leave f32's range."""
    found, value = case
    if found.format == "fp8" and activations == "int8":
        activations = "bf16"
    if found.format == "mxfp4":
        found = StoredInts("mxfp4", 32, found.q, found.scales.clamp(2.0**-17, 4.0))
        value = to_float((packed(found),), found.q.shape, found.encoding()).numpy()
    rows, cols = found.q.shape
    bytes = packed(found)
    lab.keep.append(bytes)
    weight = Weight(
        found.format, rows, cols, 1, found.group, False, bytes.data_ptr(), len(bytes), activations
    )
    x, y = lab.randn(T, cols), lab.out(T, rows)
    lab.run("cpu.linear", [lab.tok(x), weight, None, lab.tok(y)], T=T)
    x = as_int8_rows(x) if activations == "int8" else x.double()
    # tiles round f32 rows to bf16
    lab.close(
        y, x @ torch.from_numpy(value).double().T, f32=4e-3 if activations == "bf16" else 3e-6
    )


def as_int8_rows(x):
    """8-bit rows in float64: docs/layouts.md, Activations."""
    out = []
    for part in x.float().split(256, dim=1):
        top = part.abs().amax(1, keepdim=True)
        inverse = torch.full_like(top, 127.0) / top
        out.append(torch.round(part * inverse).double() * (top / 127.0).double())
    return torch.cat(out, dim=1)


def test_act_order_is_refused():
    qweight, qzeros = words_along(np.zeros((64, 8)), 0), words_along(np.zeros((2, 8)), 1)
    scales = halves(2, 8)
    g_idx = torch.arange(64, dtype=torch.int32) // 32
    relayout.gptq(qweight, qzeros, scales, g_idx)
    with pytest.raises(
        RelayoutError, match=r"g_idx permutes the columns .act-order.*desc_act=false"
    ):
        relayout.gptq(qweight, qzeros, scales, g_idx.flip(0))


def test_what_does_not_fit_is_refused():
    words, scales = words_along(np.zeros((64, 8)), 0), halves(2, 8)
    with pytest.raises(RelayoutError, match="as many zero points"):
        relayout.gptq(words, words_along(np.zeros((1, 8)), 1), scales)
    with pytest.raises(RelayoutError, match="version 3"):
        relayout.gptq(words, words, scales, version=3)
    with pytest.raises(RelayoutError, match="4 groups in 64 columns"):
        relayout.gptq(words, words_along(np.zeros((4, 8)), 1), halves(4, 8))
    with pytest.raises(RelayoutError, match="i32 of two axes"):
        relayout.awq(words.float(), words, scales)
    with pytest.raises(RelayoutError, match=r"expected \[rows, cols/32, 16\]"):
        relayout.mxfp4(torch.zeros(4, 2, 8), torch.zeros(4, 2))
    with pytest.raises(RelayoutError, match="a scale is NaN"):
        relayout.mxfp4(
            torch.zeros(4, 2, 16, dtype=torch.uint8), torch.full((4, 2), 255, dtype=torch.uint8)
        )
    with pytest.raises(RelayoutError, match=r"in blocks of 128 has \[2, 1\]"):
        relayout.fp8_blocks(torch.zeros(130, 64).to(torch.float8_e4m3fn), torch.ones(1, 1))


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (("int4", 32, 8, 1.0, None), "8 at row 0, column 0; int4 holds -8 to 7"),
        (("int4z", 32, 16, 1.0, 0), "16 at row 0, column 0; int4z holds 0 to 15"),
        (("int4z", 32, 1, 1.0, 17), "zero point 17"),
        (("int4z", 32, 1, 1.0, None), "int4z needs zero points"),
        (("int4", 32, 1, 1.0, 3), "only int4z has zero points"),
        (("int4z", 32, 1, 1e-9, 0), "cannot be kept exactly in int4z"),
        (("int4z", 32, 1, 65536.0, 0), "cannot be kept exactly in int4z"),
        (("int4", 32, 1, 1.001, None), "cannot be kept exactly in int4"),
        (("int8", 32, 1, float("inf"), None), "cannot be kept exactly in int8"),
        (("mxfp4", 32, 1, 3.0, None), "cannot be kept exactly in mxfp4"),
        (("fp8", 128, 0x7F, 1.0, None), "NaN at row 0, column 0"),
    ],
)
def test_values_that_a_format_cannot_keep(found, message):
    format, group, q, scale, zero = found
    kind = torch.int8 if format in ("int4", "int8") else torch.uint8
    zeros = None if zero is None else torch.full((2, 1), zero, dtype=torch.uint8)
    ints = StoredInts(
        format, group, torch.full((2, 32), q, dtype=kind), torch.full((2, 1), scale), zeros
    )
    with pytest.raises(ValueError, match=message):
        packed(ints)
