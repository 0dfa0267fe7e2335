# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportAssignmentType=false
"""Sort (token, expert) pairs by expert on the device, padded to blocks of rows.

A grouped GEMM works on blocks of `block_m` rows that belong to one expert.  `align` is a stable
counting sort of the flat ids [T*K] (pair p is choice p % K of token p // K) that writes

    order[blocks * block_m]  pair of each row; rows that a block does not use hold garbage
    block_expert[blocks]     expert of each block; 0 for blocks past the last used one
    block_rows[blocks]       rows in use of each block, 1..block_m; 0: the block is to be skipped

Pairs whose id is -1 take part in no block.  `blocks` is an upper bound that the host knows, so no
result travels to the host; used blocks come first, ordered by expert.

Tiling: a program owns a chunk of pairs and walks it in sub-chunks, whose one-hot matrix
[SUB, E] gives counts by a sum over rows and ranks by a product with a triangle of ones, which is
exact in float16 with float32 sums and cheaper than a running sum.  One chunk takes one launch; more
take two: counts of each chunk, then every program sums the counts of all chunks (those of earlier
ones are its base) and places its pairs.  Sums run over matrices, whose rows are added up once, at
the end.  No atomics, so the order is always the same.

Bytes: 4 per pair read once or twice and written once; the time is that of one or two launches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ktgraph.triton_kernels.compile import CompileCase
from ktgraph.triton_kernels.dependent import dependent_launch, enter
from ktgraph.triton_kernels.dots import dot

_SINGLE = 1024  # most pairs that one program sorts alone, in one launch
_CHUNK = 256  # pairs of a program where there are more: 16,384 pairs keep 64 multiprocessors busy
_ONE_HOT = 8192  # most elements of a one-hot matrix: SUB * experts
_MOST_SUB = 128  # the triangle has SUB * SUB elements
_LEAST = 16  # experts of a matrix that `dot` takes
_MOST_ROWS = 1 << 24  # that float32 counts


@dataclass(frozen=True)
class Alignment:
    """Rows of a grouped GEMM, sorted by expert (see the file's docstring)."""

    order: torch.Tensor
    block_expert: torch.Tensor
    block_rows: torch.Tensor
    block_m: int

    @property
    def blocks(self) -> int:
        return self.block_expert.shape[0]

    @property
    def rows(self) -> int:
        """Rows of the sorted matrix, padding included."""
        return self.order.shape[0]


def max_blocks(pairs: int, experts: int, block_m: int) -> int:
    """The most blocks any choice of experts can need: every touched expert wastes part of one."""
    return pairs // block_m + min(pairs, experts)


def _sub_chunk(experts: int) -> int:
    return min(_MOST_SUB, max(16, _ONE_HOT // experts))


def _counted_at_once(experts: int) -> int:
    """Half of them: on sm_80 two matrices of all would not fit into registers."""
    return max(16, _sub_chunk(experts) // 2)


def _warps(experts: int) -> int:
    return 4 if experts <= 256 else 8


def align(ids: torch.Tensor, experts: int, block_m: int) -> Alignment:
    """Sort ids i32[T, K] (contiguous) by expert.  Only launches; allocates the results."""
    assert ids.dtype == torch.int32
    assert ids.is_contiguous()
    pairs, blocks = ids.numel(), max_blocks(ids.numel(), experts, block_m)
    if blocks * block_m >= _MOST_ROWS:
        raise ValueError(
            f"{pairs} choices of experts in one call, and less than {_MOST_ROWS} are sorted at "
            "once: compile with a smaller max_tokens"
        )

    def made(count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.int32, device=ids.device)

    result = Alignment(made(blocks * block_m), made(blocks), made(blocks), block_m)
    padded = max(_LEAST, triton.next_power_of_2(experts))
    chunk = _SINGLE if pairs <= _SINGLE else _CHUNK
    chunks = triton.cdiv(pairs, chunk)
    sub = _sub_chunk(padded)
    counts = made(chunks * padded)
    if chunks > 1:
        _count_chunks[(chunks,)](
            ids,
            counts,
            pairs,
            CHUNK=chunk,
            SUB=_counted_at_once(padded),
            E=padded,
            num_warps=_warps(padded),
            **dependent_launch(),
        )
    _place[(chunks,)](
        ids,
        counts,
        result.order,
        result.block_expert,
        result.block_rows,
        pairs,
        blocks,
        chunks,
        BLOCK_M=block_m,
        CHUNK=chunk,
        SUB=sub,
        E=padded,
        SINGLE=chunks == 1,
        num_warps=_warps(padded),
        **dependent_launch(),
    )
    return result


@triton.jit
def _one_hot(ids, at, pairs, SUB: tl.constexpr, E: tl.constexpr):
    """[SUB, E] matrix of 0 and 1; a row of zeros for a skipped pair."""
    i = at + tl.arange(0, SUB)
    expert = tl.load(ids + i, mask=i < pairs, other=-1)
    return (expert[:, None] == tl.arange(0, E)[None, :]).to(tl.int32)


@triton.jit
def _count(ids, start, pairs, CHUNK: tl.constexpr, SUB: tl.constexpr, E: tl.constexpr):
    """Pairs of each expert in the chunk at `start`."""
    found = tl.zeros([SUB, E], dtype=tl.int32)
    for at in range(start, min(start + CHUNK, pairs), SUB):
        found += _one_hot(ids, at, pairs, SUB, E)
    return tl.sum(found, axis=0)


@triton.jit
def _count_chunks(ids, counts, pairs, CHUNK: tl.constexpr, SUB: tl.constexpr, E: tl.constexpr):
    enter()
    chunk = tl.program_id(0)
    total = _count(ids, chunk * CHUNK, pairs, CHUNK, SUB, E)
    tl.store(counts + chunk * E + tl.arange(0, E), total)


@triton.jit
def _place(
    ids,
    counts,
    order,
    block_expert,
    block_rows,
    pairs,
    blocks,
    chunks,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    SUB: tl.constexpr,
    E: tl.constexpr,
    SINGLE: tl.constexpr,
):
    enter()
    chunk = tl.program_id(0)
    expert = tl.arange(0, E)
    if SINGLE:
        total = _count(ids, 0, pairs, CHUNK, SUB, E)
        earlier = tl.zeros([E], dtype=tl.int32)
    else:
        ROWS: tl.constexpr = max(8, 2048 // E)
        whole = tl.zeros([ROWS, E], dtype=tl.int32)
        part_before = tl.zeros([ROWS, E], dtype=tl.int32)
        for c0 in range(0, chunks, ROWS):
            c = c0 + tl.arange(0, ROWS)
            part = tl.load(counts + c[:, None] * E + expert, mask=(c < chunks)[:, None], other=0)
            whole += part
            part_before += tl.where((c < chunk)[:, None], part, 0)
        total = tl.sum(whole, axis=0)
        earlier = tl.sum(part_before, axis=0)  # pairs of each expert in the chunks before this one

    used = (total + BLOCK_M - 1) // BLOCK_M  # blocks of each expert
    end = tl.cumsum(used, axis=0)
    first = end - used
    _write_blocks(
        block_expert, block_rows, total, first, end, chunk, chunks, blocks, BLOCK_M, SUB, E
    )

    base = first * BLOCK_M + earlier
    start = chunk * CHUNK
    i = tl.arange(0, SUB)
    up_to = (i[:, None] >= i[None, :]).to(tl.float16)
    for at in range(start, min(start + CHUNK, pairs), SUB):
        hot = _one_hot(ids, at, pairs, SUB, E)
        before = tl.zeros([SUB, E], tl.float32) + (base - 1).to(tl.float32)[None, :]
        rows = dot(up_to, hot.to(tl.float16), before)
        row = tl.sum(tl.where(hot == 1, rows, 0.0), axis=1).to(tl.int32)
        chosen = tl.sum(hot, axis=1) > 0
        tl.store(order + row, at + i, mask=chosen)
        base += tl.sum(hot, axis=0)


@triton.jit
def _write_blocks(
    block_expert,
    block_rows,
    total,
    first,
    end,
    chunk,
    chunks,
    blocks,
    BLOCK_M: tl.constexpr,
    SUB: tl.constexpr,
    E: tl.constexpr,
):
    """Expert and rows of each block; the programs share the blocks in strides of SUB."""
    for at in range(chunk * SUB, blocks, chunks * SUB):
        b = at + tl.arange(0, SUB)
        mine = (b[:, None] >= first[None, :]) & (b[:, None] < end[None, :])
        left = total[None, :] - (b[:, None] - first[None, :]) * BLOCK_M
        rows = tl.sum(tl.where(mine, tl.minimum(left, BLOCK_M), 0), axis=1)
        owner = tl.sum(tl.where(mine, tl.arange(0, E)[None, :], 0), axis=1)
        tl.store(block_rows + b, rows, mask=b < blocks)
        tl.store(block_expert + b, owner, mask=b < blocks)


_PLACE_TYPES = {
    "ids": "*i32:16",
    "counts": "*i32:16",
    "order": "*i32:16",
    "block_expert": "*i32:16",
    "block_rows": "*i32:16",
    "pairs": "i32",
    "blocks": "i32",
    "chunks": "i32",
}
COMPILE_CASES = [
    *(
        CompileCase(
            _place,
            f"moe_align.place E={e} {'one' if single else 'many'}",
            _PLACE_TYPES,
            {
                "BLOCK_M": 64,
                "CHUNK": _SINGLE if single else _CHUNK,
                "SUB": _sub_chunk(e),
                "E": e,
                "SINGLE": single,
            },
            num_warps=_warps(e),
        )
        for e in (16, 128, 512)
        for single in (True, False)
    ),
    CompileCase(
        _count_chunks,
        "moe_align.count E=128",
        {"ids": "*i32:16", "counts": "*i32:16", "pairs": "i32"},
        {"CHUNK": _CHUNK, "SUB": _counted_at_once(128), "E": 128},
        num_warps=_warps(128),
    ),
]

__all__ = ["Alignment", "align", "max_blocks"]
