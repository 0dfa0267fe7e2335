# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
"""mla.attend with 64 heads or more on sm_90: the matrix units bind, so layouts are given by hand.

    out[t, h] = sum_s softmax_s(scale * (q_lat[t, h] . c[s] + q_pe[t, h] . k_pe[s])) c[s]

Source: FlashMLA (DeepSeek, 2025): 64 heads of one token, whose accumulator [64, 512] fills the
registers of two warpgroups, 256 columns each.  Written in Gluon, Triton's language of explicit
layouts: `tl.dot` gives each warpgroup all 64 x 64 scores as soon as another product follows, so
that they are computed twice, and loads the next tile only when this one is done with.

Tiling: a program has 64 heads of one token and every n-th share of its keys.  The scores of 64 keys
are computed once, 32 keys a warpgroup; their weights meet in shared memory, as do both halves'
largest scores.  Two tiles of latent rows [64, 512 + 64], each key and value at once, take turns;
the next one is on its way while this one is computed.  With the queries that is 224 KB.

Floor: 2 * H * (2 * R + P) FLOP a row: see `mla_decode`.  By count a step of 64 keys has 1,152
cycles of scores (1,728 as products of 32 keys read their queries from shared memory too) and 1,024
of sums; an H200 takes 2.6 us for it.  At batch 16 and 8,192 rows with 128 heads that is 96 us, 56 %
of the rate that cuBLAS reaches.

Numerics: as `mla_decode`.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ktgraph.triton_kernels.attention_tiles import multiprocessors, small
from ktgraph.triton_kernels.batch import DeviceBatch
from ktgraph.triton_kernels.compile import CompileCase
from ktgraph.triton_kernels.dependent import dependent_launch, enter
from ktgraph.triton_kernels.sdpa_decode import splits_for
from ktgraph.triton_kernels.split_combine import Partials, combine

HEADS = 64  # of a program
KEYS = 64  # of a step
WARPS = 8
LATENT, ROPE = 512, 64  # the only sizes that the layouts are made for

_LOG2E = gl.constexpr(1.4426950408889634)
# Triton 3.6 has the older name.
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_commit, _arrived = async_copy.commit_group, async_copy.wait_group
_barrier = getattr(gl, "thread_barrier", None) or gl.barrier


def fits(q_lat: torch.Tensor, q_pe: torch.Tensor, cache: torch.Tensor, capability: int) -> bool:
    """Whether the kernel takes queries [T, H, R] and [T, H, P] and cache rows [C, R + P]."""
    heads, rank = q_lat.shape[1:]
    in_16_bits = q_lat.dtype == cache.dtype in (torch.bfloat16, torch.float16)
    sizes = heads % HEADS == 0 and rank == LATENT and q_pe.shape[2] == ROPE
    return capability == 90 and in_16_bits and sizes and _is_aligned(q_lat, q_pe, cache)


def _is_aligned(*operands: torch.Tensor) -> bool:
    """Whether every row can be copied 16 bytes at a time, as Triton sees it: strides by 16."""
    strides = [s for x in operands for s in x.stride()[:-1]]
    return all(s % 16 == 0 for s in strides) and all(x.data_ptr() % 16 == 0 for x in operands)


@gluon.jit
def _slots(table, first, last, row, PAGE: gl.constexpr):
    """Cache rows of first + row; those from `last` on as last - 1, whose scores are masked."""
    rows = gl.minimum(first + row, last - 1)
    return gl.load(table + rows // PAGE) * PAGE + rows % PAGE


@gluon.jit
def _fetch(cache, slots, cache_row, column, rope, latent, pe, SMALL: gl.constexpr):
    """Start to copy a tile's rows to shared memory."""
    if not SMALL:
        slots = slots.to(gl.int64)
    at = cache + slots * cache_row
    _copy(latent, at[:, None] + column[None, :])
    _copy(pe, at[:, None] + rope[None, :])
    _commit()


@gluon.jit
def attend_kernel(
    q_lat,
    q_pe,
    cache,
    out,
    acc_parts,
    top_parts,
    total_parts,
    tok_seq,
    tok_pos,
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
    H: gl.constexpr,
    PAGE: gl.constexpr,
    SPLIT: gl.constexpr,
    SMALL: gl.constexpr,
):
    """8 warps; a thread has the same rows of scores and of sums."""
    M: gl.constexpr = 64
    N: gl.constexpr = 64
    R: gl.constexpr = 512
    P: gl.constexpr = 64
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, N // 2, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, R // 2, 16])
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    # Both halves' largest scores of a row, in the threads that have the row.
    BOTH: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [8, 0]],
        [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0], [0, 0]],
        [],
        [64, 2],
    )
    kind: gl.constexpr = q_lat.dtype.element_ty
    enter()
    number = gl.num_programs(0) - 1 - gl.program_id(0)  # the last tokens have the most keys
    split = gl.program_id(1)
    token, head = (number // (H // M)).to(gl.int64), number % (H // M) * M
    last = gl.load(tok_pos + token) + 1
    table += gl.load(tok_seq + token).to(gl.int64) * table_b
    share = gl.cdiv(gl.cdiv(last, N), splits) * N
    begin = split * share
    end = gl.minimum(begin + share, last)

    row = gl.arange(0, M, layout=gl.SliceLayout(1, COPY))
    column = gl.arange(0, R, layout=gl.SliceLayout(0, COPY))
    rope = gl.arange(0, P, layout=gl.SliceLayout(0, COPY))
    queries = gl.allocate_shared_memory(kind, [M, R], SHARED)
    pe_queries = gl.allocate_shared_memory(kind, [M, P], SHARED)
    latents = gl.allocate_shared_memory(kind, [2, N, R], SHARED)
    pes = gl.allocate_shared_memory(kind, [2, N, P], SHARED)
    weights = gl.allocate_shared_memory(kind, [M, N], SHARED)
    tops = gl.allocate_shared_memory(gl.float32, [M, 2], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    _copy(queries, (q_lat + token * lat_t + (head + row) * lat_h)[:, None] + column[None, :])
    _copy(pe_queries, (q_pe + token * pe_t + (head + row) * pe_h)[:, None] + rope[None, :])
    slots = _slots(table, begin, last, row, PAGE)
    _fetch(cache, slots, cache_row, column, R + rope, latents.index(0), pes.index(0), SMALL)
    slots = _slots(table, begin + N, last, row, PAGE)

    factor = scale * _LOG2E
    acc = gl.zeros([M, R], gl.float32, layout=SUMS)
    zeros = gl.zeros([M, N], gl.float32, layout=SCORES)
    top = gl.full([M], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
    total = gl.sum(zeros.reshape([M, 2, N // 2]), 2)  # of each warpgroup's keys
    key = gl.arange(0, N, layout=gl.SliceLayout(0, SCORES))
    turn = 0
    for first in range(begin, end, N):
        _arrived(0)
        fence_async_shared()
        _barrier()  # the tile is here, and nobody reads the other one or the weights any more
        latent, pe = latents.index(turn), pes.index(turn)
        scores = warpgroup_mma(pe_queries, pe.permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma(queries, latent.permute((1, 0)), scores, is_async=True)
        turn = turn ^ 1
        if first + N < end:
            following, pe = latents.index(turn), pes.index(turn)
            _fetch(cache, slots, cache_row, column, R + rope, following, pe, SMALL)
            slots = _slots(table, first + 2 * N, last, row, PAGE)
        scores = warpgroup_mma_wait(0, deps=[scores])
        scores = gl.where((first + key < last)[None, :], scores, float("-inf"))
        tops.store(
            gl.max(scores.reshape([M, 2, N // 2]), 2)
        )  # one barrier; gl.max(scores, 1) has two
        most = gl.convert_layout(gl.max(tops.load(BOTH), 1), gl.SliceLayout(1, SCORES))
        higher = gl.maximum(top, most)  # finite: each tile has a row that is seen
        shrink = gl.exp2((top - higher) * factor)
        top = higher
        weight = gl.exp2(scores * factor - (higher * factor)[:, None])
        weights.store(weight.to(kind))
        fence_async_shared()
        sums = gl.sum(weight.reshape([M, 2, N // 2]), 2)
        by_half = gl.convert_layout(shrink, gl.SliceLayout(1, total.type.layout))
        total = total * by_half[:, None] + sums
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
        _barrier()  # the weights are all there
        acc = warpgroup_mma(weights, latent, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])

    _arrived(0)
    total = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, SCORES))
    m = gl.arange(0, M, layout=gl.SliceLayout(1, SUMS))
    r = gl.arange(0, R, layout=gl.SliceLayout(0, SUMS))
    if SPLIT:
        of_row = (
            token * H + head + gl.arange(0, M, layout=gl.SliceLayout(1, SCORES))
        ) * splits + split
        gl.store(top_parts + of_row, top * factor)
        gl.store(total_parts + of_row, total)
        if begin < end:
            part = (token * H + head + m) * splits + split
            gl.store((acc_parts + part * R)[:, None] + r[None, :], acc)
    else:
        whole = gl.convert_layout(total, gl.SliceLayout(1, SUMS))
        result = (acc / whole[:, None]).to(out.dtype.element_ty)
        gl.store((out + token * out_t + (head + m) * out_h)[:, None] + r[None, :], result)


def attend(
    q_lat: torch.Tensor,
    q_pe: torch.Tensor,
    cache: torch.Tensor,
    batch: DeviceBatch,
    out: torch.Tensor,
    scale: float,
    splits: int | None,
) -> None:
    """`cache` holds the rows of one layer [C, R + P]."""
    tokens, heads, _ = q_lat.shape
    blocks = tokens * heads // HEADS
    if splits is None:
        splits = splits_for(blocks, batch.max_kv, multiprocessors(q_lat), KEYS)
    parts = Partials.like(out, splits) if splits > 1 else None
    attend_kernel[(blocks, splits)](
        q_lat,
        q_pe,
        cache,
        out,
        parts.acc if parts else None,
        parts.top if parts else None,
        parts.total if parts else None,
        batch.tok_seq,
        batch.tok_pos,
        batch.block_table,
        q_lat.stride(0),
        q_lat.stride(1),
        q_pe.stride(0),
        q_pe.stride(1),
        cache.stride(0),
        out.stride(0),
        out.stride(1),
        batch.block_table.stride(0),
        scale,
        splits,
        H=heads,
        PAGE=batch.page_size,
        SPLIT=splits > 1,
        SMALL=small(cache),
        num_warps=WARPS,
        **dependent_launch(),
    )
    if parts is not None:
        combine(parts, out, None)


def _case(dtype: str, page: int, *, split: bool, small: bool) -> CompileCase:
    signature = {n: f"*{dtype}:16" for n in ("q_lat", "q_pe", "cache", "out")}
    signature |= {n: "*i32:16" for n in ("tok_seq", "tok_pos", "table")}
    strides = ("lat_t", "lat_h", "pe_t", "pe_h", "cache_row", "out_t", "out_h")
    signature |= dict.fromkeys(strides, "i32:16")
    signature |= {"table_b": "i32", "scale": "fp32", "splits": "i32"}
    constants: dict[str, object] = {"H": 128, "PAGE": page, "SPLIT": split, "SMALL": small}
    parts = ("acc_parts", "top_parts", "total_parts")
    if split:
        signature |= dict.fromkeys(parts, "*fp32:16")
    else:
        constants |= dict.fromkeys(parts)
    name = f"mla_attend_sm90 {dtype} page {page}{' split' if split else ''}"
    return CompileCase(attend_kernel, name, signature, constants, WARPS, 1, [90])


COMPILE_CASES = [
    _case("bf16", 32, split=True, small=True),
    _case("bf16", 32, split=False, small=False),
    _case("fp16", 4, split=True, small=False),
]

__all__ = ["COMPILE_CASES", "HEADS", "KEYS", "WARPS", "attend", "attend_kernel", "fits"]
