"""cpu.linear and cpu.batched_linear: odd sizes, every format, equal bits however divided."""

import numpy as np
import pytest
import torch

from ktgraph.cpu_kernels import reference_layouts

FORMATS = [
    ("f32", 0), ("bf16", 0), ("f16", 0), ("fp8", 128), ("int8", 0), ("int8", 32), ("int8", 128),
    ("int4", 32), ("int4", 64), ("int4", 128), ("int4z", 32), ("int4z", 64), ("int4z", 128),
    ("mxfp4", 32),
]  # fmt: skip


@pytest.mark.parametrize(("fmt", "group"), FORMATS)
@pytest.mark.parametrize(
    ("T", "K", "N"), [(1, 33, 15), (3, 48, 40), (17, 250, 1), (64, 250, 130), (101, 160, 72)]
)
def test_linear(lab, fmt, group, T, K, N):
    x, bias, y = lab.strided(T, K), lab.randn(N, dtype=torch.float32), lab.out(T, N)
    w, dense = lab.weight(fmt, lab.randn(N, K, dtype=torch.float32), group)
    lab.run("cpu.linear", [lab.tok(x), w, lab.tensor(bias), lab.tok(y)], T=T)
    lab.close(y, x.double() @ dense.T + bias.double())


def test_linear_output_rows(lab):
    x, y = lab.randn(5, 48), lab.out(5, 20)
    w, dense = lab.weight("bf16", lab.randn(20, 48))
    lab.run("cpu.linear", [lab.tensor(x, -2), w, None, lab.tensor(y, -2)], T=99, rows=3)
    lab.close(y[:3], x[:3].double() @ dense.T)
    assert y[3:].isnan().all()


@pytest.mark.parametrize("T", [1, 3, 17])
@pytest.mark.parametrize(("H", "K", "N"), [(3, 33, 20), (5, 64, 16)])
def test_batched_linear(lab, T, H, K, N):
    x, y = lab.strided(T, H, K), lab.out(T, H, N)
    w, dense = lab.weight("bf16", lab.randn(H, N, K))
    lab.run("cpu.batched_linear", [lab.tok(x), w, lab.tok(y)], T=T)
    lab.close(y, torch.einsum("thk,hnk->thn", x.double(), dense))


@pytest.mark.parametrize(("fmt", "group"), FORMATS)
def test_bits_do_not_depend_on_rows_threads_or_isa(tools, fmt, group):
    K, N, T = 250, 200, 103
    results = []
    for isa in tools.ISAS:
        for threads in (1, 2, 3):
            lab = tools.Lab(isa, torch.float32, threads)
            x = lab.randn(T, K)
            w, _ = lab.weight(fmt, lab.randn(N, K), group)
            for rows in (T, 1, 2, 4, 6):
                y = lab.out(rows, N)
                lab.run("cpu.linear", [lab.tok(x), w, None, lab.tok(y)], T=rows)
                results.append(y)
    for y in results:
        assert torch.equal(y, results[0][: len(y)])


GROUPS = {"fp8": 128, "int8": 64, "int4z": 32, "mxfp4": 32}


def every_code(lab, native, fmt):
    """A packed weight that holds every code of a format, and its values."""
    if fmt == "f16":
        halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
        finite = halves[np.isfinite(halves)].astype(np.float32).reshape(16, -1)
        return lab.weight("f16", torch.from_numpy(finite))
    rows, cols, group = 17, 256, GROUPS[fmt]
    codes = (np.arange(256) % (16 if fmt in ("int4z", "mxfp4") else 256)).astype(np.uint8)
    if fmt == "fp8":
        codes[[0x7F, 0xFF]] = 0  # NaN
    q = np.stack([np.roll(codes, r) for r in range(rows)])
    q = q.view(np.int8) if fmt == "int8" else q
    scales = np.full((rows, cols // group), 0.25, np.float32)
    zeros = np.arange(rows, dtype=np.uint8)[:, None].repeat(cols // group, axis=1)
    data = native.empty_packed(native.packed_nbytes(fmt, rows, cols, group))
    at = data.ctypes.data
    native.pack_ints_into(
        at, 0, fmt, rows, cols, group, 1, False, q, scales, zeros if fmt == "int4z" else None
    )
    lab.keep.append(data)
    values = torch.from_numpy(reference_layouts.to_float(fmt, data, rows, cols, group))
    return native.Weight(fmt, rows, cols, 1, group, False, at, data.nbytes), values.double()


@pytest.mark.parametrize("fmt", ["f16", "fp8", "int8", "int4z", "mxfp4"])
def test_every_code_is_decoded_exactly(tools, isa, fmt):
    """Rows of the unit matrix bring the values out, in registers (12 rows) and through a panel."""
    lab = tools.Lab(isa, torch.float32)
    weight, values = every_code(lab, tools.native, fmt)
    x = torch.eye(values.shape[1])
    for rows in (12, 500):
        parts = []
        for part in x.split(rows):
            parts.append(lab.out(len(part), len(values)))
            lab.run("cpu.linear", [lab.tok(part), weight, None, lab.tok(parts[-1])], T=len(part))
        assert torch.equal(torch.cat(parts).double().T, values)
