"""Integer weights times 8-bit rows, and bf16 rows on tiles: every level, the emulator too."""

import pytest
import torch
from gguf_blocks import FORMATS as GGUF
from gguf_blocks import extreme_blocks

INTEGERS = [
    ("int8", 0), ("int4", 32), ("int4", 64), ("int4", 128),
    ("int4p", 32), ("int4p", 64), ("int4p", 128), ("int8", 32), ("int8", 64), ("int8", 128),
    ("int4z", 32), ("int4z", 64), ("int4z", 128), ("mxfp4", 32),
    *((fmt, 0) for fmt in GGUF),
]  # fmt: skip
BLOCK = 256  # columns that share a scale


def as_int8_rows(x):
    """What 8-bit rows mean, in float64: docs/layouts.md, Activations."""
    out = []
    for part in x.float().split(BLOCK, dim=1):
        top = part.abs().amax(1, keepdim=True)
        # a tensor, not a number: torch divides a number by a tensor through a reciprocal
        inverse = torch.where(top > 1e-30, torch.full_like(top, 127.0) / top, 0.0)
        out.append(torch.round(part * inverse).double() * (top / 127.0).double())
    return torch.cat(out, dim=1)


def linear(lab, x, fmt, w, group, activations="int8"):
    packed, dense = lab.weight(fmt, w, group, activations=activations)
    y = lab.out(len(x), len(w))
    lab.run("cpu.linear", [lab.tok(x), packed, None, lab.tok(y)], T=len(x))
    return y, dense


@pytest.mark.parametrize(("fmt", "group"), INTEGERS)
@pytest.mark.parametrize(
    ("T", "K", "N"),
    [(1, 33, 15), (3, 48, 40), (7, 250, 130), (17, 250, 1), (33, 700, 72), (300, 160, 72)],
)
def test_linear(lab, tools, fmt, group, T, K, N):
    K = tools.whole(fmt, K)
    x = lab.strided(T, K)
    y, dense = linear(lab, x, fmt, lab.randn(N, K, dtype=torch.float32), group)
    lab.close(y, as_int8_rows(x) @ dense.T)


@pytest.mark.parametrize(("fmt", "group"), INTEGERS)
def test_bits_do_not_depend_on_rows_threads_or_level(tools, fmt, group):
    """Vector and tile paths, one row or many: integer sums are exact, floats follow one order."""
    T, K, N = 103, tools.whole(fmt, 570), 200
    results = []
    for isa in tools.ISAS:
        for threads in (1, 3):
            lab = tools.Lab(isa, torch.float32, threads)
            x, w = lab.randn(T, K), lab.randn(N, K)
            for rows in (T, 1, 2, 4, 5, 13, 40):
                results.append(linear(lab, x[:rows].contiguous(), fmt, w, group)[0])
    for y in results:
        assert torch.equal(y, results[0][: len(y)])


@pytest.mark.parametrize(("fmt", "group"), INTEGERS)
def test_extreme_integers(lab, fmt, group):
    """Largest sums in every lane: nothing may saturate or wrap."""
    K, N = 512, 48
    sign = torch.ones(N, K)
    sign[1::2] = -1
    x = torch.ones(20, K, dtype=lab.dtype)
    x[1::2] = -1
    if fmt in GGUF:
        packed, dense = lab.blocks(fmt, [extreme_blocks(fmt, N, K)], activations="int8")
        y = lab.out(len(x), N)
        lab.run("cpu.linear", [lab.tok(x), packed, None, lab.tok(y)], T=len(x))
        dense = dense[0]
    else:
        y, dense = linear(lab, x, fmt, sign, group)
    lab.close(y, x.double() @ dense.T)


def test_rows_with_inf_nan_zero_and_tiny_values(lab):
    x = torch.ones(6, 300, dtype=lab.dtype)
    x[0, 5], x[1, 299], x[2], x[3] = torch.inf, torch.nan, 0.0, 1e-33
    x[4, :256] = 0.0
    y, dense = linear(lab, x, "int8", lab.randn(40, 300, dtype=torch.float32), 0)
    assert y[:2].isnan().all()
    assert (y[2:4] == 0).all()
    lab.close(y[4:], as_int8_rows(x[4:]) @ dense.T)


@pytest.mark.parametrize(
    ("fmt", "group"),
    [
        ("int8", 0),
        ("int4", 32),
        ("int4p", 64),
        ("int8", 32),
        ("int4z", 128),
        ("mxfp4", 32),
        ("q4_0", 0),
        ("q4_k", 0),
        ("q6_k", 0),
    ],
)
@pytest.mark.parametrize("T", [1, 8, 9, 70, 700])
@pytest.mark.parametrize(("E", "K", "D", "inner"), [(5, 2, 250, 300), (9, 4, 96, 40)])
def test_grouped_mlp(lab, tools, fmt, group, T, E, K, D, inner):
    """Against the same sums in float64, the inner rows brought to 8 bits like the outer ones."""
    D, inner = tools.whole(fmt, D), tools.whole(fmt, inner)
    x, y = lab.strided(T, D), lab.out(T, D)
    ids = torch.stack([torch.randperm(E, generator=lab.gen)[:K] for _ in range(T)]).int()
    ids[T // 2, K - 1] = -1
    wts = torch.rand(T, K, generator=lab.gen)
    w13, d13 = lab.weight(
        fmt, lab.randn(E, 2 * inner, D, dtype=torch.float32, scale=D**-0.5), group, gate_up=True,
        activations="int8",
    )  # fmt: skip
    w2, d2 = lab.weight(fmt, lab.randn(E, D, inner, dtype=torch.float32), group, activations="int8")
    ops = [lab.tok(x), lab.tok(ids), lab.tok(wts), w13, w2, None, None, lab.tok(y)]
    lab.run("cpu.grouped_mlp", ops, {"act": "silu"}, T=T)
    rows, want = as_int8_rows(x), torch.zeros(T, D, dtype=torch.float64)
    for e in range(E):
        t, k = (ids == e).nonzero(as_tuple=True)
        h = rows[t] @ d13[e].T
        # f32, as the kernel holds it: a rounding apart can move an integer, hence the bound below
        inner_rows = torch.nn.functional.silu(h[:, :inner]) * h[:, inner:]
        want.index_add_(0, t, wts[t, k].double()[:, None] * (as_int8_rows(inner_rows) @ d2[e].T))
    lab.close(y, want, f32=3e-4)


@pytest.mark.parametrize(
    ("fmt", "group"),
    [
        ("int8", 0),
        ("int4p", 64),
        ("bf16", 0),
        ("int8", 128),
        ("int4z", 64),
        ("mxfp4", 32),
        ("q8_0", 0),
        ("q4_k", 0),
        ("iq4_xs", 0),
    ],
)
def test_mlp_bits_do_not_depend_on_threads_or_batch(tools, fmt, group):
    E, K, D, inner = 6, 2, tools.whole(fmt, 96), tools.whole(fmt, 300)
    results = []
    for isa in tools.ISAS:
        for threads in (1, 2, 3):
            lab = tools.Lab(isa, torch.float32, threads)
            x = lab.randn(300, D)
            ids = torch.randint(0, E, (300, K), generator=lab.gen).int()
            wts = torch.rand(300, K, generator=lab.gen)
            activations = "" if fmt == "bf16" else "int8"
            w13, _ = lab.weight(
                fmt, lab.randn(E, 2 * inner, D), group, gate_up=True, activations=activations
            )
            w2, _ = lab.weight(fmt, lab.randn(E, D, inner), group, activations=activations)
            for T in (300, 1, 8, 40):
                y = lab.out(T, D)
                ops = [lab.tok(x), lab.tok(ids), lab.tok(wts), w13, w2, None, None, lab.tok(y)]
                lab.run("cpu.grouped_mlp", ops, {"act": "silu"}, T=T)
                results.append(y)
    for y in results:
        assert torch.equal(y, results[0][: len(y)])


@pytest.mark.parametrize(("fmt", "group"), [("bf16", 0), ("fp8", 128)])
@pytest.mark.parametrize(("T", "K", "N"), [(9, 33, 15), (40, 250, 130), (300, 700, 72)])
def test_bf16_rows(isa, tools, fmt, group, T, K, N):
    """Tile registers sum pairs of products in f32: a bound, not bits, is the test."""
    lab = tools.Lab(isa, torch.bfloat16)
    x = lab.strided(T, K)
    y, dense = linear(lab, x, fmt, lab.randn(N, K), group, "bf16")
    lab.close(y, x.double() @ dense.T)


@pytest.mark.parametrize(("fmt", "group"), [("bf16", 0), ("fp8", 128)])
@pytest.mark.parametrize("T", [9, 70])
def test_bf16_experts(isa, tools, fmt, group, T):
    lab = tools.Lab(isa, torch.bfloat16)
    E, K, D, inner = 4, 2, 96, 300
    x, y = lab.strided(T, D), lab.out(T, D)
    ids = torch.randint(0, E, (T, K), generator=lab.gen).int()
    wts = torch.rand(T, K, generator=lab.gen)
    w13, d13 = lab.weight(
        fmt, lab.randn(E, 2 * inner, D, scale=D**-0.5), group, gate_up=True, activations="bf16"
    )
    w2, d2 = lab.weight(fmt, lab.randn(E, D, inner), group, activations="bf16")
    ops = [lab.tok(x), lab.tok(ids), lab.tok(wts), w13, w2, None, None, lab.tok(y)]
    lab.run("cpu.grouped_mlp", ops, {"act": "silu"}, T=T)
    want = torch.zeros(T, D, dtype=torch.float64)
    for e in range(E):
        t, k = (ids == e).nonzero(as_tuple=True)
        h = x[t].double() @ d13[e].T
        inner_rows = torch.nn.functional.silu(h[:, :inner]) * h[:, inner:]
        want.index_add_(0, t, wts[t, k].double()[:, None] * (inner_rows @ d2[e].T))
    lab.close(y, want, bf16=6e-3)


def test_activations_must_fit_the_format(tools):
    lab = tools.Lab(tools.ISAS[0], torch.float32)
    w = lab.randn(16, 64)
    for fmt, group, activations, expected in [
        ("bf16", 0, "int8", "go with integer weights"),
        ("int8", 0, "bf16", "go with bf16 weights"),
        ("f16", 0, "int8", "go with integer weights"),
        ("fp8", 128, "int8", "go with integer weights"),
        ("int4p", 64, "f32", "takes activations int8 only"),
        ("q4_0", 0, "f32", "take activations int8 only"),
        ("int8", 0, "int3", "unknown activations"),
    ]:
        with pytest.raises(ValueError, match=expected):
            lab.weight(fmt, w, group, activations=activations)
    packed, _ = lab.weight("int8", w, activations="int8")
    x, ids, wts = lab.randn(2, 64), lab.out(2, 3, dtype=torch.int32), lab.out(2, 3)
    with pytest.raises(ValueError, match="this kernel takes activations f32"):
        lab.run("cpu.moe_route", [lab.tok(x), packed, None, lab.tok(ids), lab.tok(wts)],
                {"score": "softmax"}, T=2)  # fmt: skip


def test_progressive_scales_cost_little(tools):
    """int4p within 1.05 of int4's error, on Gaussian rows and on rows of unequal groups."""
    lab = tools.Lab(tools.ISAS[-1], torch.float32)
    for spread in (0.0, 0.5):  # at 1.0, group 32, it is 1.06
        w = lab.randn(64, 1024)
        w *= torch.exp(spread * lab.randn(64, 1024 // 32)).repeat_interleave(32, dim=1)
        for group in (32, 64, 128):
            errors = [
                float((lab.weight(fmt, w, group)[1] - w.double()).norm())
                for fmt in ("int4", "int4p")
            ]
            assert errors[1] <= 1.05 * errors[0], (spread, group, errors)
