# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
"""sample.tokens: the next token of each row of logits, the same to the bit as the op's reference.

    q = (largest - logit) * scale * 2^24      w = 2^43 * 2^(-q / 2^24)      (ktgraph/ops/sample.py)

Greedy rows take two kernels: the best token of every block of 512, then the best of the blocks.
Drawn ones take one between: the weight of every block, so that the last kernel finds the block of
the random point by their running sum and the token in it.  For rows with filters that kernel also
lists the tokens that may be kept: up to the k-th best of the blocks' bests for top-k, else those
above the share of 1 - top_p that V tokens have together.  The last kernel then searches the largest
kept q, and the token, by halving: about 80 sums over the list, which lies in L1 (thousands of
tokens at most, unless the distribution is nearly flat).  Sums are of int64, so their order does not
matter; nor does the list's, which an atomic counter gives.

A repetition penalty is applied wherever a logit is read: one bit a token tells for which.

Floor: reading the logits once (205 KB for 102,400 in bf16: below 0.1 us at an H200's rate), so the
time is that of the launches and of the searches.  Scratch: 16 bytes a logit for rows with filters.
"""

import torch
import triton
import triton.language as tl

from ktgraph.ir.graph import Module, Op
from ktgraph.ir.types import TensorType
from ktgraph.ops import sample
from ktgraph.ops.registry import Refusal, no
from ktgraph.triton_kernels.compile import CompileCase
from ktgraph.triton_kernels.dependent import dependent_launch, enter
from ktgraph.triton_kernels.registry import cuda_kernel

_BLOCK, _WARPS, _WEIGH_WARPS = 512, 4, 8
_CHUNK, _LAST_WARPS = 2048, 8

_FINE = tl.constexpr(sample.FINE)
_ONE = tl.constexpr(1 << sample.FINE)
_BELOW_ONE = tl.constexpr((1 << sample.FINE) - 1)
_HALVINGS = tl.constexpr(sample.HALVINGS)
_FARTHEST = tl.constexpr(sample.FARTHEST)
_SHIFT = tl.constexpr(sample.WEIGHT_BITS - 31)
_C0, _C1, _C2, _C3, _C4, _C5, _C6 = (tl.constexpr(c) for c in sample.COEFFICIENTS)
_SCALE, _TOP_K, _TOP_P, _REACH, _SEED_LOW, _SEED_HIGH, _POSITION, _PENALTY = (
    tl.constexpr(n) for n in range(sample.COLUMNS)
)
_COLUMNS = tl.constexpr(sample.COLUMNS)
_NEVER = tl.constexpr(-(1 << 63))  # ranks below every token


def _supports(op: Op, module: Module) -> bool | Refusal:
    logits = op.value(0).type
    assert isinstance(logits, TensorType)
    vocabulary = logits.dims[-1].at(module.dims)
    if vocabulary <= sample.MOST_TOKENS:
        return True
    return no(f"a vocabulary of {vocabulary}: it has {sample.MOST_TOKENS} at most", op)


@cuda_kernel("sample.tokens", name="triton.sample_tokens", nmse=0.0, supports=_supports)
def sample_tokens(
    logits: torch.Tensor,
    how: torch.Tensor,
    seen: torch.Tensor | None,
    last: torch.Tensor | None,
    *,
    out,
    most: str,
) -> None:
    (tokens,) = out
    rows, vocabulary = logits.shape
    assert logits.stride(1) == 1
    assert all(t.is_contiguous() for t in (how, tokens, seen, last) if t is not None)
    assert vocabulary <= sample.MOST_TOKENS
    blocks = triton.cdiv(vocabulary, _BLOCK)
    best = logits.new_empty((rows, blocks), dtype=torch.int64)
    mass = count = ids = near = weight = None
    if most != "greedy":
        mass = torch.empty_like(best)
    if most == "filter":
        count = logits.new_empty((rows,), dtype=torch.int32)
        ids, near = (logits.new_empty((rows, vocabulary), dtype=torch.int32) for _ in range(2))
        weight = logits.new_empty((rows, vocabulary), dtype=torch.int64)
    words = 0 if seen is None else seen.shape[1]
    read = (logits, how, seen, last, logits.stride(0), vocabulary, words)
    fixed = {
        "BLOCK": _BLOCK, "FILTER": most == "filter", "num_warps": _WARPS, **dependent_launch(),
        "enable_fp_fusion": False,  # as the reference rounds
    }  # fmt: skip
    wide = {"WIDTH": max(16, triton.next_power_of_2(blocks))}
    _best[(blocks, rows)](*read, best, count, **fixed)
    if mass is not None:
        _weigh[(blocks, rows)](
            *read, best, mass, count, ids, near, weight, blocks, **wide,
            **fixed | {"num_warps": _WEIGH_WARPS},
        )  # fmt: skip
    _choose[(rows,)](
        *read, best, mass, count, ids, near, weight, tokens, blocks,
        CHUNK=_CHUNK, DRAW=most != "greedy", **wide,
        **fixed | {"num_warps": _LAST_WARPS if most == "filter" else _WARPS},
    )  # fmt: skip


# -- what tokens are worth ------------------------------------------------------------------------
@triton.jit
def _rank(x, id):
    """A number that grows with x (f32), NaN above all, and of equal ones falls with the id."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # -0 is 0
    key = tl.where(x != x, 0x7FFFFFFF, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))
    return (key.to(tl.int64) << 32) + (0x7FFFFFFF - id)


@triton.jit
def _ranked(rank):
    """The x of a rank."""
    key = (rank >> 32).to(tl.int32)
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _distance(x, top, scale):
    z = (top - x) * scale
    fine = tl.where(z < _HALVINGS, z * _ONE, 0.0).to(tl.int32)
    return tl.where(x == top, 0, tl.where(z < _HALVINGS, fine, _FARTHEST))


@triton.jit
def _weight(q):
    f = (q & _BELOW_ONE).to(tl.int64)
    p = -((f * _C6) >> _FINE) + _C5
    p = -((f * p) >> _FINE) + _C4
    p = -((f * p) >> _FINE) + _C3
    p = -((f * p) >> _FINE) + _C2
    p = -((f * p) >> _FINE) + _C1
    p = -((f * p) >> _FINE) + _C0
    return (p << _SHIFT) >> (q >> _FINE).to(tl.int64)


@triton.jit
def _share(total, part):
    """floor(total * part / 2^24)"""
    return (total >> _FINE) * part + (((total & _BELOW_ONE) * part) >> _FINE)


@triton.jit
def _random_point(total, how):
    low = tl.load(how + _SEED_LOW).to(tl.uint32, bitcast=True)
    high = tl.load(how + _SEED_HIGH).to(tl.uint32, bitcast=True)
    position = tl.load(how + _POSITION).to(tl.uint32, bitcast=True)
    zero = position & 0
    a, b, _, _ = tl.philox((high.to(tl.uint64) << 32) | low, position, zero, zero, zero)
    first, second = (a >> 1).to(tl.int64), (b >> 1).to(tl.int64)
    upper, lower = total >> 31, total & 0x7FFFFFFF
    return upper * first + ((lower * first) >> 31) + ((upper * second) >> 31)


@triton.jit
def _settings(how):
    """Scale, top_k, top_p and reach of a row, and whether anything is filtered."""
    scale = tl.load(how + _SCALE).to(tl.float32, bitcast=True)
    top_k, top_p, reach = tl.load(how + _TOP_K), tl.load(how + _TOP_P), tl.load(how + _REACH)
    return scale, top_k, top_p, reach, (top_k > 0) | (top_p < _ONE) | (reach < _FARTHEST)


# -- kernels --------------------------------------------------------------------------------------
@triton.jit
def _block(logits, how, seen, last, stride, vocabulary, words, row, block, BLOCK: tl.constexpr):
    """Ids and logits of a block of a row, -inf behind the vocabulary."""
    id = block * BLOCK + tl.arange(0, BLOCK)
    inside = id < vocabulary
    at = logits + row * stride + id
    x = tl.load(at, mask=inside, other=float("-inf")).to(tl.float32)
    if seen is not None:
        penalty = tl.load(how + row * _COLUMNS + _PENALTY).to(tl.float32, bitcast=True)
        bits = tl.load(seen + row * words + (id >> 5), mask=inside, other=0)
        is_seen = ((bits >> (id & 31)) & 1) == 1
        if last is not None:
            is_seen |= id == tl.load(last + row)
        x = tl.where(is_seen, tl.where(x < 0, x * penalty, tl.div_rn(x, penalty)), x)
    return id, x


@triton.jit
def _best(
    logits, how, seen, last, stride, vocabulary, words, best, count,
    BLOCK: tl.constexpr, FILTER: tl.constexpr,
):  # fmt: skip
    enter()
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    id, x = _block(logits, how, seen, last, stride, vocabulary, words, row, block, BLOCK)
    tl.store(best + row * tl.num_programs(0) + block, tl.max(_rank(x, id), 0))
    if FILTER:
        tl.store(count + row, 0, mask=block == 0)


@triton.jit
def _bests(best, row, blocks, WIDTH: tl.constexpr):
    b = tl.arange(0, WIDTH)
    return tl.load(best + row * blocks + b, mask=b < blocks, other=_NEVER)


@triton.jit
def _weigh(
    logits, how, seen, last, stride, vocabulary, words, best, mass, count, ids, near, weight,
    blocks, BLOCK: tl.constexpr, WIDTH: tl.constexpr, FILTER: tl.constexpr,
):  # fmt: skip
    enter()
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    scale, top_k, top_p, reach, is_filtered = _settings(how + row * _COLUMNS)
    if scale > 0:
        bests = _bests(best, row, blocks, WIDTH)
        top = _ranked(tl.max(bests, 0))
        id, x = _block(logits, how, seen, last, stride, vocabulary, words, row, block, BLOCK)
        q = _distance(x, top, scale)
        w = tl.where(id < vocabulary, _weight(q), 0)
        tl.store(mass + row * blocks + block, tl.sum(w, 0))
        if FILTER:
            _list(
                is_filtered, q, w, id, bests, top, scale, top_k, top_p, reach, row, count, ids,
                near, weight, vocabulary,
            )  # fmt: skip


@triton.jit
def _list(
    is_filtered, q, w, id, bests, top, scale, top_k, top_p, reach, row, count, ids, near, weight,
    vocabulary,
):  # fmt: skip
    """Append the tokens of a block that may be kept to the list of a row with filters."""
    if is_filtered:
        of_blocks = tl.where(bests == _NEVER, _FARTHEST, _distance(_ranked(bests), top, scale))
        if top_k > 0:
            far, least = _kth(of_blocks, top_k), tl.full((), 1, tl.int64)
        else:  # all others together weigh less than 1 - top_p of what the blocks' bests weigh
            known = tl.sum(_weight(of_blocks), 0)
            far, least = reach, _share(known, -top_p + _ONE) // vocabulary
        keep = (w >= tl.maximum(least, 1)) & (q <= far)
        number = keep.to(tl.int32)
        place = tl.atomic_add(count + row, tl.sum(number, 0))
        at = row * vocabulary + place + tl.cumsum(number, 0) - 1
        tl.store(ids + at, id, mask=keep)
        tl.store(near + at, q, mask=keep)
        tl.store(weight + at, w, mask=keep)


@triton.jit
def _kth(q, k):
    """The k-th smallest q, or the farthest of all where there are fewer."""
    low, high = tl.full((), 0, tl.int32), tl.full((), _FARTHEST, tl.int32)
    for _ in range(30):
        middle = (low + high) >> 1
        is_enough = tl.sum((q <= middle).to(tl.int32), 0) >= k
        high = tl.where(is_enough, middle, high)
        low = tl.where(is_enough, low, tl.minimum(middle + 1, high))
    return high


@triton.jit
def _choose(
    logits, how, seen, last, stride, vocabulary, words, best, mass, count, ids, near, weight,
    tokens, blocks,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, DRAW: tl.constexpr,
    FILTER: tl.constexpr,
):  # fmt: skip
    enter()
    row = tl.program_id(0).to(tl.int64)
    bests = _bests(best, row, blocks, WIDTH)
    rank = tl.max(bests, 0)
    token = (0x7FFFFFFF - (rank & 0xFFFFFFFF)).to(tl.int32)
    if DRAW:
        mine = how + row * _COLUMNS
        scale, top_k, top_p, reach, is_filtered = _settings(mine)
        top = _ranked(rank)
        if (scale > 0) & (top == top):
            b = tl.arange(0, WIDTH)
            masses = tl.load(mass + row * blocks + b, mask=b < blocks, other=0)
            total = tl.sum(masses, 0)
            point = _random_point(total, mine)
            block, point = _at_point(masses, point)
            id, x = _block(logits, how, seen, last, stride, vocabulary, words, row, block, BLOCK)
            w = tl.where(id < vocabulary, _weight(_distance(x, top, scale)), 0)
            place, _ = _at_point(w, point)
            token = block * BLOCK + place
            if FILTER:
                first = row * vocabulary
                token = _among(
                    is_filtered, token, mine, ids + first, near + first, weight + first,
                    tl.load(count + row), total, top_k, top_p, reach, vocabulary, CHUNK,
                )  # fmt: skip
    tl.store(tokens + row, token)


@triton.jit
def _at_point(w, point):
    """Which of the weights the point falls into, and how far."""
    sums = tl.cumsum(w, 0)
    before = sums <= point
    return tl.sum(before.to(tl.int32), 0), point - tl.max(tl.where(before, sums, 0), 0)


@triton.jit
def _among(
    is_filtered, token, how, ids, near, weight, listed, total, top_k, top_p, reach, vocabulary,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """The token drawn from the list of a row with filters; another row's stays."""
    if is_filtered:
        far = tl.full((), _FARTHEST, tl.int32)
        if top_k > 0:
            far = _search(near, near, weight, listed, far, top_k, far, CHUNK, True)
            total = _sum_to(near, far, near, weight, listed, far, CHUNK, False)
        if top_p < _ONE:
            far = _search(near, near, weight, listed, far, _share(total, top_p), far, CHUNK, False)
        far = tl.minimum(far, reach)
        kept = _sum_to(near, far, near, weight, listed, far, CHUNK, False)
        point = _random_point(kept, how)
        token = _search(ids, near, weight, listed, far, point + 1, vocabulary, CHUNK, False)
    return token


@triton.jit
def _search(key, near, weight, listed, far, wanted, most, CHUNK: tl.constexpr, COUNT: tl.constexpr):
    """The least key up to which tokens weigh `wanted`, or number so many; `most` if none does."""
    low, high = tl.full((), 0, tl.int32), most
    for _ in range(30):
        if low < high:
            middle = (low + high) >> 1
            is_enough = _sum_to(key, middle, near, weight, listed, far, CHUNK, COUNT) >= wanted
            high = tl.where(is_enough, middle, high)
            low = tl.where(is_enough, low, middle + 1)
    return high


@triton.jit
def _sum_to(
    key, limit, near, weight, listed, far, CHUNK: tl.constexpr, COUNT: tl.constexpr
):  # fmt: skip
    """Weight, or number, of the listed tokens up to a key and no farther than `far`."""
    n = tl.arange(0, CHUNK)
    sums = tl.zeros((CHUNK,), tl.int64)
    for start in range(0, listed, CHUNK):
        at = start + n
        inside = at < listed
        keep = (tl.load(key + at, mask=inside, other=0x7FFFFFFF) <= limit) & inside
        keep &= tl.load(near + at, mask=inside, other=0x7FFFFFFF) <= far
        if COUNT:
            sums += keep.to(tl.int64)
        else:
            sums += tl.load(weight + at, mask=keep, other=0)
    return tl.sum(sums, 0)


def _case(dtype: str, most: str, width: int, kernel, warps: int, penalty: bool = False):
    filters, names = most == "filter", kernel.arg_names
    types = {n: "*i32:16" for n in ("how", "seen", "last", "count", "ids", "near", "tokens")}
    types |= {n: "*i64:16" for n in ("best", "mass", "weight")} | {"logits": f"*{dtype}:16"}
    types |= {"stride": "i32:16", "vocabulary": "i32:16", "words": "i32", "blocks": "i32"}
    absent = set() if filters else {"count", "ids", "near", "weight"}
    absent |= set() if most != "greedy" else {"mass"}
    absent |= set() if penalty else {"seen", "last"}
    constants = {
        "BLOCK": _BLOCK, "WIDTH": width, "CHUNK": _CHUNK, "DRAW": most != "greedy",
        "FILTER": filters, **dict.fromkeys(absent),
    }  # fmt: skip
    return CompileCase(
        kernel,
        f"sample{kernel.fn.__name__} {most}{' penalty' * penalty} {dtype} {width} blocks",
        {n: t for n, t in types.items() if n in names and n not in absent},
        {n: c for n, c in constants.items() if n in names},
        num_warps=warps,
    )


COMPILE_CASES = [
    *(_case(d, m, 256, _best, _WARPS) for d in ("bf16", "fp32") for m in ("greedy", "filter")),
    *(_case(d, m, 256, _weigh, _WEIGH_WARPS) for d in ("bf16", "fp32") for m in ("draw", "filter")),
    _case("bf16", "filter", 1024, _weigh, _WEIGH_WARPS),
    *(_case("bf16", m, 256, _choose, _WARPS) for m in ("greedy", "draw")),
    *(_case("bf16", "filter", w, _choose, _LAST_WARPS) for w in (256, 1024)),
    _case("fp32", "filter", 256, _choose, _LAST_WARPS),
    _case("bf16", "filter", 256, _best, _WARPS, True),
    _case("bf16", "filter", 256, _weigh, _WEIGH_WARPS, True),
    _case("bf16", "filter", 256, _choose, _LAST_WARPS, True),
]

__all__ = ["sample_tokens"]
