# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
"""Parts that the attention kernels share: which query rows a program has, where keys lie in a
paged cache, one step of the online softmax.

A *query row* is one (new token, head) pair.  The rows of a sequence are numbered
``token * SHARE + head`` with SHARE heads that read the same keys, so that a tile of query rows
holds several heads of a token and every key that is read serves them all.

Softmax is computed in base 2: scores are multiplied by scale * log2(e), and exp2 is one
instruction.  Rows that a query does not see score -inf; a row that has seen nothing yet has the
largest score -inf and the sum 0.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from ktgraph.triton_kernels.dots import INTERPRETED

_LOG2E = tl.constexpr(1.4426950408889634)
_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def block_of(
    seq_start, sequences, block, SHARE: tl.constexpr, BLOCK: tl.constexpr, SEQS: tl.constexpr
):
    """(sequence, block within it) of a block number, when sequences have different lengths.

    Sequence b owns the block numbers from ``seq_start[b] * SHARE // BLOCK + b`` on: that grows by
    at least its own number of blocks, so ``T * SHARE // BLOCK + B`` numbers suffice for any batch
    and no host needs to count.  Some numbers are left over: their block lies behind the sequence.
    """
    seq = tl.arange(0, SEQS)
    real = seq < sequences
    first = tl.load(seq_start + seq, mask=real, other=0) * SHARE // BLOCK + seq
    begun = real & (first <= block)
    return tl.sum(begun.to(tl.int32)) - 1, block - tl.max(tl.where(begun, first, 0))


@triton.jit
def cache_slots(table, first, length, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Cache row numbers (int32) of rows first + 0..BLOCK-1; `first` is a multiple of BLOCK.

    Rows from `length` on are given as row length - 1: loads need no mask, and a tile holds no
    number that was never written (0 * NaN is NaN).  Their scores are masked.  A tile that lies
    inside one page looks its page up once; else every row looks up its own.  Callers look up the
    next tile's rows before they load this one's: a load whose address comes from a load of the
    same iteration would take pipeline stages from the keys.
    """
    rows = tl.maximum(tl.minimum(first + tl.arange(0, BLOCK), length - 1), 0)
    if PAGE % BLOCK == 0:
        pages = tl.load(table + tl.maximum(tl.minimum(first, length - 1), 0) // PAGE)
    else:
        pages = tl.load(table + rows // PAGE)
    return pages * PAGE + rows % PAGE


@triton.jit
def load_tile(matrix, at, columns, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """[rows, BLOCK] of the rows that begin `at`; columns from SIZE on are 0."""
    where = matrix + (at[:, None] + columns[None, :])
    if SIZE == BLOCK:
        tile = tl.load(where)
    else:
        tile = tl.load(where, mask=(columns < SIZE)[None, :], other=0.0)
    return tile


@triton.jit
def offsets(slots, stride, SMALL: tl.constexpr):
    """slots * stride; with SMALL in 32 bits, half the registers for the addresses of a tile."""
    if not SMALL:
        slots = slots.to(tl.int64)
    return slots * stride


@triton.jit
def capped(scores, scale, SOFTCAP: tl.constexpr):
    """Raw products as base-2 logits; softcap * tanh(s / softcap) where one is asked for."""
    if SOFTCAP > 0:
        # tanh(x) = 1 - 2 / (exp(2x) + 1); no overflow: exp(2x) = inf gives 1
        e = tl.exp2(scores * (scale * 2 * _LOG2E / SOFTCAP))
        scores = (1 - 2 / (e + 1)) * (SOFTCAP * _LOG2E)
    else:
        scores = scores * (scale * _LOG2E)
    return scores


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """f32 x in `dtype`, rounded to nearest even; the interpreter alone would cut bf16 off."""
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def softmax_step(scores, top, total):
    """(weights, factor for what was summed before, new largest score, new sum)."""
    higher = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    return weights, shrink, higher, total * shrink + tl.sum(weights, 1)


@triton.jit
def with_sink(top, total, sink):
    """(factor for the weighted sum, sum) once a score without a value has joined the softmax."""
    sink = sink * _LOG2E
    higher = tl.maximum(top, sink)
    shrink = tl.exp2(top - higher)
    return shrink, total * shrink + tl.exp2(sink - higher)


@triton.jit
def divided(acc, total):
    """acc / total; 0 for a row that saw nothing (a token of no sequence)."""
    return acc / tl.where(total > 0, total, 1.0)[:, None]


def padded(size: int, least: int = 16) -> int:
    """The power of two that a tile axis of `size` takes; tl.dot wants 16 at least."""
    return max(least, triton.next_power_of_2(size))


def small(*parts: torch.Tensor) -> bool:
    """Whether element offsets in these fit 32 bits."""
    return all(p.shape[0] * p.stride(0) < 1 << 31 for p in parts)


@cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


@cache
def _capability(index: int) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return major * 10 + minor


def multiprocessors(tensor: torch.Tensor) -> int:
    """Of the tensor's GPU; a small number in the interpreter, so that splits stay few there."""
    return _multiprocessors(tensor.device.index) if tensor.is_cuda else 8


def capability(tensor: torch.Tensor) -> int:
    """Compute capability of the tensor's GPU as 10 * major + minor; 80 in the interpreter."""
    return _capability(tensor.device.index) if tensor.is_cuda else 80


__all__ = [
    "block_of",
    "cache_slots",
    "capability",
    "capped",
    "divided",
    "load_tile",
    "multiprocessors",
    "offsets",
    "padded",
    "rounded",
    "small",
    "softmax_step",
    "with_sink",
]
