# pyright: basic, reportArgumentType=false, reportCallIssue=false
"""`cos_sin`: cos and sin of large angles, accurate to the last bits of f32.

`tl.cos` becomes `cos.approx`, whose error grows with the angle, and libdevice's accurate form keeps
a table in local memory for its rare path and does not run in the interpreter.  So the angle, an
f32, is reduced in f64: r = x - k * pi/2 with k = round(x * 2/pi), whose error is under 1e-9 for
|x| up to 1e6.  Then polynomials on [-pi/4, pi/4] (Cephes' sinf and cosf, Moshier) and the quadrant.
There are a few hundred f64 operations a token: nothing, even where f64 runs at 1/64 of the rate.
"""

import triton
import triton.language as tl


@triton.jit
def cos_sin(x):
    """(cos x, sin x) of an f32 tensor; |x| < 2^30."""
    wide = x.to(tl.float64)
    turns = tl.floor(wide * 0.6366197723675814 + 0.5)
    r = (wide - turns * 1.5707963267948966).to(tl.float32)
    quadrant = turns.to(tl.int32) & 3
    z = r * r
    s = r + r * z * (-1.6666654611e-1 + z * (8.3321608736e-3 - z * 1.9515295891e-4))
    high = 4.166664568298827e-2 + z * (-1.388731625493765e-3 + z * 2.443315711809948e-5)
    c = 1.0 - 0.5 * z + z * z * high
    swap = (quadrant & 1) == 1
    cosine, sine = tl.where(swap, s, c), tl.where(swap, c, s)
    cosine = tl.where((quadrant == 1) | (quadrant == 2), -cosine, cosine)
    sine = tl.where(quadrant >= 2, -sine, sine)
    return cosine, sine


__all__ = ["cos_sin"]
