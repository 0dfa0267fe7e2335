"""sample.*: from rows of logits to the next tokens.

Every device chooses the same token from the same float32 logits, because only a subtraction and a
multiplication are done in floats; the rest are integers, whose sums do not depend on their order:

    q = (largest - logit) * log2(e) / temperature      in steps of 2^-24 halvings, cut off
    w = 2^43 * 2^-q                                     by a polynomial of integers

top-k, top-p and min-p each keep the tokens up to some q, so ties stay together, and the token drawn
is the first in order of the vocabulary whose running sum of kept w exceeds a random point.  That
point comes from Philox4x32-10 (Salmon et al., SC 2011) with the seed as its key and the number of
tokens before as its counter: no state, and no other sequence, has part in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ktgraph.ops.registry import case, op
from ktgraph.runtime.window_pages import Ints

Floats = npt.NDArray[np.float32]
Longs = npt.NDArray[np.int64]

# Columns of `how`: one row of settings for each row of logits.
SCALE, TOP_K, TOP_P, REACH, SEED_LOW, SEED_HIGH, POSITION, PENALTY = range(8)
COLUMNS = 8

FINE = 24  # bits of a distance below one halving
HALVINGS = 44  # from here on a token weighs nothing
FARTHEST = HALVINGS << FINE
WEIGHT_BITS = 43  # of the largest weight
MOST_TOKENS = 1 << 19  # of a vocabulary that is drawn from: their weights sum to less than 2^63

# 2^31 * 2^-f = c[0] - f (c[1] - f (c[2] - ...)), f in [0, 1): within 7 of the true value, and
# never rising with f
COEFFICIENTS = (2147483648, 1488522098, 515879310, 119171518, 20582625, 2747585, 237445)


@op(
    "sample.tokens(logits: f[O, VOC], how: i32[O, 8], seen: i32[O, W]?, last: i32[O]?;"
    ' most: str = "filter") -> i32[O]',
    launches=3,
    cases=[case(T=1, VOC=97, W=4), case(T=3, VOC=1030, W=33), case(T=5, VOC=513, W=17)],
)
def tokens(
    logits: torch.Tensor,
    how: torch.Tensor,
    seen: torch.Tensor | None = None,
    last: torch.Tensor | None = None,
    *,
    most: str,
) -> torch.Tensor:
    """The next token of each row: greedy, or drawn from those that top-k, top-p and min-p keep.

    how: rows of `settings`.  The first of the largest logits wins, and a NaN counts as largest.
    seen: the tokens that a repetition penalty is for, as bits of W words (`mark`); absent where no
    row has one.  last: one more such token of each row, not known to who made the bits.
    most: what the most demanding row needs, "greedy", "draw" or "filter": kernels do no more.
    """
    if most not in ("greedy", "draw", "filter"):
        raise ValueError(f"most={most!r}: expected greedy, draw or filter")
    found: list[int] = []
    for row in range(logits.shape[0]):
        scores, settings_of_row = logits[row].float().numpy(), how[row].numpy()
        if seen is not None:
            newest = -1 if last is None else int(last[row])
            scores = penalized(scores, settings_of_row, seen[row].numpy(), newest)
        found.append(choose(scores, settings_of_row))
    return torch.tensor(found, dtype=torch.int32)


def settings(
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    position: int = 0,
    penalty: float = 1.0,
) -> Ints:
    """One row of `how`, i32[8]; see `ktgraph.sampling.Sampling`.

    seed: its low 64 bits count.  position: tokens before the one that is chosen.
    """
    row = np.zeros(COLUMNS, np.int32)
    if temperature > 0:
        scale = min(max(math.log2(math.e) / temperature, 1e-30), 1e38)
        row[SCALE] = np.float32(scale).view(np.int32)
    row[TOP_K] = min(top_k, (1 << 31) - 1)
    row[TOP_P] = max(1, round(top_p * (1 << FINE)))
    reach = HALVINGS if min_p <= 0 else min(-math.log2(min_p), HALVINGS)
    row[REACH] = int(reach * (1 << FINE))
    words = np.array([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF], np.uint32)
    row[SEED_LOW : SEED_HIGH + 1] = words.view(np.int32)
    row[POSITION] = position
    row[PENALTY] = np.float32(penalty).view(np.int32)
    return row


def most_needed(how: Ints) -> str:
    """What the most demanding row of `how` needs (`most` of the op)."""
    drawn = how[how[:, SCALE] != 0]
    if not len(drawn):
        return "greedy"
    filters = (drawn[:, TOP_K] > 0) | (drawn[:, TOP_P] < 1 << FINE) | (drawn[:, REACH] < FARTHEST)
    return "filter" if filters.any() else "draw"


def seen_words(vocabulary: int) -> int:
    """Words of 32 bits that have a bit for every token."""
    return -(-vocabulary // 32)


def mark(seen: Ints, ids: Sequence[int]) -> None:
    """Set the bits of some tokens."""
    at = np.asarray(ids, np.uint32)
    np.bitwise_or.at(seen.view(np.uint32), at >> 5, np.uint32(1) << (at & 31))


def penalized(logits: Floats, how: Ints, seen: Ints, last: int = -1) -> Floats:
    """Logits[VOC], those of seen tokens moved down (arXiv 1909.05858, sec. 4.1)."""
    penalty = how[PENALTY : PENALTY + 1].view(np.float32)
    if penalty[0] == 1:
        return logits
    bits = np.unpackbits(seen.view(np.uint8), count=logits.size, bitorder="little")
    if last >= 0:
        bits[last] = 1
    with np.errstate(over="ignore"):
        moved = np.where(logits < 0, logits * penalty, logits / penalty)
    return np.where(bits == 1, moved, logits)


def choose(logits: Floats, how: Ints) -> int:
    """The token of one row of logits, f32[VOC]."""
    best = int(logits.argmax())
    if how[SCALE] == 0 or np.isnan(logits[best]):
        return best
    ids, weight = kept(logits, how)
    sums = weight.cumsum()
    point = random_point(int(sums[-1]), how)
    return int(ids[np.searchsorted(sums, point, side="right")])


def kept(logits: Floats, how: Ints) -> tuple[Longs, Longs]:
    """Ids of the tokens that are kept, in order, and their weights; at least one."""
    q = distances(logits, how)
    far, top_k = FARTHEST, int(how[TOP_K])
    if 0 < top_k < q.size:
        far = int(np.partition(q, top_k - 1)[top_k - 1])
    if how[TOP_P] < 1 << FINE:
        far = _enough(q[q <= far], int(how[TOP_P]))
    far = min(far, int(how[REACH]))
    if far == FARTHEST:
        return np.arange(q.size), weights(q)
    ids = np.flatnonzero(q <= far)
    return ids, weights(q[ids])


def _enough(q: Ints, top_p: int) -> int:
    """The least distance up to which tokens weigh top_p (in 2^-24) of all or more."""
    weight = weights(q)
    total = int(weight.sum())
    wanted = total * top_p >> FINE
    near = weight >= (total - wanted) // q.size  # all the others together weigh less than 1 - top_p
    q, weight = q[near], weight[near]
    order = q.argsort()
    return int(q[order][np.searchsorted(weight[order].cumsum(), wanted)])


def distances(logits: Floats, how: Ints) -> Ints:
    """How much less likely than the likeliest each token is, i32[VOC] in 2^-24 halvings."""
    top, scale = logits.max(), how[SCALE : SCALE + 1].view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        z = top - logits
        z *= scale
    np.fmin(z, HALVINGS, out=z)
    z *= 1 << FINE
    q = z.astype(np.int32)
    q[logits == top] = 0  # infinities too
    return q


def weights(q: Ints) -> Longs:
    """2^43 * 2^(-q / 2^24), rounded down; never rises with q."""
    f = (q & ((1 << FINE) - 1)).astype(np.int64)
    p = np.full_like(f, COEFFICIENTS[-1])
    for c in reversed(COEFFICIENTS[:-1]):  # in place: fresh memory costs more than the arithmetic
        p *= f
        p >>= FINE
        np.subtract(c, p, out=p)
    p <<= WEIGHT_BITS - 31
    p >>= q >> FINE
    return p


def random_point(total: int, how: Ints) -> int:
    """A whole number from 0 to `total` - 1, of 62 random bits."""
    seed_low, seed_high, position = (
        int(v) & 0xFFFFFFFF for v in (how[SEED_LOW], how[SEED_HIGH], how[POSITION])
    )
    first, second = (w >> 1 for w in philox((position, 0, 0, 0), (seed_low, seed_high))[:2])
    high, low = total >> 31, total & 0x7FFFFFFF
    return high * first + (low * first >> 31) + (high * second >> 31)


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four random words of 32 bits: ten rounds of Philox4x32."""
    (a, b, c, d), (k0, k1) = counter, key
    for _ in range(10):
        even, odd = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = odd >> 32 ^ b ^ k0, odd & 0xFFFFFFFF, even >> 32 ^ d ^ k1, even & 0xFFFFFFFF
        k0, k1 = k0 + 0x9E3779B9 & 0xFFFFFFFF, k1 + 0xBB67AE85 & 0xFFFFFFFF
    return a, b, c, d


__all__ = [
    "COLUMNS",
    "FARTHEST",
    "FINE",
    "MOST_TOKENS",
    "POSITION",
    "choose",
    "distances",
    "kept",
    "mark",
    "most_needed",
    "penalized",
    "philox",
    "random_point",
    "seen_words",
    "settings",
    "tokens",
    "weights",
]
