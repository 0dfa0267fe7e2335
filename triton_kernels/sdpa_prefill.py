# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
"""attn.sdpa for many new tokens: flash attention over a paged cache.

    out[t, h] = sum_s softmax_s(scale * q[t, h] . k[s, g]) v[s, g]      g = h * G // H

Source: FlashAttention-2 (Dao, arXiv 2307.08691); paged cache (Kwon et al., arXiv 2309.06180).

Tiling: one program per (block of BLOCK_M query rows, key/value head).  Query rows are (token, head)
pairs of the H/G heads that share the key head, so grouped heads read a key tile once and a diagonal
tile spans few tokens.  Which sequence a block belongs to is found on the device (`block_of`): the
grid depends on T and B alone.  Blocks with the most keys start first.  The keys of a block are
three ranges: tiles that the window cuts, tiles that every row of the block sees in full (no mask),
and tiles that the diagonal cuts.  Rows before the new tokens (a chunked prefill) are like any.

Floor: 2 * (A + V) FLOP per visible (token, row, head), on the tensor cores; bytes do not bind.

Numerics: scores and sums in f32.  Unnormalised softmax weights are rounded to q's dtype before the
product with v (the reference rounds the normalised ones).  f32 products are IEEE.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ktgraph.triton_kernels.attention_tiles import (
    block_of,
    cache_slots,
    capability,
    capped,
    divided,
    load_tile,
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


@triton.jit
def attend_tiles(
    acc,
    top,
    total,
    query,
    position,
    k,
    v,
    k_row,
    v_row,
    table,
    begin,
    end,
    length,
    scale,
    A: tl.constexpr,
    V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
    SMALL: tl.constexpr,
):
    """Rows begin..end-1, whole tiles; without MASKED every query row sees all of them."""
    n = tl.arange(0, BLOCK_N)
    a = tl.arange(0, BLOCK_A)
    d = tl.arange(0, BLOCK_V)
    slots = cache_slots(table, begin, length, PAGE, BLOCK_N)
    for first in range(begin, end, BLOCK_N):
        rows = first + n
        following = cache_slots(table, first + BLOCK_N, length, PAGE, BLOCK_N)
        keys = load_tile(k, offsets(slots, k_row, SMALL), a, A, BLOCK_A).to(query.dtype)
        values = load_tile(v, offsets(slots, v_row, SMALL), d, V, BLOCK_V).to(query.dtype)
        scores = dot(query, tl.trans(keys), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
        scores = capped(scores, scale, SOFTCAP)
        if MASKED:
            seen = rows[None, :] <= position[:, None]
            if WINDOW > 0:
                seen = seen & (rows[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        weights, shrink, top, total = softmax_step(scores, top, total)
        acc = dot(rounded(weights, query.dtype), values, acc * shrink[:, None])
        slots = following
    return acc, top, total


@triton.jit
def sdpa_prefill_kernel(
    q,
    k,
    v,
    out,
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
    sequences,
    groups,
    SHARE: tl.constexpr,
    A: tl.constexpr,
    V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SEQS: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    SMALL: tl.constexpr,
):
    enter()
    group = tl.program_id(0) % groups
    number = (tl.num_programs(0) - 1 - tl.program_id(0)) // groups  # the last have the most keys
    seq, block = block_of(seq_start, sequences, number, SHARE, BLOCK_M, SEQS)
    start = tl.load(seq_start + seq)
    new = tl.load(seq_start + seq + 1) - start
    length = tl.load(kv_len + seq)
    if block * BLOCK_M >= new * SHARE:
        return
    table += seq.to(tl.int64) * table_b

    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
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

    low = length - new + block * BLOCK_M // SHARE  # positions of the first and the last real row
    high = tl.minimum(length - new + ((block + 1) * BLOCK_M - 1) // SHARE, length - 1)
    end = tl.cdiv(high + 1, BLOCK_N) * BLOCK_N
    begin = 0
    full = 0
    if WINDOW > 0:
        begin = tl.maximum(low - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        full = tl.cdiv(tl.maximum(high - WINDOW + 1, 0), BLOCK_N) * BLOCK_N
        full = tl.minimum(full, end)
    diagonal = tl.maximum((low + 1) // BLOCK_N * BLOCK_N, full)

    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    k += group * k_g
    v += group * v_g
    # fmt: off
    if WINDOW > 0:
        acc, top, total = attend_tiles(
            acc, top, total, query, position, k, v, k_row, v_row, table, begin, full, length, scale,
            A, V, BLOCK_M, BLOCK_N, BLOCK_A, BLOCK_V, PAGE, WINDOW, SOFTCAP, True, SMALL,
        )
    acc, top, total = attend_tiles(
        acc, top, total, query, position, k, v, k_row, v_row, table, full, diagonal, length, scale,
        A, V, BLOCK_M, BLOCK_N, BLOCK_A, BLOCK_V, PAGE, WINDOW, SOFTCAP, False, SMALL,
    )
    acc, top, total = attend_tiles(
        acc, top, total, query, position, k, v, k_row, v_row, table, diagonal, end, length, scale,
        A, V, BLOCK_M, BLOCK_N, BLOCK_A, BLOCK_V, PAGE, WINDOW, SOFTCAP, True, SMALL,
    )
    # fmt: on
    if SINKS:
        sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32)
        shrink, total = with_sink(top, total, sink)
        acc *= shrink[:, None]
    tl.store(
        out + token[:, None] * out_t + head[:, None] * out_h + d[None, :],
        rounded(divided(acc, total), out.dtype.element_ty),
        mask=real[:, None] & (d < V)[None, :],
    )


@dataclass(frozen=True)
class Config:
    """Query rows and keys of a tile, warps, pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def config(dtype: torch.dtype, width: int, capability: int) -> Config:
    """By the padded head size; registers bind, and shared memory stays under 99 KB but on sm_90."""
    if dtype == torch.float32:
        return Config(16, 16, 4 if width <= 128 else 8, 2)
    if capability == 90:
        return Config(128, 64, 8, 3) if width <= 128 else Config(128, 32, 8, 3)
    return Config(128, 32, 8, 3) if width <= 128 else Config(64, 32, 8, 2)


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
) -> None:
    """k and v are one layer's rows [C, G, *]."""
    tokens, heads, size = q.shape
    groups, width = v.shape[1:]
    share = heads // groups
    used = override or config(q.dtype, max(padded(size), padded(width)), capability(q))
    blocks = tokens * share // used.block_m + batch.sequences
    sdpa_prefill_kernel[(blocks * groups,)](
        q,
        k,
        v,
        out,
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
        batch.sequences,
        groups,
        SHARE=share,
        A=size,
        V=width,
        BLOCK_M=used.block_m,
        BLOCK_N=used.block_n,
        BLOCK_A=padded(size),
        BLOCK_V=padded(width),
        SEQS=padded(batch.sequences, 1),
        PAGE=batch.page_size,
        WINDOW=window,
        SOFTCAP=softcap,
        SINKS=sinks is not None,
        SMALL=small(k, v),
        num_warps=used.num_warps,
        num_stages=used.num_stages,
        **dependent_launch(),
    )


SWEEP = [
    Config(*c)
    for c in [
        (128, 128, 8, 3),
        (128, 128, 8, 2),
        (128, 64, 8, 3),
        (128, 64, 8, 4),
        (128, 64, 4, 3),
        (64, 128, 4, 3),
        (64, 64, 4, 3),
    ]
]


def _case(dtype: str, size: int, capability: int, *, extras: bool = False) -> CompileCase:
    kind = torch.float32 if dtype == "fp32" else torch.bfloat16
    used = config(kind, padded(size), capability)
    signature = {n: f"*{dtype}:16" for n in ("q", "k", "v", "out")}
    signature |= {n: "*i32:16" for n in ("seq_start", "kv_len", "table")}
    strides = ("q_t", "q_h", "k_row", "k_g", "v_row", "v_g", "out_t", "out_h")
    signature |= dict.fromkeys(strides, "i32:16")
    signature |= {"table_b": "i32", "scale": "fp32", "sequences": "i32", "groups": "i32"}
    constants: dict[str, object] = {
        "SHARE": 8,
        "A": size,
        "V": size,
        "SEQS": 16,
        "PAGE": 32,
        "SMALL": True,
    }
    constants |= {"BLOCK_M": used.block_m, "BLOCK_N": used.block_n}
    constants |= {"BLOCK_A": padded(size), "BLOCK_V": padded(size), "SINKS": extras}
    constants |= {"WINDOW": 1024 if extras else 0, "SOFTCAP": 30.0 if extras else 0.0}
    if extras:
        signature["sinks"] = f"*{dtype}:16"
    else:
        constants["sinks"] = None
    return CompileCase(
        sdpa_prefill_kernel,
        f"sdpa_prefill {dtype} A={size}{' window softcap sinks' if extras else ''}",
        signature,
        constants,
        used.num_warps,
        used.num_stages,
        [capability],
    )


COMPILE_CASES = [
    _case(dtype, size, c, extras=extras)
    for c in (80, 86, 89, 90, 120)
    for dtype, size, extras in (
        ("bf16", 64, False),
        ("bf16", 128, False),
        ("fp16", 128, True),
        ("bf16", 256, False),
        ("fp16", 256, True),
        ("fp32", 128, False),
        ("fp32", 256, True),
    )
]

__all__ = ["COMPILE_CASES", "SWEEP", "Config", "config", "launch"]
