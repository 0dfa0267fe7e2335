# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
"""mla.attend: absorbed multi-head latent attention over a paged cache of latent rows, split KV.

    out[t, h] = sum_s softmax_s(scale * (q_lat[t, h] . c[s] + q_pe[t, h] . k_pe[s])) c[s]

Source: DeepSeek-V2 (arXiv 2405.04434, section 2.1); flash-decoding (Dao et al. 2023); FlashMLA.

Tiling: all heads read the same rows, so query rows are (token, head) pairs of one sequence, BLOCK_M
at a time: 16 heads of a token, or 32 of 128.  A cache row [R + P] is loaded once per program and
serves as key (all of it) and as value (its first R).  One program per (split of the keys, block of
query rows); the f32 accumulator [BLOCK_M, R] stays in registers: 64 a thread, for 16 x 512 over
4 warps as for 32 x 512 over 8.  Decode takes a fixed number of blocks for each sequence; longer
calls find the sequence of a block on the device (`block_of`).  The number of splits is the host's
(see `sdpa_decode.splits_for`); `split_combine` adds them.

Floor: (R + P) * itemsize bytes and 2 * H * (2 * R + P) FLOP a row.  With 16 heads that is 30 FLOP a
byte in bf16: memory binds.  With 128 heads it is 242: the tensor cores bind, and the blocks of a
token's heads find each other's rows in L2; on sm_90 they have a kernel of their own, in
`mla_decode_sm90`.

Numerics: scores and sums in f32.  Unnormalised softmax weights are rounded to q's dtype before the
product with c (the reference rounds the normalised ones).  f32 products are IEEE.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ktgraph.runtime.state import State
from ktgraph.triton_kernels.attention_tiles import (
    block_of,
    cache_slots,
    capability,
    capped,
    divided,
    load_tile,
    multiprocessors,
    offsets,
    padded,
    rounded,
    small,
    softmax_step,
)
from ktgraph.triton_kernels.batch import DeviceBatch
from ktgraph.triton_kernels.compile import CompileCase
from ktgraph.triton_kernels.dependent import dependent_launch, enter
from ktgraph.triton_kernels.dots import dot
from ktgraph.triton_kernels.gluon_kernels import gluon_kernel
from ktgraph.triton_kernels.registry import cuda_kernel
from ktgraph.triton_kernels.sdpa_decode import splits_for
from ktgraph.triton_kernels.split_combine import Partials, combine


@triton.jit
def mla_attend_kernel(
    q_lat,
    q_pe,
    cache,
    out,
    acc_parts,
    top_parts,
    total_parts,
    seq_start,
    kv_len,
    table,
    lat_t,
    lat_h,
    pe_t,
    pe_h,
    cache_row,
    out_t,
    out_h,
    table_b,
    scale,
    splits,
    sequences,
    H: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    SEQS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    SMALL: tl.constexpr,
):
    enter()
    split = tl.program_id(1)
    number = tl.num_programs(0) - 1 - tl.program_id(0)  # the last blocks have the most keys
    if BLOCKS > 0:  # so many for each sequence
        seq, block = number // BLOCKS, number % BLOCKS
    else:
        seq, block = block_of(seq_start, sequences, number, H, BLOCK_M, SEQS)
    start = tl.load(seq_start + seq)
    new = tl.load(seq_start + seq + 1) - start
    length = tl.load(kv_len + seq)
    if block * BLOCK_M >= new * H:
        return
    table += seq.to(tl.int64) * table_b

    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    real = m < new * H
    position = length - new + m // H  # new tokens are the last rows of their sequence
    token = (start + m // H).to(tl.int64)
    head = m % H
    r = tl.arange(0, BLOCK_R)
    p = tl.arange(0, BLOCK_P)
    latent_query = tl.load(
        q_lat + token[:, None] * lat_t + head[:, None] * lat_h + r[None, :],
        mask=real[:, None] & (r < R)[None, :],
        other=0.0,
    )
    pe_query = tl.load(
        q_pe + token[:, None] * pe_t + head[:, None] * pe_h + p[None, :],
        mask=real[:, None] & (p < P)[None, :],
        other=0.0,
    )

    last = tl.minimum(length - new + ((block + 1) * BLOCK_M - 1) // H, length - 1) + 1
    share = tl.cdiv(tl.cdiv(last, BLOCK_N), splits)
    begin = split * share * BLOCK_N
    end = tl.minimum(begin + share * BLOCK_N, last)

    acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    n = tl.arange(0, BLOCK_N)
    slots = cache_slots(table, begin, last, PAGE, BLOCK_N)
    for first in range(begin, end, BLOCK_N):
        rows = first + n
        following = cache_slots(table, first + BLOCK_N, last, PAGE, BLOCK_N)
        at = offsets(slots, cache_row, SMALL)
        latent = load_tile(cache, at, r, R, BLOCK_R).to(latent_query.dtype)
        pe = load_tile(cache + R, at, p, P, BLOCK_P).to(latent_query.dtype)
        scores = dot(pe_query, tl.trans(pe), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
        scores = dot(latent_query, tl.trans(latent), scores)
        scores = capped(scores, scale, 0.0)
        seen = rows[None, :] <= position[:, None]
        scores = tl.where(seen, scores, float("-inf"))
        weights, shrink, top, total = softmax_step(scores, top, total)
        acc = dot(rounded(weights, latent_query.dtype), latent, acc * shrink[:, None])
        slots = following

    shown = real[:, None] & (r < R)[None, :]
    if SPLIT:
        part = (token * H + head) * splits + split
        tl.store(top_parts + part, top, mask=real)
        tl.store(total_parts + part, total, mask=real)
        if begin < end:
            tl.store(acc_parts + part[:, None] * R + r[None, :], acc, mask=shown)
    else:
        tl.store(
            out + token[:, None] * out_t + head[:, None] * out_h + r[None, :],
            rounded(divided(acc, total), out.dtype.element_ty),
            mask=shown,
        )


@dataclass(frozen=True)
class Config:
    """Query rows and keys of a tile, warps, stages; `programs` a multiprocessor set the splits."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs: int = 1


def config(dtype: torch.dtype, rows: int, capability: int) -> Config:
    """By the query rows of a sequence; a key is 1,152 bytes for R = 512, P = 64.

    Tiles of 64 rows compile to wgmma on sm_90 and spill 208 bytes a thread with Triton 3.9; on an
    H200 with 128 heads, batch 16 and 8,192 rows they take 155 µs, the best tile without spills 225
    (and `mla_decode_sm90` 95 to 101).
    """
    if dtype == torch.float32:
        return Config(16, 16, 8, 1, programs=2)
    if rows <= 16:
        return Config(16, 64, 4, 3) if capability == 90 else Config(16, 32, 4, 2)
    return Config(64, 64, 8, 2) if capability == 90 else Config(32, 32, 8, 2)


@cuda_kernel("mla.attend", name="triton.mla_attend", nmse=2e-5)
def mla_attend(
    q_lat: torch.Tensor,
    q_pe: torch.Tensor,
    kv: State,
    batch: DeviceBatch,
    *,
    out: tuple[torch.Tensor],
    layer: int,
    scale: float,
    override: Config | None = None,
    splits: int | None = None,
) -> None:
    """`override` and `splits` are for sweeps and tests."""
    (result,) = out
    cache = kv.parts[0][layer]
    assert q_lat.stride(-1) == q_pe.stride(-1) == cache.stride(-1) == result.stride(-1) == 1
    tokens, heads, rank = q_lat.shape
    is_sm90 = override is None and heads >= 64 and capability(q_lat) == 90
    sm90: Any = gluon_kernel("mla_decode_sm90", "mla.attend") if is_sm90 else None
    if sm90 is not None and sm90.fits(q_lat, q_pe, cache, 90):
        sm90.attend(q_lat, q_pe, cache, batch, result, scale, splits)
        return
    most = batch.max_new * heads
    used = override or config(q_lat.dtype, most, capability(q_lat))
    each = triton.cdiv(most, used.block_m)
    fixed, found = batch.sequences * each, tokens * heads // used.block_m + batch.sequences
    blocks = min(fixed, found)
    if splits is None:
        slots = multiprocessors(q_lat) * used.programs
        splits = splits_for(blocks, batch.max_kv, slots, used.block_n)
    parts = Partials.like(result, splits) if splits > 1 else None
    mla_attend_kernel[(blocks, splits)](
        q_lat,
        q_pe,
        cache,
        result,
        parts.acc if parts else None,
        parts.top if parts else None,
        parts.total if parts else None,
        batch.seq_start,
        batch.kv_len,
        batch.block_table,
        q_lat.stride(0),
        q_lat.stride(1),
        q_pe.stride(0),
        q_pe.stride(1),
        cache.stride(0),
        result.stride(0),
        result.stride(1),
        batch.block_table.stride(0),
        scale,
        splits,
        batch.sequences,
        H=heads,
        R=rank,
        P=q_pe.shape[-1],
        BLOCK_M=used.block_m,
        BLOCK_N=used.block_n,
        BLOCK_R=padded(rank),
        BLOCK_P=padded(q_pe.shape[-1]),
        SEQS=padded(batch.sequences, 1),
        BLOCKS=each if fixed <= found else 0,
        PAGE=batch.page_size,
        SPLIT=splits > 1,
        SMALL=small(cache),
        num_warps=used.num_warps,
        num_stages=used.num_stages,
        **dependent_launch(),
    )
    if parts is not None:
        combine(parts, result, None)


SWEEP_16 = [
    Config(*c)
    for c in [
        (16, 64, 4, 2, 1),
        (16, 64, 4, 3, 1),
        (16, 64, 8, 2, 1),
        (16, 64, 8, 3, 1),
        (16, 32, 4, 2, 2),
        (16, 32, 4, 3, 2),
        (16, 32, 8, 3, 2),
        (16, 32, 4, 4, 1),
        (16, 32, 4, 2, 3),
        (16, 16, 4, 4, 2),
        (16, 128, 8, 2, 1),
    ]
]
SWEEP_128 = [
    Config(*c)
    for c in [
        (64, 64, 8, 2, 1),
        (64, 64, 8, 1, 1),
        (64, 32, 8, 2, 1),
        (64, 32, 8, 3, 1),
        (64, 16, 8, 4, 1),
        (32, 64, 8, 2, 1),
        (32, 32, 8, 3, 2),
        (32, 32, 4, 2, 2),
        (16, 64, 4, 2, 2),
        (16, 32, 4, 3, 2),
    ]
]


_SPILLED = 256  # bytes a thread: see `config`


def _case(dtype: str, heads: int, capability: int, *, new: int, split: bool) -> CompileCase:
    kind = torch.float32 if dtype == "fp32" else torch.bfloat16
    used = config(kind, heads * new, capability)
    signature = {n: f"*{dtype}:16" for n in ("q_lat", "q_pe", "cache", "out")}
    signature |= {n: "*i32:16" for n in ("seq_start", "kv_len", "table")}
    strides = ("lat_t", "lat_h", "pe_t", "pe_h", "cache_row", "out_t", "out_h")
    signature |= dict.fromkeys(strides, "i32:16")
    signature |= {"table_b": "i32", "scale": "fp32", "splits": "i32", "sequences": "i32"}
    constants: dict[str, object] = {"H": heads, "R": 512, "P": 64, "SEQS": 16, "PAGE": 32}
    constants |= {"BLOCK_M": used.block_m, "BLOCK_N": used.block_n, "BLOCK_R": 512, "BLOCK_P": 64}
    constants |= {"BLOCKS": triton.cdiv(heads, used.block_m) if new == 1 else 0, "SPLIT": split}
    constants |= {"SMALL": True}
    parts = ("acc_parts", "top_parts", "total_parts")
    if split:
        signature |= dict.fromkeys(parts, "*fp32:16")
    else:
        constants |= dict.fromkeys(parts)
    name = f"mla_attend {dtype} M={used.block_m}{' split' if split else ''}"
    return CompileCase(
        mla_attend_kernel,
        f"{name}{'' if new == 1 else ' ragged'} sm_{capability}",
        signature,
        constants,
        used.num_warps,
        used.num_stages,
        [capability],
        stack=_SPILLED if used.block_m == 64 else 0,
    )


COMPILE_CASES = [
    _case(dtype, heads, c, new=new, split=split)
    for c in (80, 86, 89, 90, 120)
    for dtype, heads, new, split in (
        ("bf16", 16, 1, True),
        ("bf16", 128, 1, True),
        ("fp16", 128, 1, False),
        ("bf16", 16, 99, False),
        ("fp16", 128, 99, False),
        ("fp32", 16, 1, True),
    )
]

__all__ = ["COMPILE_CASES", "SWEEP_16", "SWEEP_128", "Config", "config", "mla_attend"]
