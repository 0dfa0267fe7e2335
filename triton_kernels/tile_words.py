# pyright: basic, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
"""Packed tiles inside kernels: words to numbers, scales, and a row of x times tiles.

A word is what one row has of a 64-byte block: 8 nibbles (int4, int4p) or 4 bytes (int8), see
docs/layouts.md.  No integer is converted, for that runs at a quarter of the rate or less: a shift
and one AND-XOR put the bits into the mantissa of a float,

    16 + n   odd nibbles, in bits 19-22          of 2^4
    256 + n  even nibbles, in bits 15-18         of 2^8, by the same shift as their neighbour
    384 + q  bytes, whose sign the XOR flips     of 2^8

and what was added is taken off where it is cheapest.  The floats are exact.

Budget on an H200 (4.3 TB/s; 132 multiprocessors x 128 lanes x 1.98 GHz; integer operations at half
that rate): int4 with groups of 64 is 0.53 bytes, 8.1e12 weights a second, 4.1 instructions each, of
which 2.06 may be integer ones; int8 twice that.  `tiles_times_rows` spends on an int4 weight
0.5 shift, 1 AND-XOR, 1 FMA; for all rows of a thread together one load of x, its conversion and
its share of the sum of x; for 8 columns a scale (load, shift, add, FMA): about 3.2, of which 1.8
are integer.  The machine code has 3.7 to 4.2 with addresses and masks (int8: 3.9 to 4.7): issue
binds about as much as memory, so words must be in flight all the time.
"""

import triton
import triton.language as tl

from ktgraph.triton_kernels.dots import INTERPRETED
from ktgraph.triton_kernels.rounding import rounded

_PLAIN = tl.constexpr(INTERPRETED)  # the interpreter runs no inline PTX


@triton.jit
def column(n: tl.constexpr, FORMAT: tl.constexpr):
    """The column, within a block, of number n of a word."""
    if FORMAT == "int8":
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
    """Number n of each word as f32: 384 + q of int8, else 256 + nibble (even n) or 16 + nibble."""
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
    """(scale, offset 7 instead of 8?) of int4 and int4p groups as f32; `at` numbers the scales."""
    return factors(_codes(scales, at, mask, FORMAT, EVEN), FORMAT)


@triton.jit
def _codes(scales, at, mask, FORMAT: tl.constexpr, EVEN: tl.constexpr):
    """What is stored of groups: 16 bits of int4, 8 of int4p."""
    if FORMAT == "int4":
        return _load(scales.to(tl.pointer_type(tl.uint16)) + at, mask, EVEN)
    else:
        return _load(scales + at, mask, EVEN)


@triton.jit
def factors(codes, FORMAT: tl.constexpr):
    """int4: the bf16 scale, 0.  int4p: the factor of the code, and 1.0 where its offset is 7."""
    code = codes.to(tl.uint32)
    if FORMAT == "int4":
        return (code << 16).to(tl.float32, bitcast=True), 0.0
    else:
        factor = (((code & 15) << 19) | 0x41800000).to(tl.float32, bitcast=True) - 16.0
        less = (((code & 128) << 15) | 0x3F800000).to(tl.float32, bitcast=True)  # 1.5 or 1.0
        return factor, 2.0 * less - 2.0


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
    found = mantissa(words, n, FORMAT)
    if FORMAT == "int8":
        return found - added(n, FORMAT)
    elif FORMAT == "int4":
        return found * scale - added(n, FORMAT) * scale  # exact (4 + 8 bits), and one FMA
    else:
        return (found - (added(n, FORMAT) - less)) * scale


@triton.jit
def operands(words, n: tl.constexpr, scale, less, FORMAT: tl.constexpr, kind: tl.constexpr):
    """`values` rounded to `kind`, for the matrix units; a thread has an even number of words."""
    if _PLAIN or FORMAT == "int8" or kind != tl.bfloat16:
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
    blocks,
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
    inside = valid & (kb < blocks)
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
    groups,
    scales_at,
    row_scales_at,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,  # every tile is valid, blocks are whole steps of KB, cols is kpad
    TILES: tl.constexpr,
    KB: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """[P, 16] f32: P tiles, each times a row of x; P = TILES.

    KB blocks of every tile a step.  Partial sums stay with the thread that owns the words (4 rows
    of a block: one 16-byte load) and meet once, at the end.  A step has fewer columns of x than
    threads, so that Triton loads x where it is used instead of sending it through shared memory.

    AHEAD: a step's words are loaded into registers while the one before is multiplied.  Without
    it, and with one stage, all warps wait for memory together and then compute together.
    """
    STEP: tl.constexpr = 4 if FORMAT == "int8" else 8
    SPAN: tl.constexpr = 1 if FORMAT == "int8" else GROUP // STEP
    WHOLE: tl.constexpr = EVEN and not AHEAD  # the step after the last one is masked
    # What was added and taken off costs up to 6 bits of a sum: too many of a float32 result.
    EXACT: tl.constexpr = x.dtype.element_ty == tl.float32
    row = tl.arange(0, 16)[None, None, :]
    block = tl.arange(0, KB)[None, :, None]
    acc = tl.zeros([TILES, KB, 16], dtype=tl.float32)
    words_at = (data + matrix + tile.to(tl.int64) * blocks * 64).to(tl.pointer_type(tl.int32))
    scales = data + matrix + scales_at
    if AHEAD:
        words, codes = _step(
            words_at, scales, tile, row, block, valid, blocks, groups, FORMAT, SPAN, WHOLE, TILES
        )
    for start in tl.range(0, blocks, KB, num_stages=STAGES):
        kb = start + block
        if AHEAD:
            words_next, codes_next = _step(
                words_at,
                scales,
                tile,
                row,
                kb + KB,
                valid,
                blocks,
                groups,
                FORMAT,
                SPAN,
                WHOLE,
                TILES,
            )
            _loads_stay_before()
        else:
            words, codes = _step(
                words_at, scales, tile, row, kb, valid, blocks, groups, FORMAT, SPAN, WHOLE, TILES
            )
        # int8 has one scale a row: the sum of all steps goes on
        part = acc if FORMAT == "int8" else tl.zeros([TILES, KB, 16], dtype=tl.float32)
        over = tl.zeros([1, KB, 1], dtype=tl.float32)  # what `mantissa` adds, times x
        total = over  # sum of x: only int4p asks for it
        for n in tl.static_range(STEP):
            at = kb * STEP + column(n, FORMAT)
            if EVEN:
                value = tl.load(x + at).to(tl.float32)
            else:
                # One row of x: a mask by tile would send it through shared memory (see above).
                has = (at < cols) & valid if x.type.is_block() else at < cols
                value = tl.load(x + at, mask=has, other=0.0).to(tl.float32)
            number = mantissa(words, n, FORMAT)
            if EXACT:
                part += value * (number - added(n, FORMAT))
            else:
                part += value * number
                over += value * added(n, FORMAT)
            total += value
        if FORMAT == "int8":
            acc = part - over
        else:
            scale, less = factors(codes, FORMAT)
            if FORMAT == "int4p":
                part += less * total
            acc += scale * (part - over)
        if AHEAD:
            words, codes = words_next, codes_next
    valid = tl.reshape(valid, [TILES, 1])
    sums = tl.sum(acc, axis=1)
    if FORMAT != "int4":
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
    "loaded",
    "logical_row",
    "mantissa",
    "operands",
    "row_scales",
    "tiles_times_rows",
    "values",
]
