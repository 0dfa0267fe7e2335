# pyright: basic
"""`dot`: tl.dot with f32 sums and IEEE products, right in the interpreter too."""

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = bool(knobs.runtime.interpret)
_UPCAST = tl.constexpr(INTERPRETED)  # the interpreter's tl.dot of bf16 operands is wrong


@triton.jit
def dot(a, b, acc):
    """acc + a @ b.  f32 operands are multiplied in full precision, never as TF32."""
    if _UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


__all__ = ["INTERPRETED", "dot"]
