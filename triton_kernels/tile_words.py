# pyright: basic, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
"""Packed tiles inside kernels: words to numbers, scales, and a row of x times tiles.

A word is what one row has of a 64-byte block: 8 nibbles (int4, int4p) or 4 bytes (int8, fp8), see
docs/layouts.md.  No integer is converted, for that runs at a quarter of the rate or less: a shift
and one AND-XOR put the bits into the mantissa of a float,

    16 + n   odd nibbles, in bits 19-22          of 2^4
    256 + n  even nibbles, in bits 15-18         of 2^8, by the same shift as their neighbour
    384 + q  bytes, whose sign the XOR flips     of 2^8

and what was added is taken off where it is cheapest.  The floats are exact.  e4m3.py does the
same for fp8, whose group's scale joins the sums, never the weight: what is multiplied is exact.

Budget on an H200 (4.3 TB/s; 132 multiprocessors x 128 lanes x 1.98 GHz; integer operations at half
that rate): int4 with groups of 64 is 0.53 bytes, 8.1e12 weights a second, 4.1 instructions each, of
which 2.06 may be integer ones; int8 twice that.  With float products a weight takes 3.7 to 4.7
(shift, AND-XOR, FMA, and its shares of x and of the scale), so that issue binds before memory does.
So `tiles_times_rows` multiplies bytes where x has 16 bits and weights 4: the 8 columns of a block
are rounded to 8 bits with a scale of their own (an error of 1.6e-5 of the sum's square; the CPU
rounds whole rows), and one `dp4a` takes four products.  int8 is bound by memory as it is.
"""

import triton
import triton.language as tl

from ktgraph.cpu_kernels.reference_layouts import STEP
from ktgraph.triton_kernels.dots import INTERPRETED
from ktgraph.triton_kernels.e4m3 import e4m3, e4m3_factor, e4m3_operands
from ktgraph.triton_kernels.rounding import rounded

_PLAIN = tl.constexpr(INTERPRETED)  # the interpreter runs no inline PTX
_MAGIC = tl.constexpr(12582912.0)  # 2^23 + 2^22: the integer part of a float32 in its lowest bits
_MAGIC_BITS = tl.constexpr(0x4B400000)
_LEAST = tl.constexpr(1e-30)


@triton.constexpr_function
def step_of(format):
    """Columns of a block: numbers of a word."""
    return STEP[format]


@triton.constexpr_function
def span_of(format, group):
    """Blocks that share their scales; 1 where the format has no groups."""
    return max(1, group // STEP[format])


@triton.jit
def column(n: tl.constexpr, FORMAT: tl.constexpr):
    """The column, within a block, of number n of a word."""
    if step_of(FORMAT) == 4:
        return n
    else:
        return n // 2 + 4 * (n % 2)


@triton.jit
def _and_xor(bits, mask: tl.constexpr, ones: tl.constexpr):
    """bits & mask ^ ones in one instruction.

    An instruction holds one constant.  The compiler, left alone, makes the other anew for every
    AND-XOR; as an operand of inline PTX it stays in a register.
    """
    if _PLAIN:
        return (bits & mask) ^ ones
    elif ones == 0x43C00000:
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, 0x43C00000, 0x6A;",
            "=r,r,r",
            [bits, bits * 0 + mask],
            tl.uint32,
            True,
            1,
        )
    elif ones == 0x43800000:
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, 0x43800000, 0x6A;",
            "=r,r,r",
            [bits, bits * 0 + mask],
            tl.uint32,
            True,
            1,
        )
    else:
        tl.static_assert(ones == 0x41800000)
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, 0x41800000, 0x6A;",
            "=r,r,r",
            [bits, bits * 0 + mask],
            tl.uint32,
            True,
            1,
        )


@triton.jit
def mantissa(words, n: tl.constexpr, FORMAT: tl.constexpr):
    """Number n of each word as f32: 384 + q of int8, else 256 + nibble (even n) or 16 + nibble.

    Of fp8 see `e4m3`.
    """
    byte: tl.constexpr = n if FORMAT == "int8" else n // 2
    if byte == 0:
        bits = words << 15
    elif byte == 1:
        bits = words << 7
    elif byte == 2:
        bits = words >> 1
    else:
        bits = words >> 9
    if FORMAT == "int8":
        bits = _and_xor(bits, 0x007F8000, 0x43C00000)  # 2^8, and the sign bit flipped
    elif n % 2 == 0:
        bits = _and_xor(bits, 0x00078000, 0x43800000)
    else:
        bits = _and_xor(bits, 0x00780000, 0x41800000)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def added(n: tl.constexpr, FORMAT: tl.constexpr):
    """What `mantissa` holds above the value; of int4 and int4p with offset 8."""
    if FORMAT == "int8":
        return 384.0
    elif n % 2 == 0:
        return 264.0
    else:
        return 24.0


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
def _column(x, at, cols, valid, EVEN: tl.constexpr):
    """Columns `at` of x as f32; 0 past the end."""
    if EVEN:
        return tl.load(x + at).to(tl.float32)
    else:
        # One row of x: a mask by tile would send it through shared memory (see `_step`).
        has = (at < cols) & valid if x.type.is_block() else at < cols
        return tl.load(x + at, mask=has, other=0.0).to(tl.float32)


@triton.jit
def x_bytes(x, first, cols, valid, EVEN: tl.constexpr):
    """Blocks of 8 columns of x from `first`: bytes of both halves, and their scale."""
    a = _column(x, first, cols, valid, EVEN)
    b = _column(x, first + 1, cols, valid, EVEN)
    c = _column(x, first + 2, cols, valid, EVEN)
    d = _column(x, first + 3, cols, valid, EVEN)
    e = _column(x, first + 4, cols, valid, EVEN)
    f = _column(x, first + 5, cols, valid, EVEN)
    g = _column(x, first + 6, cols, valid, EVEN)
    h = _column(x, first + 7, cols, valid, EVEN)
    low = tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))
    high = tl.maximum(tl.maximum(tl.abs(e), tl.abs(f)), tl.maximum(tl.abs(g), tl.abs(h)))
    most = tl.maximum(low, high)
    inverse = 127.0 / tl.maximum(most, _LEAST)
    return (
        _low_bytes(_byte(a, inverse), _byte(b, inverse), _byte(c, inverse), _byte(d, inverse)),
        _low_bytes(_byte(e, inverse), _byte(f, inverse), _byte(g, inverse), _byte(h, inverse)),
        most * (1.0 / 127.0),
    )


@triton.jit
def _byte_products(words, codes, low, high, x_scale, FORMAT: tl.constexpr):
    """Sums over the 8 columns of blocks: of weights without their row's scale, times x."""
    zero = low * 0
    ones = zero + 0x01010101
    total = dot4(ones, high, dot4(ones, low, zero, False), False)
    start = words.to(tl.int32, bitcast=True) * 0 + (_MAGIC_BITS - 8 * total)
    whole = dot4(words & 0x0F0F0F0F, low, start, True)
    whole = dot4((words >> 4) & 0x0F0F0F0F, high, whole, True)
    found = whole.to(tl.float32, bitcast=True) - _MAGIC
    scale, less = factors(codes, FORMAT)
    if FORMAT == "int4p":
        found += less * total.to(tl.float32)
    return found * (scale * x_scale)


@triton.jit
def _float_products(x, words, codes, first, cols, valid, FORMAT: tl.constexpr, EVEN: tl.constexpr):
    """`_byte_products` in float32, of x as it is; of int8 and 4 columns too."""
    STEP: tl.constexpr = step_of(FORMAT)
    # What was added and taken off costs up to 6 bits of a sum: too many of a float32 result.
    EXACT: tl.constexpr = x.dtype.element_ty == tl.float32
    part = words.to(tl.float32) * 0.0
    over = first.to(tl.float32) * 0.0  # what `mantissa` adds, times x
    total = over  # sum of x: only int4p asks for it
    for n in tl.static_range(STEP):
        at = first + column(n, FORMAT)
        value = _column(x, at, cols, valid, EVEN)
        number = mantissa(words, n, FORMAT)
        if EXACT:
            part += value * (number - added(n, FORMAT))
        else:
            part += value * number
            over += value * added(n, FORMAT)
        total += value
    part -= over
    if FORMAT == "int8":
        return part
    else:
        scale, less = factors(codes, FORMAT)
        if FORMAT == "int4p":
            part += less * total
        return scale * part


@triton.jit
def _e4m3_products(x, words, scale, first, cols, valid, EVEN: tl.constexpr):
    """Sums over the 4 columns of blocks: of fp8 weights times x, divided by `e4m3_factor`."""
    part = _column(x, first, cols, valid, EVEN) * e4m3(words, 0)
    for n in tl.static_range(1, 4):
        part += _column(x, first + n, cols, valid, EVEN) * e4m3(words, n)
    return part * scale


@triton.jit
def loaded(words_at, mask, EVEN: tl.constexpr):
    return _load(words_at, mask, EVEN).to(tl.uint32, bitcast=True)


@triton.jit
def _load(at, mask, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(at)
    else:
        return tl.load(at, mask=mask, other=0)


@triton.jit
def group_scale(scales, at, mask, FORMAT: tl.constexpr, EVEN: tl.constexpr):
    """(scale, offset 7 instead of 8?) of groups as f32; `at` numbers the scales."""
    return factors(_codes(scales, at, mask, FORMAT, EVEN), FORMAT)


@triton.jit
def _codes(scales, at, mask, FORMAT: tl.constexpr, EVEN: tl.constexpr):
    """What is stored of groups: 16 bits of int4, 8 of int4p, an f32 of fp8."""
    if FORMAT == "fp8":
        return _load(scales.to(tl.pointer_type(tl.float32)) + at, mask, EVEN)
    elif FORMAT == "int4":
        return _load(scales.to(tl.pointer_type(tl.uint16)) + at, mask, EVEN)
    else:
        return _load(scales + at, mask, EVEN)


@triton.jit
def factors(codes, FORMAT: tl.constexpr):
    """int4, fp8: the scale, 0.  int4p: the factor of the code, and 1.0 where its offset is 7."""
    if FORMAT == "fp8":
        return codes, 0.0
    elif FORMAT == "int4":
        return (codes.to(tl.uint32) << 16).to(tl.float32, bitcast=True), 0.0
    else:
        code = codes.to(tl.uint32)
        factor = (((code & 15) << 19) | 0x41800000).to(tl.float32, bitcast=True) - 16.0
        less = (((code & 128) << 15) | 0x3F800000).to(tl.float32, bitcast=True)  # 1.5 or 1.0
        return factor, 2.0 * less - 2.0


@triton.constexpr_function
def has_row_scales(format):
    return format in ("int8", "int4p")


@triton.jit
def row_scales(scales, at, mask):
    """f32 scales of rows; `at` numbers them."""
    return tl.load(scales.to(tl.pointer_type(tl.float32)) + at, mask=mask, other=0.0)


@triton.jit
def logical_row(tile, row, rows, GATE_UP: tl.constexpr):
    """(row of the matrix, is it none of the padding?) of row 0..15 of a tile."""
    if GATE_UP:
        half = rows // 2
        inside = tile // 2 * 16 + row
        return (tile % 2) * half + inside, inside < half
    else:
        return tile * 16 + row, tile * 16 + row < rows


@triton.jit
def values(words, n: tl.constexpr, scale, less, FORMAT: tl.constexpr):
    """Number n of each word as f32: q of int8, exact; else q * scale with one rounding at most."""
    if FORMAT == "fp8":
        return e4m3(words, n) * e4m3_factor() * scale
    elif FORMAT == "int8":
        return mantissa(words, n, FORMAT) - added(n, FORMAT)
    elif FORMAT == "int4":  # exact (4 + 8 bits), and one FMA
        return mantissa(words, n, FORMAT) * scale - added(n, FORMAT) * scale
    else:
        return (mantissa(words, n, FORMAT) - (added(n, FORMAT) - less)) * scale


@triton.jit
def operands(words, n: tl.constexpr, scale, less, FORMAT: tl.constexpr, kind: tl.constexpr):
    """`values` rounded to `kind`, for the matrix units; a thread has an even number of words.

    fp8 is without its scale, and exact.
    """
    if FORMAT == "fp8":
        return e4m3_operands(words, n, kind)
    elif _PLAIN or FORMAT == "int8" or kind != tl.bfloat16:
        return rounded(values(words, n, scale, less, FORMAT), kind)
    else:
        return _bf16_pairs(words, n, scale.to(kind), (less - 136.0).to(kind))


@triton.jit
def _bf16_pairs(words, n: tl.constexpr, scale, offset):
    """Nibble n of each word times its scale as bf16, rounded once, two words an instruction.

    The halves of both words that hold the nibble come together; 128 + nibble is a bf16 with the
    nibble as its lowest bits.  2 instructions a weight, where `values` and its rounding take 3.25.
    """
    one = words * 0
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 t;
        prmt.b32 t, $1, $2, $5;
        shr.b32 t, t, $7;
        lop3.b32 t, t, $9, 0x43004300, 0xEA;
        fma.rn.bf16x2 t, t, $11, $4;
        fma.rn.bf16x2 $0, t, $3, $13;
        }""",
        "=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [
            words,
            scale,
            offset,
            one + (0x7632 if n >= 4 else 0x5410),
            one + 4 * (n % 4),
            one + 0x000F000F,
            one + 0x3F803F80,  # 1, 1
            one + 0x80008000,  # -0, -0
        ],
        tl.bfloat16,
        True,
        2,
    )


@triton.jit
def _step(
    words_at,
    scales,
    tile,
    row,
    kb,
    valid,
    end,
    groups,
    FORMAT: tl.constexpr,
    SPAN: tl.constexpr,
    EVEN: tl.constexpr,
    TILES: tl.constexpr,
):
    """(words, codes of their groups) of blocks kb, as they are stored; int8 has no codes."""
    # Hints to Triton's choice of who loads what.  The rows of a thread: 16 bytes of words, not of
    # codes; 8 of a single tile.  Then blocks over the threads and tiles within a thread, which
    # then loads x once for all its rows: axes are taken in the order of how contiguous they are,
    # and left alone Triton 3.6 takes tiles before blocks.
    ROWS: tl.constexpr = 8 if TILES == 1 else 4
    inside = valid & (kb < end)
    at = tl.max_contiguous(kb * 16 + row, [1, 2, ROWS])
    words = loaded(words_at + at, inside, EVEN)
    if FORMAT == "int8":
        return words, words
    else:
        at = tl.max_contiguous((tile * groups + kb // SPAN) * 16 + row, [1, 2, ROWS])
        return words, _codes(scales, at, inside, FORMAT, EVEN)


@triton.jit
def _loads_stay_before():
    """Loads above this line are issued above it: left alone, ptxas moves a load to its first use,
    across all the products that should have hidden it, to save registers."""
    if not _PLAIN:
        tl.inline_asm_elementwise(
            "bar.warp.sync 0xffffffff; mov.b32 $0, 0;", "=r", [], tl.int32, False, 1
        )


@triton.jit
def tiles_times_rows(
    x,  # pointer, or pointers [P, 1, 1], to the row of x that meets each tile
    data,  # uint8 pointer to the stack
    matrix,  # [P, 1, 1] byte offset of each tile's matrix
    tile,  # [P, 1, 1] number of the tile in its matrix
    valid,  # [P, 1, 1] False: contributes 0 and reads nothing
    cols,
    blocks,
    first,  # the blocks first .. end - 1 are multiplied
    end,
    groups,
    scales_at,
    row_scales_at,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,  # every tile is valid, first .. end are whole steps of KB, cols is kpad
    TILES: tl.constexpr,
    KB: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """[P, 16] f32: P tiles, each times a row of x (as bytes where that is faster); P = TILES.

    KB blocks of every tile a step.  Partial sums stay with the thread that owns the words (4 rows
    of a block: one 16-byte load) and meet once, at the end.  A step has fewer columns of x than
    threads, so that Triton loads x where it is used instead of sending it through shared memory.

    AHEAD: a step's words are loaded into registers while the one before is multiplied.  Without
    it, and with one stage, all warps wait for memory together and then compute together.
    """
    STEP: tl.constexpr = step_of(FORMAT)
    SPAN: tl.constexpr = span_of(FORMAT, GROUP)
    WHOLE: tl.constexpr = EVEN and not AHEAD  # the step after the last one is masked
    # A byte is multiplied as a float: a block of 4 columns saves nothing by a scale of its own.
    FLOATS: tl.constexpr = x.dtype.element_ty == tl.float32 or FORMAT == "int8"
    row = tl.arange(0, 16)[None, None, :]
    block = tl.arange(0, KB)[None, :, None]
    acc = tl.zeros([TILES, KB, 16], dtype=tl.float32)
    words_at = (data + matrix + tile.to(tl.int64) * blocks * 64).to(tl.pointer_type(tl.int32))
    scales = data + matrix + scales_at
    if AHEAD:
        kb = first + block
        words, codes = _step(
            words_at, scales, tile, row, kb, valid, end, groups, FORMAT, SPAN, WHOLE, TILES
        )
    for start in tl.range(first, end, KB, num_stages=STAGES):
        kb = start + block
        if AHEAD:
            words_next, codes_next = _step(
                words_at,
                scales,
                tile,
                row,
                kb + KB,
                valid,
                end,
                groups,
                FORMAT,
                SPAN,
                WHOLE,
                TILES,
            )
            _loads_stay_before()
        else:
            words, codes = _step(
                words_at, scales, tile, row, kb, valid, end, groups, FORMAT, SPAN, WHOLE, TILES
            )
        if FORMAT == "fp8":
            acc += _e4m3_products(x, words, codes, kb * STEP, cols, valid, EVEN)
        elif FLOATS:
            acc += _float_products(x, words, codes, kb * STEP, cols, valid, FORMAT, EVEN)
        else:
            low, high, x_scale = x_bytes(x, kb * STEP, cols, valid, EVEN)
            acc += _byte_products(words, codes, low, high, x_scale, FORMAT)
        if AHEAD:
            words, codes = words_next, codes_next
    valid = tl.reshape(valid, [TILES, 1])
    sums = tl.sum(acc, axis=1)
    if FORMAT == "fp8":
        sums *= e4m3_factor()
    if has_row_scales(FORMAT):
        at = (matrix + row_scales_at) // 4 + tile * 16 + row
        sums *= row_scales(data, tl.reshape(at, [TILES, 16]), valid)
    return sums


@triton.jit
def gate_and_up(acc, TILES: tl.constexpr):
    """[P, TILES * 16] of tiles gate, up, gate ... as two of [P, TILES * 8]."""
    P: tl.constexpr = acc.shape[0]
    pairs = tl.reshape(acc, [P, TILES // 2, 2, 16])
    gate, up = tl.split(tl.permute(pairs, [0, 1, 3, 2]))
    return tl.reshape(gate, [P, TILES * 8]), tl.reshape(up, [P, TILES * 8])


__all__ = [
    "added",
    "column",
    "gate_and_up",
    "group_scale",
    "has_row_scales",
    "loaded",
    "logical_row",
    "mantissa",
    "operands",
    "row_scales",
    "span_of",
    "step_of",
    "tiles_times_rows",
    "values",
]
