# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
"""attn.sdpa for few new tokens a sequence: flash-decoding over a paged cache.

    out[t, h] = sum_s softmax_s(scale * q[t, h] . k[s, g]) v[s, g]      g = h * G // H

Source: flash-decoding (Dao et al. 2023), online softmax (Milakov & Gimelshein, arXiv 1805.02867),
paged cache (Kwon et al., arXiv 2309.06180).

Tiling: one program per (split of the keys, key/value head, sequence).  Its query tile holds all
new tokens and all H/G query heads of the sequence that read this head, padded to 16 rows or more,
so every key and value is read once.  The number of splits is fixed by the host from B * G, the
number of multiprocessors and max_kv; each split takes its share of the rows that are really there,
and a split without rows writes only its largest score, -inf.  With more than one split the f32
partial sums are combined by `split_combine`, in a launch of its own: the program that arrives last
would read them all through one multiprocessor.

Floor: bytes of the keys and values seen, (A + V) * itemsize per row and head g; 2 * H/G FLOP a byte
in bf16, far below the ridge.

Numerics: scores and sums in f32.  Unnormalised softmax weights are rounded to q's dtype before the
product with v (the reference rounds the normalised ones).  f32 products are IEEE.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from ktgraph.triton_kernels.attention_tiles import (
    cache_slots,
    capped,
    divided,
    load_tile,
    multiprocessors,
    offsets,
    padded,
    rounded,
    small,
    softmax_step,
    with_sink,
)
from ktgraph.triton_kernels.batch import DeviceBatch
from ktgraph.triton_kernels.compile import CompileCase
from ktgraph.triton_kernels.dependent import dependent_launch, enter
from ktgraph.triton_kernels.dots import dot
from ktgraph.triton_kernels.split_combine import Partials, combine

MOST_SPLITS = 64


def most_rows(dtype: torch.dtype) -> int:
    """Query rows that one program takes; longer calls are prefill.  f32 has no tensor cores: its
    operands lie in registers."""
    return 16 if dtype == torch.float32 else 64


@triton.jit
def sdpa_decode_kernel(
    q,
    k,
    v,
    out,
    acc_parts,
    top_parts,
    total_parts,
    sinks,
    seq_start,
    kv_len,
    table,
    q_t,
    q_h,
    k_row,
    k_g,
    v_row,
    v_g,
    out_t,
    out_h,
    table_b,
    scale,
    splits,
    H: tl.constexpr,
    SHARE: tl.constexpr,
    A: tl.constexpr,
    V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
    SMALL: tl.constexpr,
):
    enter()
    split, group, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(seq_start + seq)
    new = tl.load(seq_start + seq + 1) - start
    length = tl.load(kv_len + seq)
    table += seq.to(tl.int64) * table_b

    m = tl.arange(0, BLOCK_M)
    real = m < new * SHARE
    position = length - new + m // SHARE  # new tokens are the last rows of their sequence
    token = (start + m // SHARE).to(tl.int64)
    head = group * SHARE + m % SHARE
    a = tl.arange(0, BLOCK_A)
    d = tl.arange(0, BLOCK_V)
    query = tl.load(
        q + token[:, None] * q_t + head[:, None] * q_h + a[None, :],
        mask=real[:, None] & (a < A)[None, :],
        other=0.0,
    )

    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(length - new - WINDOW + 1, 0) // BLOCK_N
    share = tl.cdiv(tl.cdiv(length, BLOCK_N) - lowest, splits)
    begin = (lowest + split * share) * BLOCK_N
    end = tl.minimum(begin + share * BLOCK_N, length)

    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    n = tl.arange(0, BLOCK_N)
    slots = cache_slots(table, begin, length, PAGE, BLOCK_N)
    for first in range(begin, end, BLOCK_N):
        rows = first + n
        following = cache_slots(table, first + BLOCK_N, length, PAGE, BLOCK_N)
        keys = load_tile(k + group * k_g, offsets(slots, k_row, SMALL), a, A, BLOCK_A).to(
            query.dtype
        )
        values = load_tile(v + group * v_g, offsets(slots, v_row, SMALL), d, V, BLOCK_V).to(
            query.dtype
        )
        scores = dot(query, tl.trans(keys), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
        scores = capped(scores, scale, SOFTCAP)
        seen = rows[None, :] <= position[:, None]
        if WINDOW > 0:
            seen = seen & (rows[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        weights, shrink, top, total = softmax_step(scores, top, total)
        acc = dot(rounded(weights, query.dtype), values, acc * shrink[:, None])
        slots = following

    shown = real[:, None] & (d < V)[None, :]
    if SPLIT:
        part = (token * H + head) * splits + split
        tl.store(top_parts + part, top, mask=real)
        tl.store(total_parts + part, total, mask=real)
        if begin < end:
            tl.store(acc_parts + part[:, None] * V + d[None, :], acc, mask=shown)
    else:
        if SINKS:
            sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32)
            shrink, total = with_sink(top, total, sink)
            acc *= shrink[:, None]
        tl.store(
            out + token[:, None] * out_t + head[:, None] * out_h + d[None, :],
            rounded(divided(acc, total), out.dtype.element_ty),
            mask=shown,
        )


@dataclass(frozen=True)
class Config:
    """Keys per tile, warps and pipeline stages; `programs` per multiprocessor set the splits."""

    block_n: int
    num_warps: int
    num_stages: int
    programs: int = 2


def config(dtype: torch.dtype, width: int, rows: int = 16) -> Config:
    """By the padded head size and the query rows of a program."""
    if dtype == torch.float32:
        return Config(block_n=16, num_warps=4, num_stages=2)
    if width > 128 and rows > 16:
        return Config(block_n=16, num_warps=4, num_stages=2)
    block_n = 128 if width <= 64 else 64 if width <= 128 else 32
    return Config(block_n, num_warps=4, num_stages=3)


def splits_for(programs: int, max_kv: int, slots: int, block_n: int) -> int:
    """Enough splits to fill `slots` program slots, none shorter than a tile at max_kv."""
    return max(1, min(slots // max(programs, 1), triton.cdiv(max_kv, block_n), MOST_SPLITS))


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: DeviceBatch,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    *,
    scale: float,
    window: int,
    softcap: float,
    override: Config | None = None,
    splits: int | None = None,
) -> None:
    """k and v are one layer's rows [C, G, *]; max_new * H / G <= most_rows."""
    heads, size = q.shape[1:]
    groups, width = v.shape[1:]
    share = heads // groups
    rows = padded(batch.max_new * share)
    used = override or config(q.dtype, max(padded(size), padded(width)), rows)
    if splits is None:
        slots = multiprocessors(q) * used.programs
        splits = splits_for(batch.sequences * groups, batch.max_kv, slots, used.block_n)
    parts = Partials.like(out, splits) if splits > 1 else None
    sdpa_decode_kernel[(splits, groups, batch.sequences)](
        q,
        k,
        v,
        out,
        parts.acc if parts else None,
        parts.top if parts else None,
        parts.total if parts else None,
        sinks,
        batch.seq_start,
        batch.kv_len,
        batch.block_table,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        out.stride(0),
        out.stride(1),
        batch.block_table.stride(0),
        scale,
        splits,
        H=heads,
        SHARE=share,
        A=size,
        V=width,
        BLOCK_M=rows,
        BLOCK_N=used.block_n,
        BLOCK_A=padded(size),
        BLOCK_V=padded(width),
        PAGE=batch.page_size,
        WINDOW=window,
        SOFTCAP=softcap,
        SINKS=sinks is not None,
        SPLIT=splits > 1,
        SMALL=small(k, v),
        num_warps=used.num_warps,
        num_stages=used.num_stages,
        **dependent_launch(),
    )
    if parts is not None:
        combine(parts, out, sinks)


SWEEP = [
    replace(config(torch.bfloat16, 128), block_n=n, num_warps=w, num_stages=s, programs=p)
    for n, w, s, p in [
        (64, 4, 2, 2),
        (64, 4, 3, 2),
        (64, 4, 4, 2),
        (64, 4, 3, 4),
        (64, 8, 3, 2),
        (32, 4, 3, 4),
        (32, 4, 4, 3),
        (32, 2, 4, 4),
        (128, 4, 2, 2),
        (128, 8, 2, 2),
        (128, 8, 3, 1),
    ]
]


def _case(dtype: str, size: int, rows: int, *, split: bool, extras: bool = False) -> CompileCase:
    used = config(torch.float32 if dtype == "fp32" else torch.bfloat16, padded(size), rows)
    signature = {n: f"*{dtype}:16" for n in ("q", "k", "v", "out")}
    signature |= {n: "*i32:16" for n in ("seq_start", "kv_len", "table")}
    strides = ("q_t", "q_h", "k_row", "k_g", "v_row", "v_g", "out_t", "out_h")
    signature |= dict.fromkeys(strides, "i32:16")
    signature |= {"table_b": "i32", "scale": "fp32", "splits": "i32"}
    constants: dict[str, object] = {"H": 32, "SHARE": 8, "A": size, "V": size, "BLOCK_M": rows}
    constants |= {"BLOCK_N": used.block_n, "BLOCK_A": padded(size), "BLOCK_V": padded(size)}
    constants |= {"PAGE": 32, "WINDOW": 1024 if extras else 0, "SOFTCAP": 30.0 if extras else 0.0}
    constants |= {"SINKS": extras, "SPLIT": split, "SMALL": True}
    parts = ("acc_parts", "top_parts", "total_parts")
    if split:
        signature |= dict.fromkeys(parts, "*fp32:16")
    else:
        constants |= dict.fromkeys(parts)
    if extras:
        signature["sinks"] = f"*{dtype}:16"
    else:
        constants["sinks"] = None
    return CompileCase(
        sdpa_decode_kernel,
        f"sdpa_decode {dtype} A={size} M={rows}{' split' if split else ''}"
        f"{' window softcap sinks' if extras else ''}",
        signature,
        constants,
        used.num_warps,
        used.num_stages,
    )


COMPILE_CASES = [
    _case("bf16", 64, 16, split=True),
    _case("bf16", 128, 16, split=True),
    _case("bf16", 128, 16, split=False),
    _case("bf16", 128, 64, split=True),
    _case("bf16", 192, 16, split=True),
    _case("bf16", 256, 64, split=True, extras=True),
    _case("fp16", 128, 16, split=False, extras=True),
    _case("fp32", 128, 16, split=True),
    _case("fp32", 256, 16, split=False, extras=True),
]

__all__ = ["COMPILE_CASES", "SWEEP", "Config", "config", "launch", "most_rows", "splits_for"]
