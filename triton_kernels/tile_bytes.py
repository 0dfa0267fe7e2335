# pyright: basic, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
"""Rows of x as bytes, times packed 4-bit weights: `dp4a` takes four products an instruction.

    sum over 16 columns of weight * x  ~  factor of the group * scale of x * (sum of nibble * byte
                                          - offset * sum of bytes)

The 16 columns of two blocks are rounded to 8 bits with a scale of their own, which costs 2.4e-5 of
the sum's square (`COLUMNS` normal numbers: E(largest ^ 2) / (12 * 127^2)); the CPU rounds 256
columns at once.  The sum in brackets is an integer: it starts at 1.5 * 2^23 minus what the offset
takes, so that its bits are a float32's, and nothing is converted.  Two blocks have one factor, one
addition and one FMA: with 8 rows of words for each thread's 16 columns of x, int4 takes 2.2
instructions a weight and int4p 2.5 (tile_words.py has the budget).
"""

import torch
import triton
import triton.language as tl

from ktgraph.triton_kernels.dots import INTERPRETED
from ktgraph.triton_kernels.tile_words import factors

COLUMNS = 16  # that share a scale: two blocks
_PLAIN = tl.constexpr(INTERPRETED)  # the interpreter runs no inline PTX
_MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: the integer part of a float32 in its lowest bits
_MAGIC_BITS = tl.constexpr(0x4B400000)
_LEAST = tl.constexpr(1e-30)


def in_quads(x: torch.Tensor) -> bool:
    """Whether rows of 16-bit x [T, K] can be loaded 4 columns at a time, as one 64-bit word."""
    at = x.data_ptr() % 8 == 0 and (x.shape[0] == 1 or x.stride(0) % 4 == 0)
    return at and x.shape[1] % 4 == 0


@triton.jit
def dot4(words, x, total, UNSIGNED: tl.constexpr):
    """total + the sum of 4 products of the bytes of words (unsigned or signed) and x (signed)."""
    if _PLAIN:
        for byte in tl.static_range(4):
            w = (words.to(tl.int32, bitcast=True) << (24 - 8 * byte)) >> 24
            if UNSIGNED:
                w = w & 255
            total += w * ((x << (24 - 8 * byte)) >> 24)
        return total
    elif UNSIGNED:
        return tl.inline_asm_elementwise(
            "dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r", [words, x, total], tl.int32, True, 1
        )
    else:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [words, x, total], tl.int32, True, 1
        )


@triton.jit
def _low_bytes(a, b, c, d):
    """The lowest bytes of four words, as one word."""
    if _PLAIN:
        return (a & 255) | ((b & 255) << 8) | ((c & 255) << 16) | (d << 24)
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, u;
            prmt.b32 t, $1, $2, 0x0040;
            prmt.b32 u, $3, $4, 0x0040;
            prmt.b32 $0, t, u, 0x5410;
            }""",
            "=r,r,r,r,r",
            [a, b, c, d],
            tl.int32,
            True,
            1,
        )


@triton.jit
def _byte(value, inverse):
    """value * inverse, at most 127 in size, rounded to the lowest byte of a word."""
    return (value * inverse + _MAGIC).to(tl.int32, bitcast=True)


@triton.jit
def _word(four, inverse):
    """Four numbers as the bytes of a word."""
    a, b, c, d = four
    return _low_bytes(_byte(a, inverse), _byte(b, inverse), _byte(c, inverse), _byte(d, inverse))


@triton.jit
def _larger(a, b):
    """The larger one; NaN when one of them is: then it is the scale, and the sum, too."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _largest(four):
    a, b, c, d = four
    return _larger(_larger(tl.abs(a), tl.abs(b)), _larger(tl.abs(c), tl.abs(d)))


@triton.jit
def column_of(x, at, cols, valid, EVEN: tl.constexpr):
    """Columns `at` of x as f32; 0 past the end."""
    if EVEN:
        return tl.load(x + at).to(tl.float32)
    else:
        # One row of x: a mask by tile would send it through shared memory (see `_step`).
        has = (at < cols) & valid if x.type.is_block() else at < cols
        return tl.load(x + at, mask=has, other=0.0).to(tl.float32)


@triton.jit
def _half(word, kind: tl.constexpr):
    """The lower 16 bits as f32."""
    return word.to(tl.uint16).to(kind, bitcast=True).to(tl.float32)


@triton.jit
def _four(x, at, cols, valid, EVEN: tl.constexpr, QUADS: tl.constexpr):
    """Columns at .. at + 3 of x as f32, `at` a multiple of 4; 0 past the end."""
    if not QUADS:
        return (
            column_of(x, at, cols, valid, EVEN),
            column_of(x, at + 1, cols, valid, EVEN),
            column_of(x, at + 2, cols, valid, EVEN),
            column_of(x, at + 3, cols, valid, EVEN),
        )
    else:
        kind: tl.constexpr = x.dtype.scalar.element_ty
        words_at = x.to(tl.pointer_type(tl.uint64)) + at // 4
        if EVEN:
            word = tl.load(words_at)
        else:
            has = (at < cols) & valid if x.type.is_block() else at < cols
            word = tl.load(words_at, mask=has, other=0)
        low, high = word.to(tl.uint32), (word >> 32).to(tl.uint32)
        return _half(low, kind), _half(low >> 16, kind), _half(high, kind), _half(high >> 16, kind)


@triton.jit
def byte_products(
    x,
    words,
    more,
    codes,
    first,
    cols,
    valid,
    FORMAT: tl.constexpr,
    EVEN: tl.constexpr,
    QUADS: tl.constexpr,
):
    """Sums over 16 columns from `first`, those of `words` and of the block behind it, `more`."""
    a = _four(x, first, cols, valid, EVEN, QUADS)
    b = _four(x, first + 4, cols, valid, EVEN, QUADS)
    c = _four(x, first + 8, cols, valid, EVEN, QUADS)
    d = _four(x, first + 12, cols, valid, EVEN, QUADS)
    most = _larger(_larger(_largest(a), _largest(b)), _larger(_largest(c), _largest(d)))
    x_scale = most * (1.0 / 127.0)
    inverse = 127.0 / tl.maximum(most, _LEAST)
    a, b, c, d = _word(a, inverse), _word(b, inverse), _word(c, inverse), _word(d, inverse)
    zero = a * 0
    ones = zero + 0x01010101
    total = dot4(ones, b, dot4(ones, a, zero, False), False)
    total = dot4(ones, d, dot4(ones, c, total, False), False)
    whole = words.to(tl.int32, bitcast=True) * 0 + (_MAGIC_BITS - 8 * total)
    if FORMAT == "int4":
        factor = factors(codes, FORMAT)[0] * x_scale
    else:
        code = codes.to(tl.uint32)
        whole += (code >> 7).to(tl.int32) * total  # offset 7
        above = (((code & 15) << 19) | 0x41800000).to(tl.float32, bitcast=True)  # 16 + factor
        factor = above * x_scale - 16.0 * x_scale
    whole = dot4(words & 0x0F0F0F0F, a, whole, True)
    whole = dot4((words >> 4) & 0x0F0F0F0F, b, whole, True)
    whole = dot4(more & 0x0F0F0F0F, c, whole, True)
    whole = dot4((more >> 4) & 0x0F0F0F0F, d, whole, True)
    return (whole.to(tl.float32, bitcast=True) - _MAGIC) * factor


__all__ = ["COLUMNS", "byte_products", "column_of", "in_quads"]
