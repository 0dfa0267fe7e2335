# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
"""Packed tiles times up to 32 rows of x on the matrix units, operands straight from memory.

`mma.m16n8k16` (PTX ISA) multiplies 16 rows of weights with 8 rows of x.  Thread (g, q) = (lane / 4,
lane % 4) holds columns 2q, 2q + 1 and 2q + 8, 2q + 9 of rows g and g + 8 of the weights and of row
g of x.  Which rows and columns these are is ours to say, and so a thread has

    words  of rows 4 (g % 4) .. + 3, tile g / 4 of a pair of tiles, one 16-byte load: rows 0 and 1
           are rows g and g + 8 of a first product, rows 2 and 3 of a second one
    a unit of 32 columns: 8 of them, 8q .. 8q + 7, which is a block of 4-bit weights or two blocks
           of bytes; of x as many, one 16-byte load, too

and nothing moves between threads.  Written with one number of a thread for each element of a
tensor, [32 * WARPS]: element i is thread i's (`CompileCase.lockstep` sees to it).

A weight becomes bf16 or float16 without rounding; the sums of a group take its scale.  Of two tiles
and a unit a thread has 32 weights; by the machine code for sm_90 a weight takes

    int4   1.4 instructions to unpack, 0.25 for every 8 rows of x (products, scales of their sums)
    int4p  1.9 and 0.25
    int8   2.5 (float16: 1.3) and 0.13

and 0.3 for addresses and loads.  The next step's words take the registers of those just unpacked:
nothing is copied, and 16 bytes of every unit of a step are on their way at any time.
"""

import torch
import triton
import triton.language as tl

from ktgraph.triton_kernels.dependent import wait_for_inputs
from ktgraph.triton_kernels.dots import INTERPRETED
from ktgraph.triton_kernels.e4m3 import e4m3_operands
from ktgraph.triton_kernels.tile_rows import loads_stay_before
from ktgraph.triton_kernels.tile_words import factors, step_of

_PLAIN = tl.constexpr(INTERPRETED)  # the interpreter runs no inline PTX
UNIT = tl.constexpr(32)  # columns


def in_octets(x: torch.Tensor) -> bool:
    """Whether rows of 16-bit x [T, K] can be loaded 8 columns at a time, as 16 bytes."""
    at = x.data_ptr() % 16 == 0 and (x.shape[0] == 1 or x.stride(0) % 8 == 0)
    return at and x.shape[1] % 8 == 0


@triton.constexpr_function
def _units_of(group, units):
    """Units of a group; of a step, where there are no groups."""
    return group // 32 or units


@triton.constexpr_function
def _code_bytes(format):
    """Of a group's 16 rows."""
    return {"fp8": 64, "int4": 32, "int4p": 16, "int8": 0}[format]


@triton.jit
def _quad(at, inside, KIND: tl.constexpr):
    """Four 32-bit words from `at`, aligned to 16 bytes.

    KIND: "always" there, or only where `inside`: "rest" is never looked at, or 0; these of weights,
    which any compiler may move.  The same of x stays behind the wait for x.
    """
    if _PLAIN:  # as PTX: read whether inside or not, and anything (here NaN) where nothing is read
        inside |= KIND == "always" or KIND == "x, always"
        other: tl.constexpr = 0xFFFFFFFF if KIND == "rest" or KIND == "x, rest" else 0
        a = tl.load(at, mask=inside, other=other)
        b = tl.load(at + 1, mask=inside, other=other)
        c = tl.load(at + 2, mask=inside, other=other)
        d = tl.load(at + 3, mask=inside, other=other)
        return a, b, c, d
    elif KIND == "always":
        return tl.inline_asm_elementwise(
            "ld.global.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];",
            "=r,=r,=r,=r,l",
            [at.to(tl.int64)],
            (tl.uint32, tl.uint32, tl.uint32, tl.uint32),
            True,
            1,
        )
    elif KIND == "rest":
        return tl.inline_asm_elementwise(
            """{
            .reg .pred p;
            setp.ne.b32 p, $5, 0;
            @p ld.global.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];
            }""",
            "=r,=r,=r,=r,l,r",
            [at.to(tl.int64), inside.to(tl.int32)],
            (tl.uint32, tl.uint32, tl.uint32, tl.uint32),
            True,
            1,
        )
    elif KIND == "zeros":
        return tl.inline_asm_elementwise(
            """{
            .reg .pred p;
            setp.ne.b32 p, $5, 0;
            mov.b32 $0, 0;
            mov.b32 $1, 0;
            mov.b32 $2, 0;
            mov.b32 $3, 0;
            @p ld.global.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];
            }""",
            "=&r,=&r,=&r,=&r,l,r",
            [at.to(tl.int64), inside.to(tl.int32)],
            (tl.uint32, tl.uint32, tl.uint32, tl.uint32),
            True,
            1,
        )
    elif KIND == "x, always":
        return tl.inline_asm_elementwise(
            "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];",
            "=r,=r,=r,=r,l",
            [at.to(tl.int64)],
            (tl.uint32, tl.uint32, tl.uint32, tl.uint32),
            False,
            1,
        )
    elif KIND == "x, rest":
        return tl.inline_asm_elementwise(
            """{
            .reg .pred p;
            setp.ne.b32 p, $5, 0;
            @p ld.global.v4.b32 {$0, $1, $2, $3}, [$4];
            }""",
            "=r,=r,=r,=r,l,r",
            [at.to(tl.int64), inside.to(tl.int32)],
            (tl.uint32, tl.uint32, tl.uint32, tl.uint32),
            False,
            1,
        )
    else:
        tl.static_assert(KIND == "x, zeros")
        return tl.inline_asm_elementwise(
            """{
            .reg .pred p;
            setp.ne.b32 p, $5, 0;
            mov.b32 $0, 0;
            mov.b32 $1, 0;
            mov.b32 $2, 0;
            mov.b32 $3, 0;
            @p ld.global.v4.b32 {$0, $1, $2, $3}, [$4];
            }""",
            "=&r,=&r,=&r,=&r,l,r",
            [at.to(tl.int64), inside.to(tl.int32)],
            (tl.uint32, tl.uint32, tl.uint32, tl.uint32),
            False,
            1,
        )


@triton.jit
def _two(row, at, end):
    """Columns at and at + 1 of a row of x as the halves of a word; 0 from `end` on."""
    low = tl.load(row + at, mask=at < end, other=0.0).to(tl.uint16, bitcast=True)
    high = tl.load(row + at + 1, mask=at + 1 < end, other=0.0).to(tl.uint16, bitcast=True)
    return low.to(tl.uint32) | (high.to(tl.uint32) << 16)


@triton.jit
def _eight(row, at, more: tl.constexpr, end, QUADS: tl.constexpr, KIND: tl.constexpr):
    """Columns at + more .. + 7 of a row of x as four words; 0 from `end` on, or see `_quad`."""
    if QUADS:
        return _quad((row + at + more).to(tl.pointer_type(tl.uint32)), at + more < end, KIND)
    else:
        at += more
        return (
            _two(row, at, end),
            _two(row, at + 2, end),
            _two(row, at + 4, end),
            _two(row, at + 6, end),
        )


@triton.jit
def _columns(
    rows,
    at,
    more: tl.constexpr,
    end,
    QUADS: tl.constexpr,
    KIND: tl.constexpr,
    FRAGMENTS: tl.constexpr,
):
    """A unit of the rows of x: 4 words for each fragment."""
    words = ()
    for f in tl.static_range(FRAGMENTS):
        words += _eight(rows[f], at, more, end, QUADS, KIND)
    return words


@triton.jit
def _plain_pairs(word, offset, FORMAT: tl.constexpr, kind: tl.constexpr):
    """What the PTX below does, in the interpreter: pairs of columns of a word, in their order."""
    numbers = ()
    for n in tl.static_range(step_of(FORMAT)):
        if FORMAT == "fp8":
            number = e4m3_operands(word, n, kind).to(tl.float32)
        elif FORMAT == "int8":
            number = ((word << (24 - 8 * n)).to(tl.int32, bitcast=True) >> 24).to(tl.float32)
        else:
            number = ((word >> (8 * (n % 4) + 4 * (n // 4))) & 15).to(tl.float32) - offset
        numbers += (number,)
    pairs = ()
    for n in tl.static_range(step_of(FORMAT) // 2):
        low, high = numbers[2 * n].to(kind), numbers[2 * n + 1].to(kind)  # exact
        low = low.to(tl.uint16, bitcast=True).to(tl.uint32)
        pairs += (low | (high.to(tl.uint16, bitcast=True).to(tl.uint32) << 16),)
    return pairs


@triton.jit
def _nibble_pairs(word, offset, kind: tl.constexpr):
    """8 nibbles less their offset as four words of two.

    A byte 0x43 above a nibble is 128 + nibble as bf16, 0x64 is 1024 + nibble as float16.  `offset`
    is a word of the two halves that the sum takes.
    """
    if kind == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 l, h, t;
            and.b32 l, $4, 0x0F0F0F0F;
            shr.b32 h, $4, 4;
            and.b32 h, h, 0x0F0F0F0F;
            prmt.b32 t, l, $6, 0x4140;
            fma.rn.bf16x2 $0, t, $7, $5;
            prmt.b32 t, l, $6, 0x4342;
            fma.rn.bf16x2 $1, t, $7, $5;
            prmt.b32 t, h, $6, 0x4140;
            fma.rn.bf16x2 $2, t, $7, $5;
            prmt.b32 t, h, $6, 0x4342;
            fma.rn.bf16x2 $3, t, $7, $5;
            }""",
            "=&r,=&r,=&r,=r,r,r,r,r",
            [word, offset, word * 0 + 0x43434343, word * 0 + 0x3F803F80],
            (tl.uint32, tl.uint32, tl.uint32, tl.uint32),
            True,
            1,
        )
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 l, h, t;
            and.b32 l, $4, 0x0F0F0F0F;
            shr.b32 h, $4, 4;
            and.b32 h, h, 0x0F0F0F0F;
            prmt.b32 t, l, $6, 0x4140;
            add.rn.f16x2 $0, t, $5;
            prmt.b32 t, l, $6, 0x4342;
            add.rn.f16x2 $1, t, $5;
            prmt.b32 t, h, $6, 0x4140;
            add.rn.f16x2 $2, t, $5;
            prmt.b32 t, h, $6, 0x4342;
            add.rn.f16x2 $3, t, $5;
            }""",
            "=&r,=&r,=&r,=r,r,r,r",
            [word, offset, word * 0 + 0x64646464],
            (tl.uint32, tl.uint32, tl.uint32, tl.uint32),
            True,
            1,
        )


@triton.jit
def _byte_pairs(word, kind: tl.constexpr):
    """4 bytes as two words of two.

    bf16: 0x43 above a byte is 128 + its 7 bits, and once more 128 with its sign bit, which takes
    128 or 256 off.  float16: 0x64 above a byte with the sign flipped is 1024 + 128 + byte.
    """
    if kind == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, u, s;
            prmt.b32 t, $2, $3, 0x4140;
            and.b32 s, t, 0xFF80FF80;
            and.b32 u, t, 0xFF7FFF7F;
            fma.rn.bf16x2 $0, s, $4, u;
            prmt.b32 t, $2, $3, 0x4342;
            and.b32 s, t, 0xFF80FF80;
            and.b32 u, t, 0xFF7FFF7F;
            fma.rn.bf16x2 $1, s, $4, u;
            }""",
            "=&r,=r,r,r,r",
            [word, word * 0 + 0x43434343, word * 0 + 0xBF80BF80],
            (tl.uint32, tl.uint32),
            True,
            1,
        )
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, w;
            xor.b32 w, $2, 0x80808080;
            prmt.b32 t, w, $3, 0x4140;
            sub.rn.f16x2 $0, t, $4;
            prmt.b32 t, w, $3, 0x4342;
            sub.rn.f16x2 $1, t, $4;
            }""",
            "=&r,=r,r,r,r",
            [word, word * 0 + 0x64646464, word * 0 + 0x64806480],
            (tl.uint32, tl.uint32),
            True,
            1,
        )


@triton.jit
def _e4m3_pairs(word, kind: tl.constexpr):
    """4 bytes as two words of two: see `e4m3_operands`."""
    if kind == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, u;
            prmt.b32 t, $2, 0, 0x1404;
            shr.b32 u, t, 4;
            and.b32 u, u, 0x07F007F0;
            lop3.b32 t, t, $3, u, 0xEA;
            fma.rn.bf16x2 $0, t, $4, $3;
            prmt.b32 t, $2, 0, 0x3424;
            shr.b32 u, t, 4;
            and.b32 u, u, 0x07F007F0;
            lop3.b32 t, t, $3, u, 0xEA;
            fma.rn.bf16x2 $1, t, $4, $3;
            }""",
            "=&r,=r,r,r,r",
            [word, word * 0 + 0x80008000, word * 0 + 0x7B807B80],  # -0; times 2^120
            (tl.uint32, tl.uint32),
            True,
            1,
        )
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, u;
            prmt.b32 t, $2, 0, 0x1404;
            shr.b32 u, t, 1;
            and.b32 u, u, 0x3F803F80;
            lop3.b32 t, t, $3, u, 0xEA;
            fma.rn.f16x2 $0, t, $4, $3;
            prmt.b32 t, $2, 0, 0x3424;
            shr.b32 u, t, 1;
            and.b32 u, u, 0x3F803F80;
            lop3.b32 t, t, $3, u, 0xEA;
            fma.rn.f16x2 $1, t, $4, $3;
            }""",
            "=&r,=r,r,r,r",
            [word, word * 0 + 0x80008000, word * 0 + 0x5C005C00],  # -0; times 256
            (tl.uint32, tl.uint32),
            True,
            1,
        )


@triton.jit
def _pairs(word, offset, FORMAT: tl.constexpr, kind: tl.constexpr):
    """The columns of a word as words of two, in `kind`."""
    if _PLAIN:
        return _plain_pairs(word, offset, FORMAT, kind)
    elif FORMAT == "int8":
        return _byte_pairs(word, kind)
    elif FORMAT == "fp8":
        return _e4m3_pairs(word, kind)
    else:
        return _nibble_pairs(word, offset, kind)


@triton.jit
def _joined(parts, COUNT: tl.constexpr):
    """COUNT = 2^n tensors [a] as one [a, 2, 2 ...]: the axes are the bits of a part's number."""
    if COUNT == 1:
        return parts[0]
    else:
        half = ()
        for n in tl.static_range(COUNT // 2):
            half += (tl.join(parts[n], parts[n + COUNT // 2]),)
        return _joined(half, COUNT // 2)


@triton.jit
def _plain_columns(four, kind: tl.constexpr):
    """Four words of each thread as f32 [warps, 8, 32]: what the 4 threads of a row have of it."""
    words = tl.join(tl.join(four[0], four[2]), tl.join(four[1], four[3]))
    low = words.to(tl.uint16).to(kind, bitcast=True).to(tl.float32)
    high = (words >> 16).to(tl.uint16).to(kind, bitcast=True).to(tl.float32)
    return tl.reshape(tl.join(low, high), [four[0].shape[0] // 32, 8, 32])


@triton.jit
def _plain_products(rows, xs, sums, kind: tl.constexpr, FRAGMENTS: tl.constexpr):
    """`_products` in the interpreter."""
    left = ()
    for r in tl.static_range(4):
        left += (_plain_columns(rows[r], kind)[:, :, None, :],)
    W: tl.constexpr = rows[0][0].shape[0] // 32
    result = ()
    for f in tl.static_range(FRAGMENTS):
        right = _plain_columns(xs[4 * f : 4 * f + 4], kind)[:, None, :, :]
        for r in tl.static_range(4):
            total = tl.reshape(tl.sum(left[r] * right, axis=3), [W * 32, 2])
            even, odd = tl.split(total)  # columns 2q and 2q + 1
            result += (sums[8 * f + 2 * r] + even, sums[8 * f + 2 * r + 1] + odd)
    return result


@triton.jit
def _product(a, b, c, d, x0, x1, sums, kind: tl.constexpr):
    """sums (4 of a thread) + 16 rows of weights [a, c; b, d] times 8 rows of x [x0, x1]."""
    s0, s1, s2, s3 = sums
    if kind == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
            [a, b, c, d, x0, x1, s0, s1, s2, s3],
            (tl.float32, tl.float32, tl.float32, tl.float32),
            True,
            1,
        )
    else:
        return tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
            [a, b, c, d, x0, x1, s0, s1, s2, s3],
            (tl.float32, tl.float32, tl.float32, tl.float32),
            True,
            1,
        )


@triton.jit
def _words(at, unit, inside, FORMAT: tl.constexpr, KIND: tl.constexpr):
    """The words of a unit that a thread has: of 4 rows, one block after the other."""
    STEP: tl.constexpr = step_of(FORMAT)
    words = ()
    for b in tl.static_range(8 // STEP):
        words += _quad(at + (unit * (UNIT // STEP) + b) * 16, inside, KIND)
    return words


@triton.jit
def _codes(at, inside, FORMAT: tl.constexpr, KIND: tl.constexpr):
    """What is stored of a group's 4 rows, as words; 0 where not `inside`."""
    if FORMAT == "fp8":
        return _quad(at.to(tl.pointer_type(tl.uint32)), inside, KIND)
    elif FORMAT == "int4":
        word = tl.load(at.to(tl.pointer_type(tl.uint64)), mask=inside, other=0)
        return word.to(tl.uint32), (word >> 32).to(tl.uint32)
    else:
        return (tl.load(at.to(tl.pointer_type(tl.uint32)), mask=inside, other=0),)


@triton.jit
def _factor(codes, ROW: tl.constexpr, FORMAT: tl.constexpr):
    """Of one of the 4 rows: the scale of its group; of int4p the factor."""
    if FORMAT == "fp8":
        return codes[ROW].to(tl.float32, bitcast=True)
    elif FORMAT == "int4":
        word = codes[ROW // 2]
        bits = word & 0xFFFF0000 if ROW % 2 else word << 16
        return bits.to(tl.float32, bitcast=True)
    else:
        return factors(codes[0] >> (8 * ROW), "int4p")[0]


@triton.jit
def _offset(codes, ROW: tl.constexpr, FORMAT: tl.constexpr, kind: tl.constexpr):
    """Of one of the 4 rows: what `_nibble_pairs` adds; in the interpreter what is subtracted."""
    less = (codes[0] >> (8 * ROW + 7)) & 1 if FORMAT == "int4p" else codes[0] * 0
    if _PLAIN:
        return 8.0 - less.to(tl.float32)
    elif kind == tl.bfloat16:
        return 0xC308C308 - less * 0x00010001  # -136, -135
    else:
        return 0xE408E408 - less * 0x00010001  # -1032, -1031


@triton.jit
def _rows_of(words, codes, FORMAT: tl.constexpr, kind: tl.constexpr):
    """A unit's 4 rows, each as 4 words of two columns."""
    rows = ()
    for r in tl.static_range(4):
        if step_of(FORMAT) == 8:
            rows += (_pairs(words[r], _offset(codes, r, FORMAT, kind), FORMAT, kind),)
        else:
            two = _pairs(words[r], 0, FORMAT, kind) + _pairs(words[4 + r], 0, FORMAT, kind)
            rows += (two,)
    return rows


@triton.jit
def _products(rows, xs, sums, kind: tl.constexpr, FRAGMENTS: tl.constexpr):
    """sums (8 for each fragment: rows 0 and 1, then rows 2 and 3) + a unit times the rows of x."""
    if _PLAIN:
        return _plain_products(rows, xs, sums, kind, FRAGMENTS)
    result = ()
    for f in tl.static_range(FRAGMENTS):
        x0, x1, x2, x3 = xs[4 * f : 4 * f + 4]
        for h in tl.static_range(2):
            top, low = rows[2 * h], rows[2 * h + 1]
            part = sums[8 * f + 4 * h : 8 * f + 4 * h + 4]
            part = _product(top[0], low[0], top[1], low[1], x0, x1, part, kind)
            result += _product(top[2], low[2], top[3], low[3], x2, x3, part, kind)
    return result


@triton.jit
def _scaled(sums, parts, codes, FORMAT: tl.constexpr, COUNT: tl.constexpr):
    """sums + parts, each times the scale of its row's group."""
    result = ()
    for n in tl.static_range(COUNT):
        factor = _factor(codes, n // 4 % 2 * 2 + n // 2 % 2, FORMAT)
        result += (sums[n] + factor * parts[n],)
    return result


@triton.jit
def _zeros(like, COUNT: tl.constexpr):
    zeros = ()
    for _ in tl.static_range(COUNT):
        zeros += (like.to(tl.float32) * 0.0,)
    return zeros


@triton.jit
def tiles_times_tokens(
    x,  # pointer to the first row of x, 16 bits a number
    stride_x,
    tokens,
    data,  # uint8 pointer to the matrix
    tile,  # the first of 2 * (WARPS / SHARES) tiles, a pair for each team of warps
    tiles,
    cols,
    first,  # the units first .. end - 1 are multiplied
    end,
    blocks,
    groups,
    scales_at,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,  # first .. end are whole steps
    QUADS: tl.constexpr,  # rows of x are aligned to 16 bytes, cols to 8
    WARPS: tl.constexpr,
    SHARES: tl.constexpr,  # warps that share the columns of a tile
    UNITS: tl.constexpr,  # of a warp in a step
    FRAGMENTS: tl.constexpr,
):
    """f32 [8 * FRAGMENTS, 32 * WARPS / SHARES]: rows of x times tiles, without row scales.

    A step's words are loaded while the one before is multiplied, the first ones before x is waited
    for.
    """
    kind: tl.constexpr = x.dtype.element_ty
    TEAMS: tl.constexpr = WARPS // SHARES  # of warps, each with tiles of its own
    STEP: tl.constexpr = SHARES * UNITS
    COUNT: tl.constexpr = 8 * FRAGMENTS  # sums of a thread
    OF_GROUP: tl.constexpr = _units_of(GROUP, UNITS)
    SPAN: tl.constexpr = min(OF_GROUP, UNITS)  # units of a step that share scales
    CODE: tl.constexpr = _code_bytes(FORMAT)
    FIRST: tl.constexpr = "always" if EVEN else "zeros"
    NEXT: tl.constexpr = "rest" if EVEN else "zeros"
    X_FIRST: tl.constexpr = "x, always" if EVEN else "x, zeros"
    X_NEXT: tl.constexpr = "x, rest" if EVEN else "x, zeros"
    thread = tl.arange(0, 32 * WARPS)
    lane = thread % 32
    team = thread // 32 % TEAMS
    offset = thread // 32 // TEAMS * UNITS
    number = tl.minimum(tile + 2 * team + lane // 16, tiles - 1)
    in_block = lane // 4 % 4 * 4 + lane % 4 * (8 // step_of(FORMAT) * 16)
    at = data.to(tl.pointer_type(tl.uint32)) + number.to(tl.int64) * blocks * 16
    first_words = at + in_block
    at = data + scales_at + (number * groups).to(tl.int64) * CODE
    first_codes = at + lane // 4 % 4 * (CODE // 4)
    words = ()
    codes = ()
    for u in tl.static_range(UNITS):
        inside = first + offset + u < end
        words += (_words(first_words, first + offset + u, inside, FORMAT, FIRST),)
        if FORMAT != "int8" and u % SPAN == 0:
            at = first_codes + ((first + offset) // OF_GROUP + u // OF_GROUP) * CODE
            codes += (_codes(at, inside, FORMAT, FIRST),)
    rows = ()  # of x; past the last one it is the last one again, whose sums are not stored
    for f in tl.static_range(FRAGMENTS):
        token = tl.minimum(lane // 4 + 8 * f, tokens - 1).to(tl.int64)
        rows += (x + token * stride_x + lane % 4 * 8,)
    last = tl.minimum(cols, end * UNIT) - lane % 4 * 8
    wait_for_inputs()
    xs = _columns(rows, (first + offset) * UNIT, 0, last, QUADS, X_FIRST, FRAGMENTS)
    acc = _zeros(thread, COUNT)
    parts = acc
    for start in tl.range(first, end, STEP, num_stages=1):
        unit = start + offset
        following = ()
        their_codes = ()
        for u in tl.static_range(UNITS):
            if u + 1 < UNITS:
                ahead = _columns(rows, unit * UNIT, (u + 1) * UNIT, last, QUADS, X_FIRST, FRAGMENTS)
            else:
                ahead = _columns(rows, (unit + STEP) * UNIT, 0, last, QUADS, X_NEXT, FRAGMENTS)
            there = unit + STEP < end if EVEN else unit + STEP + u < end
            code = codes[u // SPAN] if FORMAT != "int8" else ()
            made = _rows_of(words[u], code, FORMAT, kind)
            word_at = first_words + (unit + STEP) * (UNIT // step_of(FORMAT) * 16)
            following += (_words(word_at, u, there, FORMAT, NEXT),)
            loads_stay_before()
            parts = _products(made, xs, parts, kind, FRAGMENTS)
            xs = ahead
            if FORMAT != "int8" and u % SPAN == SPAN - 1:
                acc = _scaled(acc, parts, code, FORMAT, COUNT)
                code_at = first_codes + (unit + STEP) // OF_GROUP * CODE
                code_at += u // OF_GROUP * CODE
                opened = there if EVEN else unit + STEP + (u + 1 - SPAN) < end  # its first unit
                their_codes += (_codes(code_at, opened, FORMAT, NEXT),)
                parts = _zeros(thread, COUNT)
        words = following
        codes = their_codes
    if FORMAT == "int8":
        acc = parts
    sums = tl.reshape(_joined(acc, COUNT), [SHARES, TEAMS * 32, COUNT])
    sums = tl.sum(sums, axis=0)
    # teams, tile, 4 rows, q | fragments, rows 0 1 or 2 3, which of both, column 2q or 2q + 1
    sums = tl.reshape(sums, [TEAMS, 2, 4, 4, FRAGMENTS, 2, 2, 2])
    sums = tl.permute(sums, [4, 3, 7, 0, 1, 2, 5, 6])
    return tl.reshape(sums, [8 * FRAGMENTS, TEAMS * 32])


__all__ = ["UNIT", "in_octets", "tiles_times_tokens"]
