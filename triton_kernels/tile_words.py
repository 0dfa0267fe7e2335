# pyright: basic, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
"""Packed tiles inside kernels: words to numbers, and scales.

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
So 4-bit weights that may meet bytes of x do (tile_bytes.py).  int8 is bound by memory as it is.
"""

import triton
import triton.language as tl

from ktgraph.cpu_kernels.reference_layouts import STEP
from ktgraph.triton_kernels.dots import INTERPRETED
from ktgraph.triton_kernels.e4m3 import e4m3, e4m3_factor, e4m3_operands
from ktgraph.triton_kernels.rounding import rounded

_PLAIN = tl.constexpr(INTERPRETED)  # the interpreter runs no inline PTX


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
    return factors(stored_scales(scales, at, mask, FORMAT, EVEN), FORMAT)


@triton.jit
def stored_scales(scales, at, mask, FORMAT: tl.constexpr, EVEN: tl.constexpr):
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


__all__ = [
    "added",
    "column",
    "factors",
    "group_scale",
    "has_row_scales",
    "loaded",
    "logical_row",
    "mantissa",
    "operands",
    "row_scales",
    "span_of",
    "step_of",
    "stored_scales",
    "values",
]
