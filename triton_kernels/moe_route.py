# pyright: basic, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false
"""moe.route: logits of all experts in f32, then each token's top_k experts and their weights.

Few tokens (T <= 4), one launch `_route_few`: a program keeps the gate rows of
one to four experts in registers and multiplies them with every token in turn, so the gate is read
once and by all multiprocessors at the same time.  The program that arrives last (an atomic counter,
which it sets back to zero) chooses the experts of all tokens.
Floor: E * D * bytes of the gate over memory bandwidth.  Tokens follow each other: on an H200 each
adds 0.5 to 1.8 us to 5.3 to 9.6, so that four take what the two launches below do.

Many tokens, two launches: `_logits` multiplies tiles with tl.dot, split along D into parts of at
most 1024 channels, and `_choose_rows` adds the parts in order and chooses, one warp a token.
bf16 products are exact in f32; the split also bounds how many of them the tensor cores add up, as
they truncate when they add.  Other dtypes are multiplied as f32 in full precision.
Floor: 2 * T * E * D FLOPs, or T * D * bytes over memory bandwidth.

The choice.  Experts of a token lie on one axis of GROUPS * SIZE columns (both padded to powers of
two), column c being expert (c / SIZE) * size + c % SIZE.  A choice score and its column make one
int64 key: the score's bits, monotone as an integer, above the column counted backwards.  top_k
maxima of distinct keys are then the ids by descending score, lower id first, with no tie left.
Scores and groups: DeepSeek-V2 and V3 (arXiv 2405.04434, 2412.19437).
"""

import torch
import triton
import triton.language as tl

from ktgraph.ir.graph import Module, Op
from ktgraph.ops.registry import Refusal, no
from ktgraph.triton_kernels.compile import CompileCase
from ktgraph.triton_kernels.counters import counters
from ktgraph.triton_kernels.dependent import (
    dependent_launch,
    enter,
    start_dependents,
    wait_for_inputs,
)
from ktgraph.triton_kernels.dots import dot
from ktgraph.triton_kernels.registry import cuda_kernel

SCORES = ("softmax", "sigmoid", "softmax_after_topk")
GROUP_SCORES, MASKS = ("max", "top2sum"), ("zero", "neg_inf")
_FEW = 4  # tokens up to which one launch is used
_MAX_COLUMNS = 8192  # of x in one program of `_route_few`
_NEVER = tl.constexpr(-(1 << 63))  # key of a column that is taken, or no expert


# -- the choice -----------------------------------------------------------------------------------
@triton.jit
def _score(logits, real, SCORE: tl.constexpr):
    """Scores of [R, COLUMNS] logits; columns that are no expert count as nothing."""
    if SCORE == "softmax":
        top = tl.max(tl.where(real, logits, float("-inf")), 1)
        e = tl.where(real, tl.exp(logits - top[:, None]), 0.0)
        return e / tl.sum(e, 1)[:, None]
    if SCORE == "sigmoid":
        return 1.0 / (1.0 + tl.exp(-logits))
    return logits


@triton.jit
def _keys(choice, column, live, LAST: tl.constexpr):
    """int64 keys in the order of (choice, -column); _NEVER where not live."""
    bits = (choice + 0.0).to(tl.int32, bitcast=True)  # + 0.0: there is one zero only
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return tl.where(live, (ordered << 32) | (LAST - column), _NEVER)


@triton.jit
def _keep_groups(
    choice,
    real,
    groups,
    topk_groups: tl.constexpr,
    R: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    GROUP_SCORE: tl.constexpr,
):
    """Whether each of [R, COLUMNS] lies in one of its token's topk_groups best groups."""
    columns: tl.constexpr = GROUPS * SIZE
    grouped = tl.reshape(tl.where(real, choice, float("-inf")), [R, GROUPS, SIZE])
    rank = tl.max(grouped, 2)
    if GROUP_SCORE == "top2sum":
        place = tl.arange(0, SIZE)[None, None, :]
        best = tl.argmax(grouped, 2, tie_break_left=True)
        rank += tl.max(tl.where(place == best[:, :, None], float("-inf"), grouped), 2)
    group = tl.arange(0, GROUPS)[None, :]
    keys = _keys(rank, group, group < groups, GROUPS - 1)
    kept = group < 0
    for _ in tl.static_range(topk_groups):
        best = tl.max(keys, 1)[:, None]
        kept = kept | (keys == best)
        keys = tl.where(keys == best, _NEVER, keys)
    spread = tl.broadcast_to(kept.to(tl.int32)[:, :, None], [R, GROUPS, SIZE])
    return tl.reshape(spread, [R, columns]) != 0


@triton.jit
def _choose(
    logits,
    row,
    tokens,
    select_bias,
    bias,
    ids,
    weights,
    experts,
    groups,
    scale,
    TOP_K: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    SCORE: tl.constexpr,
    GROUP_SCORE: tl.constexpr,
    MASK: tl.constexpr,
    RENORM: tl.constexpr,
    GROUPED: tl.constexpr,
    R: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    KS: tl.constexpr,
):
    """Ids and weights of R tokens `row` from their logits [R, GROUPS * SIZE]."""
    last: tl.constexpr = GROUPS * SIZE - 1
    column = tl.arange(0, GROUPS * SIZE)
    size = experts // groups
    real = ((column % SIZE < size) & (column // SIZE < groups))[None, :]
    expert = (column // SIZE) * size + column % SIZE
    if bias is not None:
        logits += tl.load(bias + expert, mask=expert < experts, other=0.0).to(tl.float32)[None, :]
    scores = _score(logits, real, SCORE)
    choice = scores
    if select_bias is not None:
        offset = tl.load(select_bias + expert, mask=expert < experts, other=0.0)
        choice = scores + offset.to(tl.float32)[None, :]
    if GROUPED:
        kept = _keep_groups(choice, real, groups, TOPK_GROUPS, R, GROUPS, SIZE, GROUP_SCORE)
        choice = tl.where(kept, choice, 0.0 if MASK == "zero" else float("-inf"))
    keys = _keys(choice, column[None, :], real, last)
    k = tl.arange(0, KS)[None, :]
    chosen = tl.zeros([R, KS], tl.int32)
    for i in tl.static_range(TOP_K):
        best = tl.max(keys, 1)[:, None]
        keys = tl.where(keys == best, _NEVER, keys)
        chosen = tl.where(k == i, last - (best & 0x7FFFFFFF).to(tl.int32), chosen)
    nothing = float("-inf") if SCORE == "softmax_after_topk" else 0.0
    weight = tl.where(k < TOP_K, tl.gather(scores, chosen, 1), nothing)
    if SCORE == "softmax_after_topk":
        weight = tl.exp(weight - tl.max(weight, 1)[:, None])
        weight /= tl.sum(weight, 1)[:, None]
    if RENORM:
        weight /= tl.sum(weight, 1)[:, None] + 1e-20
    at = row.to(tl.int64)[:, None] * TOP_K + k
    inside = (row < tokens)[:, None] & (k < TOP_K)
    tl.store(ids + at, (chosen // SIZE) * size + chosen % SIZE, mask=inside)
    tl.store(weights + at, weight * scale, mask=inside)


# -- few tokens -----------------------------------------------------------------------------------
@triton.jit
def _load_row(x, col, inside):
    return tl.load(x + col, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _route_few(
    x,
    gate,
    select_bias,
    bias,
    ids,
    weights,
    logits,
    arrived,
    tokens,
    cols,
    experts,
    groups,
    scale,
    x_stride,
    gate_stride,
    TOP_K: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    SCORE: tl.constexpr,
    GROUP_SCORE: tl.constexpr,
    MASK: tl.constexpr,
    RENORM: tl.constexpr,
    GROUPED: tl.constexpr,
    R: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    KS: tl.constexpr,
    EXPERTS: tl.constexpr,
    COLS: tl.constexpr,
):
    start_dependents()
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    col = tl.arange(0, COLS)
    known, inside = expert < experts, col < cols
    at = gate + expert.to(tl.int64)[:, None] * gate_stride + col[None, :]
    row = tl.load(at, mask=known[:, None] & inside[None, :], other=0.0).to(tl.float32)
    wait_for_inputs()
    upcoming = _load_row(x, col, inside)
    for t in range(tokens):
        current = upcoming
        # the next token's row is on its way while this one is summed
        upcoming = _load_row(x + tl.minimum(t + 1, tokens - 1) * x_stride, col, inside)
        dots = tl.sum(row * current[None, :], 1)
        tl.store(logits + t * experts + expert, dots, mask=known)
    tl.debug_barrier()  # all threads' logits are written before one thread announces them
    before = tl.atomic_add(arrived, 1, sem="acq_rel")
    if before == tl.num_programs(0) - 1:
        token = tl.arange(0, R)
        column = tl.arange(0, GROUPS * SIZE)
        size = experts // groups
        source = (column // SIZE) * size + column % SIZE
        real = (column % SIZE < size) & (column // SIZE < groups)
        values = tl.load(
            logits + token[:, None] * experts + source[None, :],
            mask=(token < tokens)[:, None] & real[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        _choose(
            values, token, tokens, select_bias, bias, ids, weights, experts, groups, scale,
            TOP_K, TOPK_GROUPS, SCORE, GROUP_SCORE, MASK, RENORM, GROUPED, R, GROUPS, SIZE, KS,
        )  # fmt: skip
        tl.store(arrived, 0)


# -- many tokens ----------------------------------------------------------------------------------
@triton.jit
def _logits(
    x,
    gate,
    parts,
    tokens,
    cols,
    experts,
    x_stride,
    gate_stride,
    WIDE: tl.constexpr,
    PART: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """parts[p] = x @ gate.T over channels p*PART .. (p+1)*PART; WIDE: as f32."""
    enter()
    part = tl.program_id(2)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = part * PART + tl.arange(0, BK)
    a_at = x + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    b_at = gate + n.to(tl.int64)[None, :] * gate_stride + k[:, None]
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(0, PART, BK):
        inside = k + start < cols
        a = tl.load(a_at + start, mask=(m < tokens)[:, None] & inside[None, :], other=0.0)
        b = tl.load(b_at + start, mask=(n < experts)[None, :] & inside[:, None], other=0.0)
        if WIDE:
            a, b = a.to(tl.float32), b.to(tl.float32)
        acc = dot(a, b, acc)
    at = parts + (part.to(tl.int64) * tokens + m)[:, None] * experts + n[None, :]
    tl.store(at, acc, mask=(m < tokens)[:, None] & (n < experts)[None, :])


@triton.jit
def _choose_rows(
    parts,
    count,
    select_bias,
    bias,
    ids,
    weights,
    tokens,
    experts,
    groups,
    scale,
    TOP_K: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    SCORE: tl.constexpr,
    GROUP_SCORE: tl.constexpr,
    MASK: tl.constexpr,
    RENORM: tl.constexpr,
    GROUPED: tl.constexpr,
    R: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    KS: tl.constexpr,
):
    enter()
    token = tl.program_id(0) * R + tl.arange(0, R)
    column = tl.arange(0, GROUPS * SIZE)
    size = experts // groups
    source = (column // SIZE) * size + column % SIZE
    real = (column % SIZE < size) & (column // SIZE < groups)
    inside = (token < tokens)[:, None] & real[None, :]
    at = parts + token.to(tl.int64)[:, None] * experts + source[None, :]
    values = tl.zeros([R, GROUPS * SIZE], tl.float32)
    for _ in range(count):
        values += tl.load(at, mask=inside, other=0.0)
        at += tokens * experts
    _choose(
        values, token, tokens, select_bias, bias, ids, weights, experts, groups, scale,
        TOP_K, TOPK_GROUPS, SCORE, GROUP_SCORE, MASK, RENORM, GROUPED, R, GROUPS, SIZE, KS,
    )  # fmt: skip


# -- launcher -------------------------------------------------------------------------------------
def _columns(experts: int, groups: int) -> dict[str, int]:
    return {
        "GROUPS": triton.next_power_of_2(groups),
        "SIZE": triton.next_power_of_2(experts // groups),
    }


def _few(columns: int) -> int:
    """Most tokens whose choice fits the registers of one program."""
    return max(1, min(_FEW, (1 << 20) // columns**2))  # 1 from 1024 columns on


def _few_config(experts: int, cols: int) -> dict[str, int]:
    """Experts of a program: as few as one wave of about 132 programs allows."""
    width = triton.next_power_of_2(cols)
    rows = max(1, triton.next_power_of_2(triton.cdiv(experts, 160)))
    return {"EXPERTS": rows, "COLS": width, "num_warps": min(8, max(1, rows * width // 1024))}


def _many_config(wide: bool, tokens: int, cols: int) -> dict[str, int]:
    """Tiles of `_logits`; parts short enough that a few hundred tokens fill a GPU."""
    part = 512 if cols <= 4096 else 1024
    if wide:
        return {"PART": part, "BM": 32, "BN": 32, "BK": 32, "num_warps": 4, "num_stages": 3}
    rows = 32 if tokens <= 256 else 64
    return {"PART": part, "BM": rows, "BN": 64, "BK": 64, "num_warps": 4, "num_stages": 4}


def _supports(op: Op, module: Module) -> bool | Refusal:
    for name, known in (("score", SCORES), ("group_score", GROUP_SCORES), ("mask", MASKS)):
        if name in op.attrs and op.attrs[name] not in known:
            return no(f"{name} {op.attrs[name]!r}: it has {', '.join(known)}", op)
    return True


@cuda_kernel("moe.route", name="triton.moe_route", nmse=1e-9, supports=_supports)
def route(
    x: torch.Tensor,
    gate: torch.Tensor,
    select_bias: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    out,
    top_k: int,
    score: str,
    renorm: bool,
    scale: float,
    groups: int,
    topk_groups: int,
    group_score: str,
    mask: str,
) -> None:
    ids, weights = out
    if score not in SCORES or group_score not in GROUP_SCORES or mask not in MASKS:
        raise ValueError(f"score {score!r}, group_score {group_score!r}, mask {mask!r}")
    if not ids.numel():
        return
    (tokens, cols), experts = x.shape, gate.shape[0]
    assert x.stride(1) == 1
    assert gate.stride(1) == 1
    assert ids.is_contiguous()
    assert weights.is_contiguous()
    assert experts % groups == 0
    assert top_k <= experts
    how = {
        "TOP_K": top_k,
        "TOPK_GROUPS": min(topk_groups, groups),
        "SCORE": score,
        "GROUP_SCORE": group_score,
        "MASK": mask,
        "RENORM": renorm,
        "GROUPED": groups > 1,
        "KS": triton.next_power_of_2(top_k),
        **_columns(experts, groups),
    }
    sizes = (experts, groups, scale)
    if tokens <= _few(how["GROUPS"] * how["SIZE"]) and cols <= _MAX_COLUMNS:
        config = _few_config(experts, cols)
        logits = torch.empty(tokens, experts, dtype=torch.float32, device=x.device)
        _route_few[(triton.cdiv(experts, config["EXPERTS"]),)](
            x,
            gate,
            select_bias,
            bias,
            ids,
            weights,
            logits,
            counters(1, x.device),
            tokens,
            cols,
            *sizes,
            x.stride(0),
            gate.stride(0),
            R=triton.next_power_of_2(tokens),
            **how,
            **config,
            **dependent_launch(),
        )
        return
    wide = not x.dtype == gate.dtype == torch.bfloat16
    config = _many_config(wide, tokens, cols)
    count = triton.cdiv(cols, config["PART"])
    parts = torch.empty(count, tokens, experts, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(tokens, config["BM"]), triton.cdiv(experts, config["BN"]), count)
    _logits[grid](
        x,
        gate,
        parts,
        tokens,
        cols,
        experts,
        x.stride(0),
        gate.stride(0),
        WIDE=wide,
        **config,
        **dependent_launch(),
    )
    _choose_rows[(tokens,)](
        parts,
        count,
        select_bias,
        bias,
        ids,
        weights,
        tokens,
        *sizes,
        R=1,
        num_warps=1,
        **how,
        **dependent_launch(),
    )


# -- compile cases --------------------------------------------------------------------------------
_V2 = {"TOP_K": 6, "SCORE": "softmax", "GROUP_SCORE": "max", "MASK": "zero", "RENORM": False}
_V3 = {"TOP_K": 8, "SCORE": "sigmoid", "GROUP_SCORE": "top2sum", "MASK": "neg_inf", "RENORM": True}
_MODELS = (  # name, D, E, groups, topk_groups, how, a bias for the choice
    ("deepseek-v2-lite", 2048, 64, 1, 1, _V2, False),
    ("qwen3-30b", 2048, 128, 1, 1, _V2 | {"TOP_K": 8, "RENORM": True}, False),
    ("deepseek-v2", 5120, 160, 8, 3, _V2, False),
    ("deepseek-v3", 7168, 256, 8, 4, _V3, True),
    ("512 experts", 2048, 512, 1, 1, _V2 | {"TOP_K": 10, "RENORM": True}, False),
    ("gpt-oss", 2880, 128, 1, 1, _V2 | {"TOP_K": 4, "SCORE": "softmax_after_topk"}, False),
)


def _how(experts: int, groups: int, topk_groups: int, how: dict, biased: bool) -> dict:
    constants = how | {"TOPK_GROUPS": topk_groups, "GROUPED": groups > 1}
    constants |= {"KS": triton.next_power_of_2(how["TOP_K"]), **_columns(experts, groups)}
    return constants | {"bias": None} | ({} if biased else {"select_bias": None})


def _outputs(biased: bool) -> dict[str, str]:
    given = {"ids": "*i32:16", "weights": "*fp32:16", "scale": "fp32", "experts": "i32:16"}
    return given | ({"select_bias": "*fp32:16"} if biased else {})


def _cases(name, cols, experts, groups, topk_groups, how, biased) -> list[CompileCase]:
    constants = _how(experts, groups, topk_groups, how, biased)
    constants |= {"groups": 1} if groups == 1 else {}
    grouped = {} if groups == 1 else {"groups": "i32"}
    cases = [
        CompileCase(
            _choose_rows,
            f"moe_route choose {name}",
            {"parts": "*fp32:16", "count": "i32", "tokens": "i32", **_outputs(biased), **grouped},
            constants | {"R": 1},
            num_warps=1,
        )
    ]
    most = _few(constants["GROUPS"] * constants["SIZE"])
    for dtype, rows in (("bf16", 1), ("bf16", most), ("fp32", most)):
        config = _few_config(experts, cols)
        warps = config.pop("num_warps")
        strides = {"x_stride": "i32:16", "gate_stride": "i32:16"}
        cases.append(
            CompileCase(
                _route_few,
                f"moe_route few {name} gate {dtype} T={rows}",
                {
                    "x": "*bf16:16",
                    "gate": f"*{dtype}:16",
                    "logits": "*fp32:16",
                    "arrived": "*i32:16",
                }
                | {"tokens": "i32", "cols": "i32:16", **_outputs(biased), **grouped, **strides},
                constants | {"R": rows} | config,
                num_warps=warps,
            )
        )
    return cases


def _logits_case(dtype: str, tokens: int, cols: int) -> CompileCase:
    config = _many_config(dtype != "bf16", tokens, cols)
    warps, stages = config.pop("num_warps"), config.pop("num_stages")
    sizes = {n: "i32:16" for n in ("cols", "experts", "x_stride", "gate_stride")}
    return CompileCase(
        _logits,
        f"moe_route logits {dtype} T={tokens} D={cols}",
        {
            "x": f"*{dtype}:16",
            "gate": f"*{dtype}:16",
            "parts": "*fp32:16",
            "tokens": "i32",
            **sizes,
        },
        {"WIDE": dtype != "bf16", **config},
        num_warps=warps,
        num_stages=stages,
    )


COMPILE_CASES = [
    *(case for model in _MODELS for case in _cases(*model)),
    *(
        _logits_case(dtype, tokens, cols)
        for dtype in ("bf16", "fp32")
        for tokens, cols in ((64, 2048), (2048, 7168))
    ),
]
