"""How many tokens meet packed weights as they are; more meet a dense copy, made first.

Apart from the kernels, so that prices can be had without Triton.
"""

from __future__ import annotations

MOST_DIRECT = 32  # tokens of nn.linear and nn.swiglu; 16 in float32
DECODE_PAIRS = 64  # of token and expert: always directly up to here,
PAIRS_PER_EXPERT = 4  # and up to this many for every expert of the stack
UNPACK_REACH = 0.8  # of the bandwidth, reading packed and writing dense bytes (H200)


def most_pairs(experts: int) -> int:
    """Pairs of token and expert that moe.grouped_mlp multiplies directly."""
    return max(DECODE_PAIRS, PAIRS_PER_EXPERT * experts)


__all__ = ["DECODE_PAIRS", "MOST_DIRECT", "PAIRS_PER_EXPERT", "UNPACK_REACH", "most_pairs"]
