# pyright: basic, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
"""Linear and gated MLP with packed weights: y = x @ w.T + b, and w2 @ (act(gate) * up).

The value of a weight is what its bytes mean; x is taken as it is, but in the first form with 4-bit
weights whose encoding says `rows=int8` (tile_bytes.py).  Forms by the number of tokens:

1          `_row`: every program multiplies TILES tiles with the row of x, without matrix units
           (tile_rows.py).  Programs share the columns of few tiles, to fill the
           GPU; shares are added in their order.  A program's first words are on their way before
           it waits for x.  Floor: the packed bytes.
2..16      `_tokens`: words become operands of the matrix units in the registers that they were
           loaded to (tile_mma.py), exactly; sums of a group take its scale.  Warps of a program,
           and programs, share the columns of tiles.  2.0 instructions an int4 weight up to 8
           tokens, 2.4 up to 16, where an H200's bandwidth leaves 4.1; int8 3.2 of 8.2.  For 10,240
           x 8,192 that took (4 and 16 tokens, `_rows` in brackets) int8 25 (36) and 28 us (37),
           int4 21 (37) and 28 (33), int4p 23 (52) and 36 (48).  Floor: the packed bytes.
17..32     `_rows`: tiles become 16-bit operands by way of shared memory, rounded once, as a dense
           copy of the weight would be; int4 43 us, `_tokens` 56.  So do 9..16 rows of x and wide
           weights of few columns, and 2..16 rows of float32, in full precision.
more       `unpack` into a scratch matrix, then the dense product.
           Floor: packed bytes read, dense bytes written and read; 2*T*N*K FLOPs.

With gate_up the direct forms apply the activation to a pair of tiles before anything is stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl

from ktgraph.triton_kernels.activations import gated
from ktgraph.triton_kernels.compile import CompileCase
from ktgraph.triton_kernels.counters import counters
from ktgraph.triton_kernels.dependent import dependent_launch, enter, start_dependents
from ktgraph.triton_kernels.dots import dot
from ktgraph.triton_kernels.packed import FORMATS, GROUPS, PackedWeight, packed_weights
from ktgraph.triton_kernels.packed_forms import MOST_DIRECT
from ktgraph.triton_kernels.registry import cuda_kernel
from ktgraph.triton_kernels.rounding import rounded, through
from ktgraph.triton_kernels.silu_mul import gated_mul
from ktgraph.triton_kernels.tile_bytes import in_quads
from ktgraph.triton_kernels.tile_mma import in_octets, tiles_times_tokens
from ktgraph.triton_kernels.tile_rows import gate_and_up, tiles_times_rows
from ktgraph.triton_kernels.tile_words import (
    group_scale,
    has_row_scales,
    loaded,
    logical_row,
    operands,
    row_scales,
    span_of,
    step_of,
)
from ktgraph.triton_kernels.unpack import unpack

_TILES = 640  # that fill an H200, with a program's columns shared or not
_WARPS = 2560  # that fill an H200 where a thread takes 96 to 128 registers
_SHALLOW = 2048  # columns of a matrix whose programs end before many warps pay


@dataclass(frozen=True)
class TileConfig:
    """tiles: tiles of a program (even where gate meets up).

    kb: 64-byte blocks of a step; `_row` takes 16 * warps at most; `_rows`, where it counts for
    each warp alone, 16 at least (a group of 128 columns).
    ahead: of `_row`, with one stage: see `tiles_times_rows`.
    splits: of `_row`: programs that share a tile's columns; 0: by `splits_of`.
    """

    tiles: int
    kb: int
    warps: int
    stages: int
    ahead: bool = False
    splits: int = 0


@dataclass(frozen=True)
class TokenConfig:
    """Of `_tokens`.

    warps: of which `shares` share the columns of a tile.
    pairs: of tiles, units: of 32 columns, of a warp in a step.
    splits: as in TileConfig.
    hold: a step's loads are issued one by one while the step before is multiplied.
    """

    warps: int
    shares: int
    pairs: int
    units: int
    splits: int = 0
    hold: bool = True

    @property
    def tiles(self) -> int:
        """Of a program."""
        return 2 * self.pairs * self.warps // self.shares


ROW = TileConfig(1, 128, 8, 1, ahead=True)
ROW_BYTES = TileConfig(2, 128, 8, 1, ahead=True)
ROW_SHALLOW = TileConfig(2, 64, 4, 1, ahead=True)  # of int8, and of bytes
_FP8 = TileConfig(2, 64, 8, 1, ahead=True)  # scales take as many registers as words
ROW_GATE_UP = {  # of up to _TILES, and of more
    "int4": (ROW_BYTES, ROW_BYTES),
    "int4p": (ROW_BYTES, ROW_BYTES),
    "int8": (TileConfig(2, 64, 4, 1, ahead=True, splits=4), TileConfig(2, 64, 8, 1, splits=1)),
    "fp8": (_FP8, _FP8),
    "bytes": (ROW_BYTES, ROW_SHALLOW),
}
TOKENS = TokenConfig(4, 4, 1, 4)  # up to 8
TOKENS_16 = TokenConfig(4, 4, 1, 2)  # more sums take the registers
TOKENS_16_BYTES = TokenConfig(8, 4, 1, 2)  # of int8 and fp8
ROWS = TileConfig(2, 16, 4, 3)
ROWS_F16 = TileConfig(2, 16, 4, 2)  # a third stage spills 8 bytes of int8
ROWS_F32 = TileConfig(1, 16, 4, 1)  # two tiles spill: no pair of gate and up
ROW_SWEEP = tuple(
    TileConfig(tiles, 16 * warps, warps, 1, ahead=ahead, splits=splits)
    for tiles, warps, ahead, splits in product((1, 2), (4, 8), (True, False), (0, 1, 2, 4))
)
TOKENS_SWEEP = tuple(
    TokenConfig(warps, shares, pairs, units, splits)
    for (warps, shares), pairs, units, splits in product(
        ((4, 4), (8, 8), (4, 2)), (1, 2), (2, 4), (1, 2, 4)
    )
)


def most_direct(dtype: torch.dtype) -> int:
    """Tokens whose sums fit into registers: float32 products need more of them."""
    return 16 if dtype == torch.float32 else MOST_DIRECT


def config_for(
    tokens: int, dtype: torch.dtype, w: PackedWeight, *, gate_up: bool
) -> TileConfig | TokenConfig:
    if tokens > 1:
        return _config_for_rows(tokens, dtype, w)
    bytes_ = w.rounds(dtype)
    if gate_up:
        return ROW_GATE_UP["bytes" if bytes_ else w.format][w.tiles > _TILES]
    if (bytes_ or w.format == "int8") and _is_shallow(w):
        return ROW_SHALLOW
    return ROW_BYTES if bytes_ else ROW


def _config_for_rows(tokens: int, dtype: torch.dtype, w: PackedWeight) -> TileConfig | TokenConfig:
    """Beyond 16 tokens sums leave too few registers for words on their way."""
    if dtype == torch.float32:
        return ROWS_F32
    if tokens > 16 or (tokens > 8 and _is_shallow(w)):
        return ROWS_F16 if dtype == torch.float16 else ROWS
    return _token_config(tokens, w.format)


def _token_config(tokens: int, format: str) -> TokenConfig:
    if tokens <= 8:
        return TOKENS
    return TOKENS_16_BYTES if format in ("int8", "fp8") else TOKENS_16


def _is_shallow(w: PackedWeight) -> bool:
    return w.cols <= _SHALLOW and w.tiles >= 2 * _TILES


@cuda_kernel(
    "nn.linear",
    name="triton.linear_packed_int8",
    nmse=1e-4,
    supports=packed_weights(1, int8_rows=True),
)
@cuda_kernel(
    "nn.linear",
    name="triton.linear_packed",
    nmse=2e-5,
    supports=packed_weights(1),
)
def linear_packed(
    x: torch.Tensor,
    w: PackedWeight,
    b: torch.Tensor | None = None,
    *,
    out: tuple[torch.Tensor],
    config: TileConfig | TokenConfig | None = None,
) -> None:
    (y,) = out
    if x.shape[0] > most_direct(x.dtype):
        _dense(x, w, b, y)
    else:
        product_of_tiles(x, w, b, y, act=None, config=config)


@cuda_kernel(
    "nn.swiglu",
    name="triton.swiglu_packed_int8",
    nmse=5e-4,  # two products with bytes of x, and an activation that may square
    supports=packed_weights(1, 2, int8_rows=True),
)
@cuda_kernel(
    "nn.swiglu",
    name="triton.swiglu_packed",
    nmse=1e-4,
    supports=packed_weights(1, 2),
)
def swiglu_packed(
    x: torch.Tensor,
    w13: PackedWeight,
    w2: PackedWeight,
    *,
    out: tuple[torch.Tensor],
    act: str,
    config: TileConfig | TokenConfig | None = None,
) -> None:
    (y,) = out
    tokens = x.shape[0]
    hidden = x.new_empty(tokens, w13.rows // 2)
    most = 1 if x.dtype == torch.float32 else MOST_DIRECT  # see ROWS_F32
    if tokens > most or not w13.gate_up:
        both = x.new_empty(tokens, w13.rows)
        linear_packed(x, w13, out=(both,))
        gated_mul(both, hidden, act=act)
    else:
        product_of_tiles(x, w13, None, hidden, act=act, config=config)
    linear_packed(hidden, w2, out=(y,), config=config)


def _dense(x: torch.Tensor, w: PackedWeight, b: torch.Tensor | None, y: torch.Tensor) -> None:
    dense = x.new_empty(1, w.rows, w.cols)
    unpack(w, dense)
    if b is None:
        torch.mm(x, dense[0].T, out=y)
    else:
        torch.addmm(b.to(x.dtype), x, dense[0].T, out=y)


def product_of_tiles(
    x: torch.Tensor,
    w: PackedWeight,
    b: torch.Tensor | None,
    y: torch.Tensor,
    *,
    act: str | None,
    config: TileConfig | TokenConfig | None = None,
) -> None:
    """y[T, rows] = x @ w.T + b; with `act` y[T, rows / 2] = act(gate) * up (w is gate_up)."""
    assert w.count == 1
    assert x.stride(1) == 1
    assert y.stride(1) == 1
    assert x.shape[1] == w.cols
    assert act is None or (w.gate_up and b is None)
    tokens = x.shape[0]
    tile = config or config_for(tokens, x.dtype, w, gate_up=act is not None)
    if isinstance(tile, TokenConfig):
        grid, kernel, extra = _tokens_launch(x, w, tile)
    elif tokens == 1:
        grid, kernel, extra = _row_launch(x, w, tile)
    else:
        grid, kernel, extra = _rows_launch(x, w, tile)
    kernel[grid](
        x,
        w.data,
        b,
        y,
        tokens,
        w.rows,
        w.cols,
        w.blocks,
        w.tiles,
        w.groups,
        w.scales_at,
        w.row_scales_at,
        x.stride(0),
        y.stride(0),
        FORMAT=w.format,
        GROUP=w.group,
        GATE_UP=w.gate_up,
        ACT=act or "",
        HAS_BIAS=b is not None,
        num_warps=tile.warps,
        **extra,
        **dependent_launch(),
    )


_Launch = tuple[tuple[int, ...], Any, dict[str, Any]]


def _row_launch(x: torch.Tensor, w: PackedWeight, tile: TileConfig) -> _Launch:
    programs, steps = triton.cdiv(w.tiles, tile.tiles), triton.cdiv(w.blocks, tile.kb)
    splits = min(tile.splits, steps) or splits_of(w.tiles, steps)
    whole = w.blocks % tile.kb == 0 and w.blocks * w.step == w.cols and w.tiles % tile.tiles == 0
    extra = {
        "EVEN": whole,
        "TILES": tile.tiles,
        "KB": tile.kb,
        "STAGES": tile.stages,
        "AHEAD": tile.ahead,
        "BYTES": w.rounds(x.dtype),
        "QUADS": in_quads(x),
        "SPLITS": splits,
        "share": triton.cdiv(steps, splits) * tile.kb,
        **_shared_sums(programs, splits, tile.tiles * 16, x.device),
    }
    return (programs, splits), _row, extra


def _tokens_launch(x: torch.Tensor, w: PackedWeight, tile: TokenConfig) -> _Launch:
    programs = triton.cdiv(w.tiles, tile.tiles)
    units, step = w.blocks * w.step // 32, tile.shares * tile.units
    steps = triton.cdiv(units, step)
    splits = min(tile.splits, steps) or token_splits(programs * tile.warps, steps)
    share = triton.cdiv(steps, splits)
    splits = triton.cdiv(steps, share)  # none without columns
    fragments = triton.next_power_of_2(triton.cdiv(x.shape[0], 8))
    extra = {
        "EVEN": units % step == 0,
        "QUADS": in_octets(x),
        "WARPS": tile.warps,
        "SHARES": tile.shares,
        "PAIRS": tile.pairs,
        "UNITS": tile.units,
        "HOLD": tile.hold,
        "FRAGMENTS": fragments,
        "SPLITS": splits,
        "share": share * step,
        **_shared_sums(programs, splits, fragments * 8 * tile.tiles * 16, x.device),
    }
    return (programs, splits), _tokens, extra


def _rows_launch(x: torch.Tensor, w: PackedWeight, tile: TileConfig) -> _Launch:
    whole = w.blocks % (tile.kb * tile.warps) == 0 and w.tiles % tile.tiles == 0
    extra = {
        "EVEN": whole and w.blocks * w.step == w.cols,
        "TILES": tile.tiles,
        "KB": tile.kb,
        "STAGES": tile.stages,
        "BLOCK_T": 16 if x.shape[0] <= 16 else 32,
        "SPLIT": tile.warps,
    }
    return (triton.cdiv(w.tiles, tile.tiles),), _rows, extra


def _shared_sums(programs: int, splits: int, size: int, device: torch.device) -> dict[str, Any]:
    """Where programs that share columns put `size` sums each, and how many have arrived."""
    if splits == 1:
        return {"parts": None, "counters": None}
    parts = torch.empty(programs * splits * size, dtype=torch.float32, device=device)
    return {"parts": parts, "counters": counters(programs, device)}


def splits_of(tiles: int, steps: int) -> int:
    """Programs that share a tile's columns: as many as fill the GPU, with work to overlap in each.

    The next kernel's programs fill what the last wave leaves free.
    """
    return max(n for n in (1, 2, 4) if n == 1 or (tiles * n <= _TILES and 2 * steps >= 3 * n))


def token_splits(warps: int, steps: int) -> int:
    """Programs that share the columns of tiles in `_tokens`, which take `warps` without sharing."""
    return max(n for n in (1, 2, 4, 8) if n == 1 or (warps * n <= _WARPS and steps >= 2 * n))


@triton.jit
def _row(
    x,
    data,
    bias,
    y,
    tokens,
    rows,
    cols,
    blocks,
    tiles,
    groups,
    scales_at,
    row_scales_at,
    stride_x,
    stride_y,
    share,
    parts,
    counters,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    GATE_UP: tl.constexpr,
    ACT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    TILES: tl.constexpr,
    KB: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    BYTES: tl.constexpr,
    QUADS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    start_dependents()
    first, split = tl.program_id(0) * TILES, tl.program_id(1)
    tile = first + tl.arange(0, TILES)
    shown = tile[:, None, None]
    acc = tiles_times_rows(
        x,
        data,
        (shown * 0).to(tl.int64),
        shown,
        shown < tiles,
        cols,
        blocks,
        split * share,
        tl.minimum((split + 1) * share, blocks),
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
        True,
    )
    acc = tl.reshape(acc, [1, TILES * 16])
    _finish(
        acc,
        parts,
        counters,
        bias,
        y,
        tokens,
        rows,
        stride_y,
        GATE_UP,
        ACT,
        HAS_BIAS,
        TILES,
        SPLITS,
    )


@triton.jit
def _finish(
    acc,  # [BLOCK_T, TILES * 16] f32, without what other programs have of it
    parts,
    counters,
    bias,
    y,
    tokens,
    rows,
    stride_y,
    GATE_UP: tl.constexpr,
    ACT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILES: tl.constexpr,
    SPLITS: tl.constexpr,
):
    BLOCK_T: tl.constexpr = acc.shape[0]
    SIZE: tl.constexpr = BLOCK_T * TILES * 16
    token = tl.arange(0, BLOCK_T)
    if SPLITS == 1:
        _store(acc, token, bias, y, tokens, rows, stride_y, GATE_UP, ACT, HAS_BIAS, TILES)
    else:
        # The program that comes last adds all shares, in their order.
        at = token[:, None] * (TILES * 16) + tl.arange(0, TILES * 16)[None, :]
        at = parts + tl.program_id(0).to(tl.int64) * (SPLITS * SIZE) + at
        tl.store(at + tl.program_id(1) * SIZE, acc)
        tl.debug_barrier()
        arrived = counters + tl.program_id(0)
        if tl.atomic_add(arrived, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(arrived, 0)
            total = tl.zeros([BLOCK_T, TILES * 16], dtype=tl.float32)
            for n in tl.static_range(SPLITS):
                total += tl.load(at + n * SIZE, cache_modifier=".cg")
            _store(total, token, bias, y, tokens, rows, stride_y, GATE_UP, ACT, HAS_BIAS, TILES)


@triton.jit
def _tokens(
    x,
    data,
    bias,
    y,
    tokens,
    rows,
    cols,
    blocks,
    tiles,
    groups,
    scales_at,
    row_scales_at,
    stride_x,
    stride_y,
    share,
    parts,
    counters,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    GATE_UP: tl.constexpr,
    ACT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    QUADS: tl.constexpr,
    WARPS: tl.constexpr,
    SHARES: tl.constexpr,
    PAIRS: tl.constexpr,
    UNITS: tl.constexpr,
    HOLD: tl.constexpr,
    FRAGMENTS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    start_dependents()
    TILES: tl.constexpr = 2 * PAIRS * (WARPS // SHARES)
    first, split = tl.program_id(0) * TILES, tl.program_id(1)
    acc = tiles_times_tokens(
        x,
        stride_x,
        tokens,
        data,
        first,
        tiles,
        cols,
        split * share,
        tl.minimum((split + 1) * share, blocks * step_of(FORMAT) // 32),
        blocks,
        groups,
        scales_at,
        FORMAT,
        GROUP,
        EVEN,
        QUADS,
        WARPS,
        SHARES,
        PAIRS,
        UNITS,
        HOLD,
        FRAGMENTS,
    )
    if has_row_scales(FORMAT):
        n = tl.arange(0, TILES * 16)
        at = first * 16 + n
        acc *= row_scales(data + row_scales_at, at, at < tiles * 16)[None, :]
    _finish(
        acc,
        parts,
        counters,
        bias,
        y,
        tokens,
        rows,
        stride_y,
        GATE_UP,
        ACT,
        HAS_BIAS,
        TILES,
        SPLITS,
    )


@triton.jit
def _rows(
    x,
    data,
    bias,
    y,
    tokens,
    rows,
    cols,
    blocks,
    tiles,
    groups,
    scales_at,
    row_scales_at,
    stride_x,
    stride_y,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    GATE_UP: tl.constexpr,
    ACT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    TILES: tl.constexpr,
    KB: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SPLIT: tl.constexpr,
):
    enter()
    STEP: tl.constexpr = step_of(FORMAT)
    kind = x.dtype.element_ty
    n = tl.arange(0, TILES * 16)
    tile, row = tl.program_id(0) * TILES + n // 16, n % 16
    token = tl.arange(0, BLOCK_T)
    split = tl.arange(0, SPLIT)[:, None, None]
    words_at = data.to(tl.pointer_type(tl.int32)) + tile[None, None, :].to(tl.int64) * blocks * 16
    acc = tl.zeros([SPLIT, BLOCK_T, TILES * 16], dtype=tl.float32)
    for start in tl.range(0, blocks, SPLIT * KB, num_stages=STAGES):
        kb = start + split * KB + tl.arange(0, KB)[None, :, None]
        inside = (tile < tiles)[None, None, :] & (kb < blocks)
        words = loaded(words_at + kb * 16 + row[None, None, :], inside, EVEN)
        if FORMAT == "int8":
            scale, less = 1.0, 0.0
        else:
            scale, less = _group_scales(
                data + scales_at,
                tile,
                row,
                tiles,
                start + split * KB,
                blocks,
                groups,
                FORMAT,
                span_of(FORMAT, GROUP),
                EVEN,
                TILES,
                KB,
                SPLIT,
            )
        col = (start + split * KB) * STEP + tl.arange(0, KB * STEP)[None, None, :]
        mask = (token < tokens)[None, :, None] & (col < cols)
        xs = tl.load(x + token[None, :, None] * stride_x + col, mask=mask, other=0.0)
        planes = _planes(xs, SPLIT, BLOCK_T, KB, FORMAT)
        if FORMAT == "fp8":
            part = tl.zeros([SPLIT, BLOCK_T, TILES * 16], dtype=tl.float32)
            for i in tl.static_range(STEP):
                part = dot(planes[i], operands(words, i, 1.0, 0.0, FORMAT, kind), part)
            acc += part * scale
        else:
            for i in tl.static_range(STEP):
                acc = dot(planes[i], operands(words, i, scale, less, FORMAT, kind), acc)
    sums = tl.sum(acc, axis=0)
    if has_row_scales(FORMAT):
        sums *= row_scales(data + row_scales_at, tile * 16 + row, tile < tiles)[None, :]
    _store(sums, token, bias, y, tokens, rows, stride_y, GATE_UP, ACT, HAS_BIAS, TILES)


@triton.jit
def _group_scales(
    scales,
    tile,
    row,
    tiles,
    first,
    blocks,
    groups,
    FORMAT: tl.constexpr,
    SPAN: tl.constexpr,
    EVEN: tl.constexpr,
    TILES: tl.constexpr,
    KB: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Scales [SPLIT, KB, TILES * 16] of which every group is loaded once: blocks of a step are
    whole groups, SPAN blocks each.  Of fp8 [SPLIT, 1, TILES * 16]: a step lies in one group."""
    tl.static_assert(SPAN % KB == 0 if FORMAT == "fp8" else KB % SPAN == 0)
    COUNT: tl.constexpr = 1 if FORMAT == "fp8" else KB // SPAN
    kb = first + SPAN * tl.arange(0, COUNT)[None, :, None]
    inside = (tile < tiles)[None, None, :] & (kb < blocks)
    at = (tile[None, None, :] * groups + kb // SPAN) * 16 + row[None, None, :]
    scale, less = group_scale(scales, at, inside, FORMAT, EVEN)
    if FORMAT == "fp8":
        return scale, less
    else:
        scale = _repeated(scale, SPAN)
        return scale, _repeated(less, SPAN) if FORMAT == "int4p" else less


@triton.jit
def _repeated(values, TIMES: tl.constexpr):
    """[a, b, c] -> [a, b * TIMES, c], each row of the middle axis TIMES times."""
    a: tl.constexpr = values.shape[0]
    b: tl.constexpr = values.shape[1]
    c: tl.constexpr = values.shape[2]
    return tl.reshape(tl.broadcast_to(values[:, :, None, :], [a, b, TIMES, c]), [a, b * TIMES, c])


@triton.jit
def _planes(xs, SPLIT: tl.constexpr, BLOCK_T: tl.constexpr, KB: tl.constexpr, FORMAT: tl.constexpr):
    """x [SPLIT, BLOCK_T, KB * step] as a [SPLIT, BLOCK_T, KB] for each number of a word."""
    if step_of(FORMAT) == 4:
        even, odd = tl.split(tl.reshape(xs, [SPLIT, BLOCK_T, KB, 2, 2]))
        p0, p2 = tl.split(even)
        p1, p3 = tl.split(odd)
        return p0, p1, p2, p3
    else:
        even, odd = tl.split(tl.reshape(xs, [SPLIT, BLOCK_T, KB, 2, 2, 2]))
        low0, low2 = tl.split(even)
        low1, low3 = tl.split(odd)
        p0, p4 = tl.split(low0)
        p1, p5 = tl.split(low1)
        p2, p6 = tl.split(low2)
        p3, p7 = tl.split(low3)
        return p0, p4, p1, p5, p2, p6, p3, p7


@triton.jit
def _store(
    acc,  # [BLOCK_T, TILES * 16] f32
    token,
    bias,
    y,
    tokens,
    rows,
    stride_y,
    GATE_UP: tl.constexpr,
    ACT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILES: tl.constexpr,
):
    kind = y.dtype.element_ty
    first = tl.program_id(0) * TILES
    if ACT == "":
        n = tl.arange(0, TILES * 16)
        at, is_row = logical_row(first + n // 16, n % 16, rows, GATE_UP)
        if HAS_BIAS:
            acc += tl.load(bias + at, mask=is_row, other=0.0).to(tl.float32)[None, :]
        result = acc
    else:
        gate, up = gate_and_up(acc, TILES)
        result = gated(through(gate, kind), through(up, kind), 0.0, 0.0, ACT, kind)
        at = first * 8 + tl.arange(0, TILES * 8)
        is_row = at < rows // 2
    target = y + token.to(tl.int64)[:, None] * stride_y + at[None, :]
    tl.store(target, rounded(result, kind), mask=(token < tokens)[:, None] & is_row[None, :])


_SIZES = ("rows", "cols", "blocks", "scales_at", "row_scales_at", "stride_x", "stride_y")
_TYPES = {
    "parts": "*fp32:16",
    "counters": "*i32:16",
    "share": "i32:16",
    "data": "*u8:16",
    "tokens": "i32",
    "tiles": "i32",
    "groups": "i32",
    **{n: "i32:16" for n in _SIZES},
}


def _case(
    format: str,
    dtype: str,
    config: TileConfig | TokenConfig,
    tokens: int,
    gate_up: bool,
    even: bool,
    rounds: bool = False,
) -> CompileCase:
    splits = 1 if even else 2
    sums = {"parts": None, "counters": None} if splits == 1 else {}
    constants: dict[str, Any] = {
        "FORMAT": format,
        "GROUP": GROUPS[format],
        "GATE_UP": gate_up,
        "ACT": "silu" if gate_up else "",
        "HAS_BIAS": not gate_up,
        "EVEN": even,
    }
    if isinstance(config, TokenConfig):
        kernel, stages = _tokens, 1
        constants |= {"QUADS": even, "WARPS": config.warps, "SHARES": config.shares, **sums}
        constants |= {"PAIRS": config.pairs, "UNITS": config.units, "HOLD": config.hold}
        constants |= {"FRAGMENTS": tokens // 8, "SPLITS": splits}
    else:
        kernel, stages = _rows if tokens > 1 else _row, config.stages
        constants |= {"TILES": config.tiles, "KB": config.kb, "STAGES": stages}
        if tokens > 1:
            constants |= {"BLOCK_T": tokens, "SPLIT": config.warps}
        else:
            constants |= {"AHEAD": config.ahead, "BYTES": rounds, "QUADS": even}
            constants |= {"SPLITS": splits, **sums}
    pointers = {n: f"*{dtype}:16" for n in ("x", "bias", "y")}
    types = {**_TYPES, **pointers}
    form = f"{'gate_up' if gate_up else 'linear'} {'even' if even else 'odd'}"
    form += " bytes" if rounds else ""
    return CompileCase(
        kernel,
        f"linear_packed T={tokens} {format} {dtype} {form}",
        {n: t for n, t in types.items() if n in kernel.arg_names and n not in constants},
        constants,
        config.warps,
        stages,
        lockstep=kernel is _tokens,
    )


COMPILE_CASES = [
    *(
        _case(format, dtype, ROW, 1, False, even)
        for format in FORMATS
        for dtype, even in (("bf16", True), ("fp32", False))
    ),
    *(
        _case(format, "bf16", config, 1, True, even)
        for format in FORMATS
        for even, config in enumerate(ROW_GATE_UP[format])
    ),
    *(
        _case(format, dtype, config, 1, gate_up, even, rounds=True)
        for format in ("int4", "int4p")
        for dtype, config, gate_up, even in (
            ("bf16", ROW_BYTES, False, True),
            ("fp16", ROW_BYTES, False, False),
            ("bf16", ROW_SHALLOW, False, True),
            ("bf16", ROW_GATE_UP["bytes"][0], True, False),
            ("bf16", ROW_GATE_UP["bytes"][1], True, True),
        )
    ),
    _case("int8", "bf16", ROW_SHALLOW, 1, False, True),
    *(
        _case(format, dtype, _token_config(tokens, format), tokens, gate_up, even)
        for format in FORMATS
        for dtype, tokens, gate_up, even in (
            ("bf16", 8, False, True),
            ("bf16", 16, True, True),
            ("fp16", 16, False, False),
        )
    ),
    *(_case(format, "bf16", ROWS, 32, up, up) for format in FORMATS for up in (False, True)),
    *(_case(format, "fp16", ROWS_F16, 32, False, True) for format in FORMATS),
    *(_case(format, "fp32", ROWS_F32, 16, False, False) for format in FORMATS),
]

__all__ = [
    "ROW",
    "ROWS",
    "ROW_BYTES",
    "ROW_SHALLOW",
    "ROW_SWEEP",
    "TOKENS",
    "TOKENS_SWEEP",
    "TileConfig",
    "TokenConfig",
    "config_for",
    "linear_packed",
    "most_direct",
    "product_of_tiles",
    "swiglu_packed",
    "token_splits",
]
