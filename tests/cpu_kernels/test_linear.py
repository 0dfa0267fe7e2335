"""cpu.linear and cpu.batched_linear: odd sizes, every format, equal bits however divided."""

import pytest
import torch

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
