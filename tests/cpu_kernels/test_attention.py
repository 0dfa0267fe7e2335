"""Attention over the paged cache: ragged batches on shuffled pages, against float64 softmax."""

import pytest
import torch

RAGGED = [(0, 1), (130, 1), (63, 2), (0, 17), (64, 70)]


def attend(q, k, v, past, scale, window=0, softcap=0.0, sinks=None):
    """The new tokens of one sequence: q [T, H, A], k [S, H, A], v [S, H, Av] -> [T, H, Av]."""
    s = torch.einsum("tha,sha->ths", q.double(), k) * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    at, pos = torch.arange(k.shape[0])[None], past + torch.arange(q.shape[0])[:, None]
    seen = (at <= pos) & ((at > pos - window) if window else (at >= 0))
    s = s.masked_fill(~seen[:, None], float("-inf"))
    if sinks is not None:
        s = torch.cat([s, sinks.double()[None, :, None].expand(len(s), -1, 1)], -1)
    return torch.einsum("ths,sha->tha", s.softmax(-1)[..., : k.shape[0]], v)


def sequences(batch):
    """(sequence, its tokens, rows cached before, rows in all)"""
    for s, (past, new) in enumerate(batch.lens):
        yield s, slice(batch.start[s], batch.start[s] + new), past, past + new


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("H", "G", "A", "Av", "extra"),
    [
        (4, 4, 33, 33, {}),
        (6, 2, 48, 40, {}),
        (8, 1, 16, 16, {"window": 40}),
        (4, 2, 16, 15, {"softcap": 2.0}),
        (72, 1, 8, 8, {}),
        (4, 2, 16, 16, {"sinks": True, "window": 100}),
    ],
)
def test_sdpa(lab, tools, cache_dtype, H, G, A, Av, extra):
    batch = tools.Batch(RAGGED, 7)
    T, extra = batch.tokens, dict(extra)
    cache = tools.Cache(cache_dtype, 2, batch, [G * A, G * Av])
    cache.fill(1, batch, lab.gen)
    q, o = lab.strided(T, H, A), lab.out(T, H, Av)
    sinks = lab.randn(H, dtype=torch.float32) if extra.pop("sinks", False) else None
    ops = [
        lab.tok(q),
        cache.native,
        tools.native.BATCH,
        lab.tensor(sinks) if sinks is not None else None,
        lab.tok(o),
    ]
    lab.run("cpu.sdpa", ops, {"scale": 0.3, "layer": 1, "kv_heads": G, **extra}, T=T, batch=batch)
    want = []
    for s, at, past, n in sequences(batch):
        k = cache.rows(0, 1, batch, s, n).reshape(n, G, A).repeat_interleave(H // G, 1)
        v = cache.rows(1, 1, batch, s, n).reshape(n, G, Av).repeat_interleave(H // G, 1)
        want.append(attend(q[at], k, v, past, 0.3, **extra, sinks=sinks))
    lab.close(o, torch.cat(want), f32=5e-6)


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("H", "R", "P"), [(3, 40, 6), (16, 64, 16), (70, 16, 8)])
def test_mla_attend(lab, tools, cache_dtype, H, R, P):
    batch = tools.Batch(RAGGED, 16)
    T = batch.tokens
    cache = tools.Cache(cache_dtype, 2, batch, [R + P])
    cache.fill(0, batch, lab.gen)
    q, pe, o = lab.strided(T, H, R), lab.strided(T, H, P), lab.out(T, H, R)
    ops = [lab.tok(q), lab.tok(pe), cache.native, tools.native.BATCH, lab.tok(o)]
    lab.run("cpu.mla_attend", ops, {"scale": 0.2, "layer": 0}, T=T, batch=batch)
    want = []
    for s, at, past, n in sequences(batch):
        rows = cache.rows(0, 0, batch, s, n)[:, None].expand(-1, H, -1)
        want.append(attend(torch.cat([q[at], pe[at]], -1), rows, rows[..., :R], past, 0.2))
    lab.close(o, torch.cat(want), f32=5e-6)


@pytest.mark.parametrize("fmt", ["f32", "bf16", "int8"])
@pytest.mark.parametrize(("H", "R", "N", "P", "V"), [(3, 40, 9, 6, 13), (4, 64, 32, 16, 32)])
def test_mla_attend_expanded(lab, tools, fmt, H, R, N, P, V):
    batch = tools.Batch(RAGGED, 16)
    T = batch.tokens
    cache = tools.Cache(torch.bfloat16, 1, batch, [R + P])
    cache.fill(0, batch, lab.gen)
    w, dense = lab.weight(fmt, lab.randn(H * (N + V), R, dtype=torch.float32, scale=R**-0.5))
    q, pe, o = lab.strided(T, H, N), lab.strided(T, H, P), lab.out(T, H, V)
    ops = [lab.tok(q), lab.tok(pe), cache.native, tools.native.BATCH, w, lab.tok(o)]
    lab.run("cpu.mla_attend_expanded", ops, {"scale": 0.2, "layer": 0}, T=T, batch=batch)
    want = []
    for s, at, past, n in sequences(batch):
        rows = cache.rows(0, 0, batch, s, n)
        kv = (rows[:, :R] @ dense.T).reshape(n, H, N + V)
        k = torch.cat([kv[..., :N], rows[:, None, R:].expand(-1, H, -1)], -1)
        want.append(attend(torch.cat([q[at], pe[at]], -1), k, kv[..., N:], past, 0.2))
    lab.close(o, torch.cat(want), f32=5e-6)


def test_bits_do_not_depend_on_threads_isa_or_batch(tools):
    """A token's result is the same alone, in a batch, with keys split among threads or not."""
    results, alone = [], []
    for isa in tools.ISAS:
        for threads in (1, 2, 3):
            for lens in ([(300, 1)], [(300, 1), (0, 40), (5, 9)]):
                lab = tools.Lab(isa, torch.float32, threads)
                batch = tools.Batch(lens, 16)
                cache = tools.Cache(torch.bfloat16, 1, batch, [40])
                gen = torch.Generator().manual_seed(7)
                cache.fill(0, batch, gen)
                T = batch.tokens
                q, pe = (
                    torch.randn(T, 20, 32, generator=torch.Generator().manual_seed(1)),
                    torch.zeros(T, 20, 8),
                )
                q[0] = torch.randn(20, 32, generator=torch.Generator().manual_seed(2))
                o = lab.out(T, 20, 32)
                ops = [lab.tok(q), lab.tok(pe), cache.native, tools.native.BATCH, lab.tok(o)]
                lab.run("cpu.mla_attend", ops, {"scale": 0.2, "layer": 0}, T=T, batch=batch)
                (results if len(lens) > 1 else alone).append(o)
    for o in results:
        assert torch.equal(o, results[0])
        assert torch.equal(o[0], alone[0][0])
    for o in alone:
        assert torch.equal(o, alone[0])
