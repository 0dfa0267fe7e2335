# pyright: basic
"""`rounded`: f32 to the dtype of a result, to nearest even, in the interpreter too."""

import triton
import triton.language as tl

from ktgraph.triton_kernels.dots import INTERPRETED

_BY_HAND = tl.constexpr(INTERPRETED)  # the interpreter's conversion to bf16 cuts the low half off


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """x (f32) in `dtype`."""
    if _BY_HAND and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def through(x, dtype: tl.constexpr):
    """x (f32) rounded to `dtype` and back: what an op leaves that stores its result in `dtype`."""
    return rounded(x, dtype).to(tl.float32)


__all__ = ["rounded", "through"]
