# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
"""mla.attend_expanded: MLA with keys and values rebuilt from the latent rows, for many new tokens.

    [k_nope | v][s, h] = kv_b[h] c[s]
    out[t, h] = sum_s w[s] v[s, h]
    w = softmax_s(scale * (q_nope[t, h] . k_nope[s, h] + q_pe[t, h] . k_pe[s]))

Source: DeepSeek-V2 (arXiv 2405.04434, section 2.1); FlashAttention-2 (Dao, arXiv 2307.08691).

Three steps, the last two for a group of heads at a time:
1. `gather_kernel` copies the cached rows of the call's sequences into contiguous slots, row s of
   sequence b at ``b * max_kv + s``.  Slots behind a sequence's end are left as they are.
2. torch.mm expands all slots: [B * max_kv, R] by kv_b of the heads.  What unused slots hold spoils
   only their own rows of the product, and nobody reads those.
3. `attend_kernel`: flash attention, one program per (BLOCK_M tokens, head); the keys are
   contiguous, and k_pe is read from the gathered rows, shared by all heads.  The grid depends on T
   and B only (`block_of`); blocks with the most keys start first.

The product is B * max_kv rows whatever the lengths are: a tight max_kv pays, and a batch of very
different lengths wastes some.  Heads are processed in as few equal groups as keep the expanded keys
and values within SCRATCH_BYTES (one head at least).

Floor: 2 * S * H * (N + V) * R FLOP to expand, 2 * (N + P + V) per visible (token, row, head).

Numerics: keys and values are rounded to q's dtype, as in the reference; scores and sums in f32.
Unnormalised softmax weights are rounded to q's dtype before the product with v (the reference
rounds the normalised ones).  f32 products are IEEE (torch's own default for torch.mm).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

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
    padded,
    rounded,
    softmax_step,
)
from ktgraph.triton_kernels.batch import DeviceBatch
from ktgraph.triton_kernels.compile import CompileCase
from ktgraph.triton_kernels.dependent import dependent_launch, enter
from ktgraph.triton_kernels.dots import dot
from ktgraph.triton_kernels.registry import cuda_kernel

SCRATCH_BYTES = 512 << 20  # of expanded keys and values at a time
_GATHERED = 32  # rows of a program of gather_kernel


@triton.jit
def gather_kernel(
    cache,
    gathered,
    kv_len,
    table,
    cache_row,
    table_b,
    max_kv,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PAGE: tl.constexpr,
):
    """gathered[b * max_kv + s] = cache row s of sequence b."""
    enter()
    seq = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK_N
    length = tl.minimum(tl.load(kv_len + seq), max_kv)
    if first >= length:
        return
    rows = first + tl.arange(0, BLOCK_N)
    slots = cache_slots(table + seq * table_b, first, length, PAGE, BLOCK_N).to(tl.int64)
    w = tl.arange(0, BLOCK_W)
    there = (rows < length)[:, None] & (w < WIDTH)[None, :]
    values = tl.load(cache + slots[:, None] * cache_row + w[None, :], mask=there, other=0.0)
    if values.dtype == tl.float32:
        values = rounded(values, gathered.dtype.element_ty)
    to = (seq * max_kv + rows) * WIDTH
    tl.store(gathered + to[:, None] + w[None, :], values.to(gathered.dtype.element_ty), mask=there)


@triton.jit
def attend_tiles(
    acc,
    top,
    total,
    nope_query,
    pe_query,
    position,
    key,
    pe,
    value,
    expanded_row,
    pe_row,
    begin,
    end,
    length,
    scale,
    N: tl.constexpr,
    P: tl.constexpr,
    V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_V: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Rows begin..end-1 in tiles of BLOCK_K; without MASKED every query row sees all of them."""
    s = tl.arange(0, BLOCK_K)
    n = tl.arange(0, BLOCK_N)
    p = tl.arange(0, BLOCK_P)
    d = tl.arange(0, BLOCK_V)
    for first in range(begin, end, BLOCK_K):
        rows = first + s
        known = tl.minimum(rows, length - 1)  # what lies behind the end was never written
        keys = load_tile(key, known * expanded_row, n, N, BLOCK_N)
        shared = load_tile(pe, known * pe_row, p, P, BLOCK_P)
        values = load_tile(value, known * expanded_row, d, V, BLOCK_V)
        scores = dot(nope_query, tl.trans(keys), tl.zeros([BLOCK_M, BLOCK_K], tl.float32))
        scores = capped(dot(pe_query, tl.trans(shared), scores), scale, 0.0)
        if MASKED:
            scores = tl.where(rows[None, :] <= position[:, None], scores, float("-inf"))
        weights, shrink, top, total = softmax_step(scores, top, total)
        acc = dot(rounded(weights, nope_query.dtype), values, acc * shrink[:, None])
    return acc, top, total


@triton.jit
def attend_kernel(
    q_nope,
    q_pe,
    expanded,
    gathered,
    out,
    seq_start,
    kv_len,
    nope_t,
    nope_h,
    pe_t,
    pe_h,
    out_t,
    out_h,
    expanded_row,
    max_kv,
    scale,
    sequences,
    N: tl.constexpr,
    P: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SEQS: tl.constexpr,
):
    """Heads of one group; q_nope, q_pe and out begin at its first head."""
    enter()
    head = tl.program_id(0)
    number = tl.num_programs(1) - 1 - tl.program_id(1)  # the last blocks have the most keys
    seq, block = block_of(seq_start, sequences, number, 1, BLOCK_M, SEQS)
    start = tl.load(seq_start + seq)
    new = tl.load(seq_start + seq + 1) - start
    length = tl.load(kv_len + seq)
    if block * BLOCK_M >= new:
        return

    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    real = m < new
    position = length - new + m  # new tokens are the last rows of their sequence
    token = (start + m).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    p = tl.arange(0, BLOCK_P)
    d = tl.arange(0, BLOCK_V)
    nope_query = tl.load(
        q_nope + token[:, None] * nope_t + head * nope_h + n[None, :],
        mask=real[:, None] & (n < N)[None, :],
        other=0.0,
    )
    pe_query = tl.load(
        q_pe + token[:, None] * pe_t + head * pe_h + p[None, :],
        mask=real[:, None] & (p < P)[None, :],
        other=0.0,
    )

    low = length - new + block * BLOCK_M
    end = tl.cdiv(tl.minimum(low + BLOCK_M, length), BLOCK_K) * BLOCK_K
    diagonal = (low + 1) // BLOCK_K * BLOCK_K
    base = seq.to(tl.int64) * max_kv
    key = expanded + base * expanded_row + head * (N + V)
    pe = gathered + base * (R + P) + R

    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    # fmt: off
    acc, top, total = attend_tiles(
        acc, top, total, nope_query, pe_query, position, key, pe, key + N, expanded_row, R + P,
        0, diagonal, length, scale,
        N, P, V, BLOCK_M, BLOCK_K, BLOCK_N, BLOCK_P, BLOCK_V, False,
    )
    acc, top, total = attend_tiles(
        acc, top, total, nope_query, pe_query, position, key, pe, key + N, expanded_row, R + P,
        diagonal, end, length, scale,
        N, P, V, BLOCK_M, BLOCK_K, BLOCK_N, BLOCK_P, BLOCK_V, True,
    )
    # fmt: on
    tl.store(
        out + token[:, None] * out_t + head * out_h + d[None, :],
        rounded(divided(acc, total), out.dtype.element_ty),
        mask=real[:, None] & (d < V)[None, :],
    )


@dataclass(frozen=True)
class Config:
    """Query tokens and keys of a tile, warps, pipeline stages."""

    block_m: int
    block_k: int
    num_warps: int
    num_stages: int


def config(dtype: torch.dtype, capability: int) -> Config:
    if dtype == torch.float32:
        return Config(16, 16, 4, 2)
    return Config(128, 64, 8, 3) if capability == 90 else Config(128, 32, 8, 2)


def head_groups(heads: int, bytes_per_head: int, budget: int = SCRATCH_BYTES) -> list[slice]:
    """The fewest groups of nearly equal size within the budget; a group has one head at least."""
    most = max(1, budget // max(bytes_per_head, 1))
    count = -(-heads // most)
    bounds = [heads * i // count for i in range(count + 1)]
    return [slice(a, b) for a, b in pairwise(bounds)]


def gather(cache: torch.Tensor, batch: DeviceBatch, dtype: torch.dtype) -> torch.Tensor:
    """[B * max_kv, R + P]: the sequences' rows, in `dtype`."""
    width = cache.shape[-1]
    slots = batch.sequences * batch.max_kv
    gathered = torch.empty((slots, width), dtype=dtype, device=cache.device)
    gather_kernel[(triton.cdiv(batch.max_kv, _GATHERED), batch.sequences)](
        cache,
        gathered,
        batch.kv_len,
        batch.block_table,
        cache.stride(0),
        batch.block_table.stride(0),
        batch.max_kv,
        WIDTH=width,
        BLOCK_N=_GATHERED,
        BLOCK_W=padded(width),
        PAGE=batch.page_size,
        num_warps=8,
        **dependent_launch(),
    )
    return gathered


def attend(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    expanded: torch.Tensor,
    gathered: torch.Tensor,
    batch: DeviceBatch,
    out: torch.Tensor,
    *,
    scale: float,
    override: Config | None = None,
) -> None:
    """expanded [slots, heads * (N + V)] of the heads that q and out are views of."""
    tokens, heads, nope = q_nope.shape
    used = override or config(q_nope.dtype, capability(q_nope))
    blocks = tokens // used.block_m + batch.sequences
    attend_kernel[(heads, blocks)](
        q_nope,
        q_pe,
        expanded,
        gathered,
        out,
        batch.seq_start,
        batch.kv_len,
        q_nope.stride(0),
        q_nope.stride(1),
        q_pe.stride(0),
        q_pe.stride(1),
        out.stride(0),
        out.stride(1),
        expanded.stride(0),
        batch.max_kv,
        scale,
        batch.sequences,
        N=nope,
        P=q_pe.shape[-1],
        V=out.shape[-1],
        R=gathered.shape[-1] - q_pe.shape[-1],
        BLOCK_M=used.block_m,
        BLOCK_K=used.block_k,
        BLOCK_N=padded(nope),
        BLOCK_P=padded(q_pe.shape[-1]),
        BLOCK_V=padded(out.shape[-1]),
        SEQS=padded(batch.sequences, 1),
        num_warps=used.num_warps,
        num_stages=used.num_stages,
        **dependent_launch(),
    )


@cuda_kernel("mla.attend_expanded", name="triton.mla_attend_expanded", nmse=2e-5)
def mla_attend_expanded(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv: State,
    batch: DeviceBatch,
    kv_b: torch.Tensor,
    *,
    out: tuple[torch.Tensor],
    layer: int,
    scale: float,
    override: Config | None = None,
    budget: int = SCRATCH_BYTES,
) -> None:
    """`override` and `budget` are for sweeps and tests."""
    (result,) = out
    cache = kv.parts[0][layer]
    assert q_nope.stride(-1) == q_pe.stride(-1) == cache.stride(-1) == result.stride(-1) == 1
    heads, rank = q_nope.shape[1], kv_b.shape[1]
    each = kv_b.shape[0] // heads
    gathered = gather(cache, batch, q_nope.dtype)
    weights = kv_b.to(q_nope.dtype)
    groups = head_groups(heads, gathered.shape[0] * each * gathered.element_size(), budget)
    most = max(g.stop - g.start for g in groups)
    scratch = gathered.new_empty(gathered.shape[0] * most * each)
    for group in groups:
        width = (group.stop - group.start) * each
        expanded = scratch[: gathered.shape[0] * width].view(gathered.shape[0], width)
        rows = weights[group.start * each : group.stop * each]
        torch.mm(gathered[:, :rank], rows.t(), out=expanded)
        attend(
            q_nope[:, group],
            q_pe[:, group],
            expanded,
            gathered,
            batch,
            result[:, group],
            scale=scale,
            override=override,
        )


SWEEP = [
    Config(*c)
    for c in [
        (128, 64, 8, 3),
        (128, 64, 8, 2),
        (128, 128, 8, 2),
        (128, 64, 4, 3),
        (128, 32, 8, 4),
        (64, 64, 4, 3),
        (64, 64, 4, 2),
    ]
]


def _attend_case(dtype: str, capability: int) -> CompileCase:
    used = config(torch.float32 if dtype == "fp32" else torch.bfloat16, capability)
    tensors = ("q_nope", "q_pe", "expanded", "gathered", "out")
    signature = {n: f"*{dtype}:16" for n in tensors}
    signature |= {n: "*i32:16" for n in ("seq_start", "kv_len")}
    strides = ("nope_t", "nope_h", "pe_t", "pe_h", "out_t", "out_h", "expanded_row")
    signature |= dict.fromkeys(strides, "i32:16")
    signature |= {"max_kv": "i32", "scale": "fp32", "sequences": "i32"}
    constants: dict[str, object] = {"N": 128, "P": 64, "V": 128, "R": 512, "SEQS": 16}
    constants |= {"BLOCK_M": used.block_m, "BLOCK_K": used.block_k}
    constants |= {"BLOCK_N": 128, "BLOCK_P": 64, "BLOCK_V": 128}
    return CompileCase(
        attend_kernel,
        f"mla_attend_expanded {dtype} sm_{capability}",
        signature,
        constants,
        used.num_warps,
        used.num_stages,
        [capability],
    )


_GATHER_CASE = CompileCase(
    gather_kernel,
    "mla_attend_expanded gather bf16",
    {
        "cache": "*bf16:16",
        "gathered": "*bf16:16",
        "kv_len": "*i32:16",
        "table": "*i32:16",
        "cache_row": "i32:16",
        "table_b": "i32",
        "max_kv": "i32",
    },
    {"WIDTH": 576, "BLOCK_N": _GATHERED, "BLOCK_W": 1024, "PAGE": 32},
    num_warps=8,
)

COMPILE_CASES = [
    _GATHER_CASE,
    *(_attend_case(t, c) for c in (80, 86, 89, 90, 120) for t in ("bf16", "fp16", "fp32")),
]

__all__ = ["COMPILE_CASES", "SWEEP", "Config", "config", "head_groups", "mla_attend_expanded"]
