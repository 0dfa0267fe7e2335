"""Norms, element-wise kernels, embedding, gather, rope and cache appends."""

import numpy as np
import pytest
import torch

from ktgraph.ops.nn import rms_norm as op_rms_norm


def rms(x, w, eps):
    x = x.double()
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * w.double()


@pytest.mark.parametrize("shape", [(1, 33), (3, 250), (17, 5, 48), (2, 1)])
def test_rms_norm(lab, shape):
    x, w, y = lab.strided(*shape), lab.randn(shape[-1], dtype=torch.float32), lab.out(*shape)
    lab.run("cpu.rms_norm", [lab.tok(x), lab.tensor(w), lab.tok(y)], {"eps": 1e-6}, T=shape[0])
    lab.close(y, rms(x, w, 1e-6))


@pytest.mark.parametrize("shape", [(1, 33), (17, 250)])
def test_add_rms_norm(lab, shape):
    x, r, w = lab.randn(*shape), lab.strided(*shape), lab.randn(shape[-1], dtype=torch.float32)
    s, y = lab.out(*shape), lab.out(*shape)
    ops = [lab.tok(x), lab.tok(r), lab.tensor(w), lab.tok(s), lab.tok(y)]
    lab.run("cpu.add_rms_norm", ops, {"eps": 1e-5}, T=shape[0])
    assert torch.equal(s, x + r)
    lab.close(y, rms(x + r, w, 1e-5))


@pytest.mark.parametrize("late_cast", [False, True])
def test_norms_round_in_bf16_where_the_op_does(tools, isa, late_cast):
    lab = tools.Lab(isa, torch.bfloat16)
    x, r, y, s = lab.randn(9, 250), lab.randn(9, 250), lab.out(9, 250), lab.out(9, 250)
    w = lab.randn(250, dtype=torch.float32).bfloat16().float()
    attrs = {"eps": 1e-6, "late_cast": late_cast}
    lab.run("cpu.rms_norm", [lab.tok(x), lab.tensor(w), lab.tok(y)], attrs, T=9)
    assert wrong(y, op_rms_norm(x, w, **attrs)) < 0.002  # sums in another order: rarely a last bit
    assert wrong(y, op_rms_norm(x, w, eps=1e-6, late_cast=not late_cast)) > 0.1
    ops = [lab.tok(x), lab.tok(r), lab.tensor(w), lab.tok(s), lab.tok(y)]
    lab.run("cpu.add_rms_norm", ops, attrs, T=9)
    assert wrong(y, op_rms_norm(x + r, w, **attrs)) < 0.002


def wrong(got, want):
    """Share of elements that differ in any bit."""
    return float((got != want).float().mean())


@pytest.mark.parametrize("shape", [(1, 33), (3, 2, 40), (64, 250)])
def test_elementwise(lab, shape):
    a, b, c = lab.strided(*shape), lab.randn(*shape), lab.randn(*shape)
    f = [t.double() for t in (a, b, c)]
    cases = {
        "cpu.add": (2, f[0] + f[1]),
        "cpu.add3": (3, f[0] + f[1] + f[2]),
        "cpu.mul": (2, f[0] * f[1]),
        "cpu.sigmoid": (1, f[0].sigmoid()),
        "cpu.copy": (1, f[0]),
    }
    for kernel, (n, want) in cases.items():
        y = lab.out(*shape)
        lab.run(kernel, [*(lab.tok(t) for t in (a, b, c)[:n]), lab.tok(y)], T=shape[0])
        lab.close(y, want)


def test_mul_by_a_factor_per_row_and_casts(lab):
    x, g, y = lab.randn(7, 33), lab.randn(7, 1), lab.out(7, 33)
    lab.run("cpu.mul", [lab.tok(x), lab.tok(g), lab.tok(y)], T=7)
    lab.close(y, x.double() * g.double())
    for dtype in (torch.float32, torch.bfloat16):
        z = lab.out(7, 33, dtype=dtype)
        lab.run("cpu.copy", [lab.tok(x), lab.tok(z)], T=7)
        assert torch.equal(z, x.to(dtype))


def test_bf16_rounding_is_torchs(tools, isa):
    lab = tools.Lab(isa, torch.float32)
    bits = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint64).astype(np.uint32)
    bits[:6] = [0x3F808000, 0x3F818000, 0x7F7FFFFF, 0xFF800000, 0x00000001, 0x7FC00000]
    x = torch.from_numpy(bits.view(np.float32).copy())[None]
    y = torch.zeros(1, 4096, dtype=torch.bfloat16)
    lab.run("cpu.copy", [lab.tok(x), lab.tok(y)], T=1)
    want = x.bfloat16()
    assert torch.equal(y.isnan(), want.isnan())
    assert torch.equal(y.nan_to_num().view(torch.int16), want.nan_to_num().view(torch.int16))


@pytest.mark.parametrize("table_dtype", [torch.float32, torch.bfloat16])
def test_embedding(lab, table_dtype):
    table = lab.randn(50, 33, dtype=table_dtype)
    ids, y = torch.tensor([0, 49, 7, 7], dtype=torch.int32), lab.out(4, 33)
    lab.run("cpu.embedding", [lab.tok(ids), lab.tensor(table), lab.tok(y)], T=4)
    assert torch.equal(y, table[ids.long()].to(lab.dtype))
    ids[2] = 50
    with pytest.raises(RuntimeError, match="outside the vocabulary: 50"):
        lab.run("cpu.embedding", [lab.tok(ids), lab.tensor(table), lab.tok(y)], T=4)


def test_gather_rows(lab, tools):
    batch = tools.Batch([(0, 3), (2, 4)], 4, out_rows=[2, 6])
    x, y = lab.strided(7, 33), lab.out(2, 33)
    lab.run(
        "cpu.gather_rows",
        [lab.tok(x), tools.native.BATCH, lab.tensor(y, -2)],
        T=7,
        rows=2,
        batch=batch,
    )
    assert torch.equal(y, x[[2, 6]])


# rope


def rope_ref(x, pos, inv_freq, style, scale):
    """x [T, H, P] -> float64; angles as torch computes them, in f32."""
    angle = torch.tensor(pos, dtype=torch.float32)[:, None] * inv_freq
    cos, sin = angle.double().cos()[:, None] * scale, angle.double().sin()[:, None] * scale
    half = len(inv_freq)
    y, x = x.double().clone(), x.double()
    if style == "half":
        a, b = x[..., :half], x[..., half : 2 * half]
    else:
        a, b = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    ra, rb = a * cos - b * sin, b * cos + a * sin
    if style == "interleaved":
        y[..., 0 : 2 * half : 2], y[..., 1 : 2 * half : 2] = ra, rb
    else:
        y[..., :half], y[..., half : 2 * half] = ra, rb
    return y


STYLES = ["half", "interleaved", "interleaved_to_half"]
RAGGED = [(0, 5), (1000003, 1), (70, 3)]


def positions(tools, lens=RAGGED):
    """A batch that only positions matter of: no cache behind it."""
    b = tools.Batch.__new__(tools.Batch)
    b.pos = [past + i for past, new in lens for i in range(new)]
    b.tokens = len(b.pos)
    seq = [s for s, (_, new) in enumerate(lens) for _ in range(new)]
    b.native = tools.native.Batch()
    arrays = [
        seq,
        b.pos,
        np.cumsum([0, *(n for _, n in lens)]),
        [p + n for p, n in lens],
        np.zeros((len(lens), 1)),
        [],
    ]
    b.native.set(*(np.asarray(a, np.int32) for a in arrays))
    return b


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("P", "half"), [(10, 5), (64, 32), (40, 12)])
def test_rope(lab, tools, style, P, half):
    batch = positions(tools)
    T, inv = batch.tokens, 10000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
    q, k = lab.strided(T, 3, P), lab.strided(T, P)
    q_out, k_out = lab.out(T, 3, P), lab.out(T, P)
    ops = [
        lab.tok(q),
        lab.tok(k),
        lab.tensor(inv),
        tools.native.BATCH,
        lab.tok(q_out),
        lab.tok(k_out),
    ]
    lab.run("cpu.rope", ops, {"style": style, "scale": 1.25}, T=T, batch=batch)
    lab.close(q_out, rope_ref(q, batch.pos, inv, style, 1.25), f32=2e-7)
    lab.close(k_out, rope_ref(k[:, None], batch.pos, inv, style, 1.25)[:, 0], f32=2e-7)
    want = q_out.clone()
    lab.run(
        "cpu.rope",
        [lab.tok(q), None, *ops[2:4], lab.tok(q), None],
        {"style": style, "scale": 1.25},
        T=T,
        batch=batch,
    )
    assert torch.equal(q, want)  # in place


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_appends(lab, tools, cache_dtype, page_size):
    batch = tools.Batch([(3, 2), (0, 7), (16, 1)], page_size)
    T, R, P, G, A, Av = batch.tokens, 24, 10, 2, 12, 9
    BATCH, inv = tools.native.BATCH, 100.0 ** (-torch.arange(5, dtype=torch.float32) / 5)
    c, pe, q = lab.strided(T, R), lab.strided(T, P), lab.strided(T, 3, P)
    slots = [batch.slot(s, p) for s, p in zip(batch.seq, batch.pos, strict=True)]

    def new_rows(cache, part, layer):
        return torch.stack([cache.parts[part][layer, p, r] for p, r in slots])

    def others_untouched(cache, layer):
        for part in cache.parts:
            copy = part.clone()
            for p, r in slots:
                copy[layer, p, r] = float("nan")
            assert copy.isnan().all()

    latent = tools.Cache(cache_dtype, 3, batch, [R + P])
    lab.run(
        "cpu.kv_append_latent",
        [lab.tok(c), lab.tok(pe), latent.native, BATCH],
        {"layer": 1},
        T=T,
        batch=batch,
    )
    assert torch.equal(new_rows(latent, 0, 1), torch.cat([c, pe], -1).to(cache_dtype))
    others_untouched(latent, 1)

    latent, q_out = tools.Cache(cache_dtype, 2, batch, [R + P]), lab.out(T, 3, P)
    ops = [
        lab.tok(q),
        lab.tok(pe),
        lab.tok(c),
        lab.tensor(inv),
        latent.native,
        BATCH,
        lab.tok(q_out),
    ]
    lab.run(
        "cpu.rope_append_latent",
        ops,
        {"style": "interleaved_to_half", "layer": 0},
        T=T,
        batch=batch,
    )
    lab.close(q_out, rope_ref(q, batch.pos, inv, "interleaved_to_half", 1.0), f32=2e-7)
    want = torch.cat(
        [c.double(), rope_ref(pe[:, None], batch.pos, inv, "interleaved_to_half", 1.0)[:, 0]], -1
    )
    lab.close(new_rows(latent, 0, 0), want, f32=2e-7 if cache_dtype == torch.float32 else 4e-3)
    others_untouched(latent, 0)

    k, v, cache = (
        lab.strided(T, G, A),
        lab.strided(T, G, Av),
        tools.Cache(cache_dtype, 2, batch, [G * A, G * Av]),
    )
    lab.run(
        "cpu.kv_append",
        [lab.tok(k), lab.tok(v), cache.native, BATCH],
        {"layer": 1},
        T=T,
        batch=batch,
    )
    assert torch.equal(new_rows(cache, 0, 1), k.reshape(T, -1).to(cache_dtype))
    assert torch.equal(new_rows(cache, 1, 1), v.reshape(T, -1).to(cache_dtype))
    others_untouched(cache, 1)

    q, q_out = lab.strided(T, 4, A), lab.out(T, 4, A)
    cache = tools.Cache(cache_dtype, 2, batch, [G * A, G * Av])
    ops = [lab.tok(q), lab.tok(k), lab.tok(v), lab.tensor(inv), cache.native, BATCH, lab.tok(q_out)]
    lab.run("cpu.rope_append", ops, {"style": "half", "layer": 0}, T=T, batch=batch)
    lab.close(q_out, rope_ref(q, batch.pos, inv, "half", 1.0), f32=2e-7)
    want = rope_ref(k, batch.pos, inv, "half", 1.0).reshape(T, -1)
    lab.close(new_rows(cache, 0, 0), want, f32=2e-7 if cache_dtype == torch.float32 else 4e-3)
    assert torch.equal(new_rows(cache, 1, 0), v.reshape(T, -1).to(cache_dtype))
