# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportRedeclaration=false
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false
"""e4m3 numbers (fp8) inside kernels: 4 bytes of a 32-bit word to float32, bf16 or float16, exactly.

A code is a sign, 4 bits of exponent (bias 7) and 3 of mantissa (OCP 8-bit floating point, E4M3).
Where a wider format has its own, these 7 bits are the same number times a power of two, subnormal
numbers too: 2^-8 of a float16 (bias 15), 2^-120 of a bf16 (bias 127).  Two bytes move at once.

From sm_89 on an instruction converts two bytes to float16; before, Triton refuses `fp8e4nv` at all.
Per weight, with the step to float32: 1.5 instructions against 2.75, of which 1.75 are integer ones.
NaN (0x7F, 0xFF) becomes NaN or 480: the packer refuses it.
"""

import triton
import triton.language as tl

from ktgraph.triton_kernels.dots import INTERPRETED

_PLAIN = tl.constexpr(INTERPRETED)  # the interpreter runs no inline PTX

if INTERPRETED:

    @triton.jit
    def _has_conversion():
        return False

else:

    @tl.core.builtin
    def _has_conversion(_semantic=None):
        """Whether the kernel is compiled for a GPU that converts e4m3."""
        return tl.constexpr("fp8e4nv" in _semantic.builder.options.supported_fp8_dtypes)


@triton.jit
def e4m3_factor():
    """What a number of `e4m3` is to be multiplied with."""
    return 1.0 if _has_conversion() else 256.0


@triton.jit
def e4m3(words, n: tl.constexpr):
    """Byte n of each word (uint32) as f32, divided by `e4m3_factor`."""
    if _has_conversion():
        return _half(_converted(words, n // 2), n % 2)
    elif n % 2 == 0:
        return _half(_moved(words << 8, words << 7), n // 2)
    else:
        return _half(_moved(words, words >> 1), n // 2)


@triton.jit
def _moved(sign, rest):
    """Two float16 of a word: their signs as they lie, exponents and mantissas one bit further."""
    return (sign & 0x80008000) | (rest & 0x3F803F80)


@triton.jit
def _converted(words, HIGH: tl.constexpr):
    """The lower or the higher two bytes of words as two float16."""
    return tl.inline_asm_elementwise(
        "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.rn.f16x2.e4m3x2 $0, h; }"
        if HIGH
        else "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.rn.f16x2.e4m3x2 $0, l; }",
        "=r,r",
        [words],
        tl.uint32,
        True,
        1,
    )


@triton.jit
def _half(halves, HIGH: tl.constexpr):
    """The lower or the higher float16 of words as f32; one instruction only as inline PTX."""
    if _PLAIN:
        half = halves >> 16 if HIGH else halves
        return half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, h; }"
            if HIGH
            else "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, l; }",
            "=f,r",
            [halves],
            tl.float32,
            True,
            1,
        )


@triton.jit
def e4m3_operands(words, n: tl.constexpr, kind: tl.constexpr):
    """Byte n of each word in `kind`, for the matrix units; a thread has an even number of words.

    bf16 and float16: two words an instruction, 2.5 a weight; by the conversion a bf16 would take
    as many.
    """
    if _PLAIN or kind == tl.float32:
        return (e4m3(words, n) * e4m3_factor()).to(kind)  # exact
    elif kind == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, u;
            prmt.b32 t, $1, $2, $3;
            shr.b32 u, t, 4;
            and.b32 u, u, $5;
            lop3.b32 t, t, $7, u, 0xEA;
            fma.rn.bf16x2 $0, t, $9, $7;
            }""",
            "=r,r,r,r,r,r,r,r,r,r,r",
            _pair_operands(words, n, 0x07F007F0, 0x7B807B80),  # times 2^120
            tl.bfloat16,
            True,
            2,
        )
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, u;
            prmt.b32 t, $1, $2, $3;
            shr.b32 u, t, 1;
            and.b32 u, u, $5;
            lop3.b32 t, t, $7, u, 0xEA;
            fma.rn.f16x2 $0, t, $9, $7;
            }""",
            "=r,r,r,r,r,r,r,r,r,r,r",
            _pair_operands(words, n, 0x3F803F80, 0x5C005C00),  # times 256
            tl.float16,
            True,
            2,
        )


@triton.jit
def _pair_operands(words, n: tl.constexpr, mask: tl.constexpr, power: tl.constexpr):
    """Words, where bytes n of two go, a mask, the sign bits (-0 as well), a power of two: constants
    that are operands stay in registers."""
    one = words * 0
    bytes = one + (0x1100 * (n + 4) + 0x11 * n)
    return words, bytes, one + mask, one + 0x80008000, one + power


__all__ = ["e4m3", "e4m3_factor", "e4m3_operands"]
