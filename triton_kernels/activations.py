# pyright: basic
"""Activations of f32 values inside kernels, with the meaning of `ktgraph.ops.nn.activation`."""

import triton
import triton.language as tl

from ktgraph.triton_kernels.rounding import through

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid")
GATED = (*ACTIVATIONS, "swiglu_clamped")


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def activate(x, ACT: tl.constexpr):
    """ACT(x), one of ACTIVATIONS; x is f32.

    gelu_tanh: x/2 * (1 + tanh u) = x * sigmoid(2u), u = sqrt(2/pi) * (x + 0.044715 x^3).
    """
    if ACT == "silu":
        y = x * sigmoid(x)
    elif ACT == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        y = x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACT == "relu":
        y = tl.where(x < 0.0, 0.0, x)
    elif ACT == "relu2":
        positive = tl.where(x < 0.0, 0.0, x)
        y = positive * positive
    else:
        tl.static_assert(ACT == "sigmoid", "unknown activation")
        y = sigmoid(x)
    return y


@triton.jit
def gated(gate, up, alpha, limit, ACT: tl.constexpr, dtype: tl.constexpr):
    """ACT(gate) * up as f32, rounded to `dtype` where torch's ops would round.

    gate and up are f32 values of tensors in `dtype`; the caller rounds the result.
    "swiglu_clamped" (gpt-oss): (clamp(up) + 1) * g * sigmoid(alpha * g), g = min(gate, limit).
    """
    if ACT == "swiglu_clamped":
        bound = through(limit + tl.zeros_like(gate), dtype)
        gate = tl.where(gate > bound, bound, gate)
        up = tl.where(up > bound, bound, up)
        up = tl.where(up < -bound, -bound, up)
        turned = through(sigmoid(through(gate * alpha, dtype)), dtype)
        y = through(up + 1.0, dtype) * through(gate * turned, dtype)
    else:
        y = through(activate(gate, ACT), dtype) * up
    return y


__all__ = ["ACTIVATIONS", "GATED", "activate", "gated", "sigmoid"]
