# pyright: basic, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
"""moe.grouped_mlp with packed experts: out[t] = sum over k of weight * w2[e] @ (act(gate) * up).

Few pairs (decode), two launches, bound by the packed bytes of the chosen experts:
    1. (pair, TILES tiles of w13, gate and up in turn): a row of x times the tiles, the activation,
       h[pair, F].  Pairs are the fastest axis, so that tokens of one expert meet in L2.
    2. (token, 16 rows of w2): the tiles of all K experts at once, each with its row of h, so that
       a program has many loads in flight; then the weighted sum.
Many pairs (prefill): chunks of experts are unpacked into a scratch of bounded size, and the
    dense grouped GEMMs run on each chunk's pairs (moe_align, grouped_gemm); then weighted_sum.

Which: an expert costs its packed bytes for each pair in decode form; in prefill form it is read
packed, written and read dense, about 9 times the bytes of int4, whether it is chosen or not.

Sums have a fixed shape: same inputs, same bits.  Rounding points are the op reference's.
Floor: 6*T*K*D*F FLOPs; packed bytes of the touched experts.  Budget: tile_words.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import torch
import triton
import triton.language as tl

from ktgraph.triton_kernels.activations import gated
from ktgraph.triton_kernels.compile import CompileCase
from ktgraph.triton_kernels.dependent import dependent_launch, enter
from ktgraph.triton_kernels.grouped_gemm import grouped_config, launch_down, launch_gate_up
from ktgraph.triton_kernels.moe_align import align
from ktgraph.triton_kernels.packed import FORMATS, GROUPS, PackedWeight, packed_weights
from ktgraph.triton_kernels.packed_forms import most_pairs
from ktgraph.triton_kernels.registry import cuda_kernel
from ktgraph.triton_kernels.rounding import rounded, through
from ktgraph.triton_kernels.tile_bytes import in_quads
from ktgraph.triton_kernels.tile_rows import gate_and_up, tiles_times_rows
from ktgraph.triton_kernels.unpack import unpack
from ktgraph.triton_kernels.weighted_sum import weighted_sum

SCRATCH_BYTES = 1 << 30  # of unpacked experts


@dataclass(frozen=True)
class DecodeConfig:
    """gate_up_*: TILES (even), 64-byte blocks of a step (16 * warps at most), warps, stages, and
    whether a step is loaded ahead (with one stage; see `tiles_times_rows`).

    down_*: the same of launch 2, whose tiles are the K choices and whose step follows from them.
    """

    gate_up_tiles: int = 2
    gate_up_kb: int = 64
    gate_up_warps: int = 4
    gate_up_stages: int = 1
    gate_up_ahead: bool = True
    down_warps: int = 16
    down_stages: int = 1
    down_ahead: bool = True

    def down_kb(self, choices: int, *, rounds: bool) -> int:
        """As many blocks, or pairs for bytes, as keep a step of h smaller than the threads."""
        return max(8, 16 * self.down_warps // choices) * (2 if rounds else 1)


_WIDE = 1536  # columns of w2
DECODE = DecodeConfig()
DECODE_WIDE = DecodeConfig(down_warps=8)
DECODE_INT8 = DecodeConfig(gate_up_kb=128, gate_up_warps=8)
DECODE_BYTES = DecodeConfig(gate_up_kb=128, gate_up_warps=8)
DECODE_BYTES_WIDE = DecodeConfig(gate_up_kb=128, gate_up_warps=8, down_ahead=False)
DECODE_BYTES_MANY = DecodeConfig(down_warps=8, down_ahead=False)  # two tokens or more
DECODE_F32 = DecodeConfig(down_warps=8, down_ahead=False)
DECODE_FP8 = DecodeConfig(gate_up_kb=32, down_warps=8)  # scales take as many registers as words
GATE_UP_SWEEP = (
    DECODE,
    DECODE_BYTES,
    DECODE_BYTES_WIDE,
    *(
        DecodeConfig(tiles, kb * warps, warps, gate_up_ahead=ahead)
        for (tiles, kb), warps, ahead in product(((2, 8), (2, 16)), (2, 4, 8), (True, False))
    ),
)
DOWN_SWEEP = tuple(
    DecodeConfig(down_warps=warps, down_ahead=ahead)
    for warps, ahead in product((4, 8, 16), (False, True))
)


@cuda_kernel(
    "moe.grouped_mlp",
    name="triton.grouped_mlp_packed_int8",
    nmse=5e-4,  # two products with bytes of x, and an activation that may square
    supports=packed_weights(3, 4, int8_rows=True),
)
@cuda_kernel(
    "moe.grouped_mlp",
    name="triton.grouped_mlp_packed",
    nmse=1e-4,
    supports=packed_weights(3, 4),
)
def grouped_mlp_packed(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: PackedWeight,
    w2: PackedWeight,
    b13: torch.Tensor | None,
    b2: torch.Tensor | None,
    *,
    out: tuple[torch.Tensor],
    act: str,
    alpha: float,
    limit: float,
    share: float = 1.0,
    config: DecodeConfig | None = None,
    decode_pairs: int | None = None,
    scratch_bytes: int = SCRATCH_BYTES,
) -> None:
    """decode_pairs: the most pairs for the decode form (default: from the number of experts).

    share: only prices read it.
    """
    if ids.numel() == 0:
        return
    assert x.stride(-1) == out[0].stride(-1) == 1
    assert all(t is None or t.is_contiguous() for t in (ids, weights, b13, b2))
    most = most_pairs(w13.count) if decode_pairs is None else decode_pairs
    if ids.numel() <= most and w13.gate_up:
        chosen = config or _decode_config(x.shape[0], x.dtype, w13, w2.cols)
        hidden = decode_gate_up(x, ids, w13, b13, act, alpha, limit, chosen)
        decode_down(hidden, ids, weights, w2, b2, out[0], chosen)
    else:
        _prefill(x, ids, weights, w13, w2, b13, b2, out[0], act, alpha, limit, scratch_bytes)


def _decode_config(tokens: int, dtype: torch.dtype, w13: PackedWeight, width: int) -> DecodeConfig:
    if dtype == torch.float32:
        return DECODE_F32
    if w13.format == "fp8":
        return DECODE_FP8
    if w13.rounds(dtype):
        return _bytes_config(tokens, w13.format, width)
    if w13.format == "int8":
        return DECODE_INT8
    return DECODE_WIDE if width >= _WIDE else DECODE


def _bytes_config(tokens: int, format: str, width: int) -> DecodeConfig:
    """An int4p step of 128 blocks that is loaded ahead takes too many registers."""
    if tokens > 1:
        return DECODE_BYTES_MANY
    config = DECODE_BYTES_WIDE if width >= _WIDE else DECODE_BYTES
    return replace(config, gate_up_ahead=False) if format == "int4p" else config


def decode_gate_up(
    x: torch.Tensor,
    ids: torch.Tensor,
    w13: PackedWeight,
    b13: torch.Tensor | None,
    act: str,
    alpha: float,
    limit: float,
    config: DecodeConfig = DECODE,
) -> torch.Tensor:
    """h[pairs, F]; rows of skipped pairs are not written."""
    width = w13.rows // 2
    hidden = x.new_empty(ids.numel(), width)
    tiles, kb = config.gate_up_tiles, config.gate_up_kb
    even = w13.blocks % kb == 0 and w13.blocks * w13.step == w13.cols and w13.tiles % tiles == 0
    _gate_up[(ids.numel(), triton.cdiv(w13.tiles, tiles))](
        x,
        ids,
        w13.data,
        b13,
        hidden,
        width,
        w13.cols,
        w13.blocks,
        w13.tiles,
        w13.groups,
        w13.stride,
        w13.scales_at,
        w13.row_scales_at,
        x.stride(0),
        alpha,
        limit,
        K=ids.shape[1],
        FORMAT=w13.format,
        GROUP=w13.group,
        ACT=act,
        HAS_BIAS=b13 is not None,
        EVEN=even,
        TILES=tiles,
        KB=kb,
        STAGES=config.gate_up_stages,
        AHEAD=config.gate_up_ahead,
        BYTES=w13.rounds(x.dtype),
        QUADS=in_quads(x),
        num_warps=config.gate_up_warps,
        **dependent_launch(),
    )
    return hidden


def decode_down(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w2: PackedWeight,
    b2: torch.Tensor | None,
    out: torch.Tensor,
    config: DecodeConfig = DECODE,
) -> None:
    assert not w2.gate_up
    tokens, top_k = ids.shape
    choices, rounds = triton.next_power_of_2(top_k), w2.rounds(hidden.dtype)
    _down[(tokens, w2.tiles)](
        hidden,
        ids,
        weights,
        w2.data,
        b2,
        out,
        w2.rows,
        w2.cols,
        w2.blocks,
        w2.groups,
        w2.stride,
        w2.scales_at,
        w2.row_scales_at,
        out.stride(0),
        K=top_k,
        CHOICES=choices,
        FORMAT=w2.format,
        GROUP=w2.group,
        HAS_BIAS=b2 is not None,
        KB=config.down_kb(choices, rounds=rounds),
        STAGES=config.down_stages,
        AHEAD=config.down_ahead,
        BYTES=rounds,
        QUADS=in_quads(hidden),
        num_warps=config.down_warps,
        **dependent_launch(),
    )


def experts_of_chunk(
    w13: PackedWeight, w2: PackedWeight, dtype: torch.dtype, scratch_bytes: int
) -> int:
    """Experts that the scratch holds unpacked, chunks being of nearly equal size."""
    one = (w13.rows * w13.cols + w2.rows * w2.cols) * dtype.itemsize
    chunks = triton.cdiv(w13.count, max(1, scratch_bytes // one))
    return triton.cdiv(w13.count, chunks)


def _prefill(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: PackedWeight,
    w2: PackedWeight,
    b13: torch.Tensor | None,
    b2: torch.Tensor | None,
    out: torch.Tensor,
    act: str,
    alpha: float,
    limit: float,
    scratch_bytes: int,
) -> None:
    pairs, experts = ids.numel(), w13.count
    size = experts_of_chunk(w13, w2, x.dtype, scratch_bytes)
    capability = torch.cuda.get_device_capability(x.device) if x.is_cuda else None
    small = x.dtype == torch.float32 or bool(w13.cols % 8 or w2.cols % 8)
    tiles = grouped_config(pairs, experts, small=small, capability=capability)
    dense13 = x.new_empty(size, w13.rows, w13.cols)
    dense2 = x.new_empty(size, w2.rows, w2.cols)
    y = x.new_empty(pairs, w2.rows)
    for first in range(0, experts, size):
        count = min(size, experts - first)
        unpack(w13, dense13[:count], first)
        unpack(w2, dense2[:count], first)
        last = first + count
        local = ids if count == experts else _local_ids(ids, first, count)
        aligned = align(local, count, tiles.block_m)
        hidden = x.new_empty(aligned.rows, w2.cols)
        launch_gate_up(
            x,
            dense13,
            None if b13 is None else b13[first:last],
            hidden,
            aligned,
            ids.shape[1],
            act=act,
            alpha=alpha,
            limit=limit,
            tile=tiles.gate_up,
        )
        bias2 = None if b2 is None else b2[first:last]
        launch_down(hidden, dense2, bias2, y, aligned, tile=tiles.down)
    weighted_sum(y, ids, weights, out)


def _local_ids(ids: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Numbers within a chunk; -1 for experts of others (as for skipped pairs)."""
    local = ids - first
    return torch.where((local >= 0) & (local < count), local, -1)


@triton.jit
def _gate_up(
    x,
    ids,
    data,
    bias,
    hidden,
    width,
    cols,
    blocks,
    tiles,
    groups,
    stride,
    scales_at,
    row_scales_at,
    stride_x,
    alpha,
    limit,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    ACT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    TILES: tl.constexpr,
    KB: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    BYTES: tl.constexpr,
    QUADS: tl.constexpr,
):
    enter()
    pair = tl.program_id(0)
    expert = tl.load(ids + pair).to(tl.int64)
    if expert < 0:
        return
    tile = (tl.program_id(1) * TILES + tl.arange(0, TILES))[:, None, None]
    acc = tiles_times_rows(
        x + (pair // K).to(tl.int64) * stride_x,
        data,
        expert * stride + (tile * 0).to(tl.int64),
        tile,
        tile < tiles,
        cols,
        blocks,
        0,
        blocks,
        groups,
        scales_at,
        row_scales_at,
        FORMAT,
        GROUP,
        EVEN,
        TILES,
        KB,
        STAGES,
        AHEAD,
        BYTES,
        QUADS,
        False,
    )
    gate, up = gate_and_up(tl.reshape(acc, [1, TILES * 16]), TILES)
    at = (tl.program_id(1) * TILES * 8 + tl.arange(0, TILES * 8))[None, :]
    if HAS_BIAS:
        row = bias + expert * 2 * width + at
        gate += tl.load(row, mask=at < width, other=0.0).to(tl.float32)
        up += tl.load(row + width, mask=at < width, other=0.0).to(tl.float32)
    kind = hidden.dtype.element_ty
    h = gated(through(gate, kind), through(up, kind), alpha, limit, ACT, kind)
    tl.store(hidden + pair.to(tl.int64) * width + at, rounded(h, kind), mask=at < width)


@triton.jit
def _down(
    hidden,
    ids,
    weights,
    data,
    bias,
    out,
    rows,
    cols,
    blocks,
    groups,
    stride,
    scales_at,
    row_scales_at,
    stride_out,
    K: tl.constexpr,
    CHOICES: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KB: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    BYTES: tl.constexpr,
    QUADS: tl.constexpr,
):
    enter()
    token, tile = tl.program_id(0), tl.program_id(1)
    choice = tl.arange(0, CHOICES)[:, None, None]
    pair = token * K + tl.minimum(choice, K - 1)
    expert = tl.load(ids + pair, mask=choice < K, other=-1).to(tl.int64)
    valid = expert >= 0
    expert = tl.maximum(expert, 0)
    y = tiles_times_rows(
        hidden + pair.to(tl.int64) * cols,
        data,
        expert * stride,
        tile + choice * 0,
        valid,
        cols,
        blocks,
        0,
        blocks,
        groups,
        scales_at,
        row_scales_at,
        FORMAT,
        GROUP,
        False,
        CHOICES,
        KB,
        STAGES,
        AHEAD,
        BYTES,
        QUADS,
        False,
    )
    row = tile * 16 + tl.arange(0, 16)
    valid = tl.reshape(valid, [CHOICES, 1])
    if HAS_BIAS:
        at = tl.reshape(expert, [CHOICES, 1]) * rows + row[None, :]
        y += tl.load(bias + at, mask=valid & (row < rows)[None, :], other=0.0).to(tl.float32)
    weight = tl.load(weights + tl.reshape(pair, [CHOICES, 1]), mask=valid, other=0.0)
    kind = out.dtype.element_ty
    total = tl.sum(through(y, kind) * weight, axis=0)
    at = out + token.to(tl.int64) * stride_out + row
    tl.store(at, rounded(total, kind), mask=row < rows)


_SIZES = ("width", "rows", "cols", "blocks", "stride", "scales_at", "row_scales_at")
_SHARED = {
    "ids": "*i32:16",
    "data": "*u8:16",
    "tiles": "i32",
    "groups": "i32",
    "alpha": "fp32",
    "limit": "fp32",
    "weights": "*fp32:16",
    **{n: "i32:16" for n in (*_SIZES, "stride_x", "stride_out")},
}


def _case(
    kernel: object, format: str, dtype: str, top_k: int, bias: bool, rounds: int = 0
) -> CompileCase:
    """rounds: tokens whose rows are rounded to bytes; 0: none are."""
    is_down = kernel is _down
    choices = triton.next_power_of_2(top_k)
    config = {"fp8": DECODE_FP8, "int8": DECODE_INT8}.get(format, DECODE)
    config = _bytes_config(rounds, format, _WIDE) if rounds else config
    config = DECODE_F32 if dtype == "fp32" else config
    constants: dict[str, object] = {
        "K": top_k,
        "FORMAT": format,
        "GROUP": GROUPS[format],
        "HAS_BIAS": bias,
        "KB": config.down_kb(choices, rounds=rounds > 0) if is_down else config.gate_up_kb,
        "STAGES": config.down_stages if is_down else config.gate_up_stages,
        "AHEAD": config.down_ahead if is_down else config.gate_up_ahead,
        "BYTES": rounds > 0,
        "QUADS": not bias,
    }
    if is_down:
        constants["CHOICES"] = choices
    else:
        constants |= {"ACT": "silu", "EVEN": not bias, "TILES": config.gate_up_tiles}
    pointers = {n: f"*{dtype}:16" for n in ("x", "bias", "hidden", "out")}
    types = {**_SHARED, **pointers}
    return CompileCase(
        kernel,
        f"grouped_mlp_packed.{'down' if is_down else 'gate_up'} {format} {dtype} K={top_k}"
        f"{f' bytes T={rounds}' if rounds else ''}",
        {n: t for n, t in types.items() if n in _names(kernel) and n not in constants},
        constants,
        config.down_warps if is_down else config.gate_up_warps,
        3,
    )


def _names(kernel: object) -> list[str]:
    return kernel.arg_names  # pyright: ignore[reportAttributeAccessIssue]


COMPILE_CASES = [
    *(
        _case(kernel, format, dtype, top_k, bias)
        for kernel in (_gate_up, _down)
        for format in FORMATS
        for dtype, top_k, bias in (("bf16", 6, False), ("bf16", 8, True), ("fp32", 2, True))
    ),
    *(
        _case(kernel, format, dtype, top_k, bias, tokens)
        for kernel in (_gate_up, _down)
        for format in ("int4", "int4p")
        for dtype, top_k, bias, tokens in (("bf16", 6, False, 1), ("fp16", 8, True, 2))
    ),
]

__all__ = [
    "DECODE",
    "DECODE_BYTES",
    "DECODE_F32",
    "DECODE_FP8",
    "DOWN_SWEEP",
    "GATE_UP_SWEEP",
    "SCRATCH_BYTES",
    "DecodeConfig",
    "decode_down",
    "decode_gate_up",
    "experts_of_chunk",
    "grouped_mlp_packed",
]
