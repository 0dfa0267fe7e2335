# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false
"""nn.rope, kv.append, and both in one launch: kv.rope_append and their latent forms.

    angle = position * freqs[j];  low = a cos - b sin,  high = b cos + a sin, in f32
Su et al., arXiv 2104.09864.  (a, b) are channels (j, j + J) for "half", (2j, 2j + 1) for the
interleaved styles; "interleaved_to_half" writes low at j and high at j + J.

Tiling: grid (token, block).  The blocks of a token are tiles of heads: first those of q, then those
of k, then those of v (or the latent c), so that one launch turns q and k and writes the cache.
A result row is the token itself or its cache row: page table[pos / page_size].
Floor: each value read and written once over memory bandwidth; 6 FLOPs a turned pair.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ktgraph.runtime.state import State
from ktgraph.triton_kernels.angles import cos_sin
from ktgraph.triton_kernels.batch import DeviceBatch
from ktgraph.triton_kernels.compile import CompileCase
from ktgraph.triton_kernels.dependent import dependent_launch, enter
from ktgraph.triton_kernels.registry import cuda_kernel
from ktgraph.triton_kernels.rounding import rounded

STYLES = ("half", "interleaved", "interleaved_to_half")
_TILE, _WARPS = 1024, 4


@triton.jit
def _convert(values, source: tl.constexpr, result: tl.constexpr):
    """f32 values rounded to the dtype they are computed in, then to the cache's."""
    return rounded(rounded(values, source).to(tl.float32), result)


@triton.jit
def _copy(
    source,
    out,
    block,
    heads,
    first,
    last,
    source_stride,
    out_stride,
    HEADS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Channels first..last of a tile of heads, unchanged."""
    head = block * HEADS + tl.arange(0, HEADS)
    col = first + tl.arange(0, COLS)
    inside = (head < heads)[:, None] & (col < last)[None, :]
    at = source + head[:, None] * source_stride + col[None, :]
    values = tl.load(at, mask=inside).to(tl.float32)
    to = out + head[:, None] * out_stride + col[None, :]
    tl.store(to, rounded(values, out.dtype.element_ty), mask=inside)


@triton.jit
def _turn(
    source,
    out,
    block,
    heads,
    cosine,
    sine,
    source_stride,
    out_stride,
    HEADS: tl.constexpr,
    J: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    STYLE: tl.constexpr,
):
    """Rotate a tile of heads; channels from 2*J to WIDTH pass through."""
    head = block * HEADS + tl.arange(0, HEADS)
    j = tl.arange(0, PAIRS)
    inside = (head < heads)[:, None] & (j < J)[None, :]
    step: tl.constexpr = 1 if STYLE == "half" else 2
    apart: tl.constexpr = J if STYLE == "half" else 1
    at = source + head[:, None] * source_stride + j[None, :] * step
    a = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(at + apart, mask=inside, other=0.0).to(tl.float32)
    low, high = a * cosine - b * sine, b * cosine + a * sine
    step_out: tl.constexpr = 2 if STYLE == "interleaved" else 1
    apart_out: tl.constexpr = 1 if STYLE == "interleaved" else J
    to = out + head[:, None] * out_stride + j[None, :] * step_out
    kind: tl.constexpr = source.dtype.element_ty
    tl.store(to, _convert(low, kind, out.dtype.element_ty), mask=inside)
    tl.store(to + apart_out, _convert(high, kind, out.dtype.element_ty), mask=inside)
    if WIDTH > 2 * J:
        _copy(source, out, block, heads, 2 * J, WIDTH, source_stride, out_stride, HEADS, REST)


@triton.jit
def _cache_row(token, tok_seq, position, block_table, table_stride, page_size):
    """Row of the paged cache that holds the token."""
    sequence = tl.load(tok_seq + token).to(tl.int64)
    page = tl.load(block_table + sequence * table_stride + position // page_size).to(tl.int64)
    return page * page_size + position % page_size


@triton.jit
def _rope(
    q,
    k,
    v,
    q_out,
    k_out,
    v_out,
    freqs,
    tok_seq,
    tok_pos,
    block_table,
    table_stride,
    page_size,
    scale,
    q_heads,
    k_heads,
    v_heads,
    q_token,
    q_head,
    q_out_token,
    q_out_head,
    k_token,
    k_head,
    k_out_row,
    k_out_head,
    v_token,
    v_head,
    v_out_row,
    v_out_head,
    J: tl.constexpr,
    Q_WIDTH: tl.constexpr,
    K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    V_COLS: tl.constexpr,
    HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    CACHE: tl.constexpr,
    STYLE: tl.constexpr,
):
    enter()
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(tok_pos + token)
    row = token
    if CACHE:
        row = _cache_row(token, tok_seq, position, block_table, table_stride, page_size)
    q_blocks, k_blocks = tl.cdiv(q_heads, HEADS), tl.cdiv(k_heads, HEADS)
    if block >= q_blocks + k_blocks:
        if V_WIDTH > 0:
            _copy(
                v + token * v_token, v_out + row * v_out_row, block - q_blocks - k_blocks, v_heads,
                0, V_WIDTH, v_head, v_out_head, V_HEADS, V_COLS,
            )  # fmt: skip
    else:
        j = tl.arange(0, PAIRS)
        frequency = tl.load(freqs + j, mask=j < J, other=0.0).to(tl.float32)
        cosine, sine = cos_sin(position.to(tl.float32) * frequency)
        cosine, sine = (cosine * scale)[None, :], (sine * scale)[None, :]
        if block < q_blocks:
            _turn(
                q + token * q_token, q_out + token * q_out_token, block, q_heads, cosine, sine,
                q_head, q_out_head, HEADS, J, Q_WIDTH, PAIRS, REST, STYLE,
            )  # fmt: skip
        else:
            _turn(
                k + token * k_token, k_out + row * k_out_row, block - q_blocks, k_heads, cosine,
                sine, k_head, k_out_head, HEADS, J, K_WIDTH, PAIRS, REST, STYLE,
            )  # fmt: skip


@triton.jit
def _append(
    k,
    v,
    k_out,
    v_out,
    tok_seq,
    tok_pos,
    block_table,
    table_stride,
    page_size,
    k_heads,
    v_heads,
    k_token,
    k_head,
    k_out_row,
    k_out_head,
    v_token,
    v_head,
    v_out_row,
    v_out_head,
    K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    K_COLS: tl.constexpr,
    V_COLS: tl.constexpr,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
):
    enter()
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = _cache_row(token, tok_seq, tl.load(tok_pos + token), block_table, table_stride, page_size)
    k_blocks = tl.cdiv(k_heads, K_HEADS)
    if block < k_blocks:
        _copy(
            k + token * k_token, k_out + row * k_out_row, block, k_heads,
            0, K_WIDTH, k_head, k_out_head, K_HEADS, K_COLS,
        )  # fmt: skip
    else:
        _copy(
            v + token * v_token, v_out + row * v_out_row, block - k_blocks, v_heads,
            0, V_WIDTH, v_head, v_out_head, V_HEADS, V_COLS,
        )  # fmt: skip


# -- launchers ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Heads:
    """A [T, heads, width] operand or result by its strides."""

    data: torch.Tensor
    heads: int
    width: int
    row_stride: int
    head_stride: int

    @staticmethod
    def of(x: torch.Tensor) -> "_Heads":
        assert x.shape[-1] == 1 or x.stride(-1) == 1
        if x.dim() == 2:
            return _Heads(x, 1, x.shape[1], x.stride(0), 0)
        return _Heads(x, x.shape[1], x.shape[2], x.stride(0), x.stride(1))

    def tile(self, width: int) -> int:
        """Heads of a program, each `width` channels (a power of two)."""
        return min(triton.next_power_of_2(self.heads), max(1, _TILE // width))


def _rope_constants(j: int, q: int, k: int, v: int, v_heads: int, heads: int) -> dict[str, int]:
    """Widths of the tiles for q, k and v of these widths; v = 0: none."""
    v_cols = triton.next_power_of_2(v) if v else 1
    return {
        "J": j,
        "Q_WIDTH": q,
        "K_WIDTH": k,
        "V_WIDTH": v,
        "PAIRS": triton.next_power_of_2(j),
        "REST": triton.next_power_of_2(max(1, q - 2 * j, k - 2 * j)),
        "V_COLS": v_cols,
        "HEADS": min(
            triton.next_power_of_2(heads), max(1, _TILE // triton.next_power_of_2(max(q, k)))
        ),
        "V_HEADS": min(triton.next_power_of_2(v_heads), max(1, _TILE // v_cols)),
    }


def _launch_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    freqs: torch.Tensor,
    batch: DeviceBatch,
    q_out: torch.Tensor,
    k_out: torch.Tensor,
    v_out: torch.Tensor | None,
    style: str,
    scale: float,
) -> None:
    """k_out and v_out are one layer of the cache when there is a v, else k_out is a result."""
    if style not in STYLES:
        raise ValueError(f"style {style!r}: known are {', '.join(STYLES)}")
    if not batch.tokens:
        return
    assert freqs.is_contiguous()
    queries, keys = _Heads.of(q), _Heads.of(k)
    q_to, k_to = _Heads.of(q_out), _Heads.of(k_out)
    values = keys if v is None else _Heads.of(v)
    v_to = k_to if v_out is None else _Heads.of(v_out)
    v_width, v_heads = (0, 0) if v is None else (values.width, values.heads)
    constants = _rope_constants(
        freqs.numel(), queries.width, keys.width, v_width, max(1, v_heads),
        max(queries.heads, keys.heads),
    )  # fmt: skip
    heads = constants["HEADS"]
    blocks = triton.cdiv(queries.heads, heads) + triton.cdiv(keys.heads, heads)
    blocks += triton.cdiv(v_heads, constants["V_HEADS"])
    _rope[(batch.tokens, blocks)](
        q,
        k,
        v,
        q_out,
        k_out,
        v_out,
        freqs,
        batch.tok_seq,
        batch.tok_pos,
        batch.block_table,
        batch.block_table.stride(0),
        batch.page_size,
        scale,
        queries.heads,
        keys.heads,
        v_heads,
        queries.row_stride,
        queries.head_stride,
        q_to.row_stride,
        q_to.head_stride,
        keys.row_stride,
        keys.head_stride,
        k_to.row_stride,
        k_to.head_stride,
        values.row_stride,
        values.head_stride,
        v_to.row_stride,
        v_to.head_stride,
        CACHE=v is not None,
        STYLE=style,
        num_warps=_WARPS,
        **constants,
        **dependent_launch(),
    )


def _launch_append(
    k: torch.Tensor,
    v: torch.Tensor,
    batch: DeviceBatch,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
) -> None:
    """k_out and v_out are one layer of the cache, or column slices of it."""
    if not batch.tokens:
        return
    keys, values, k_to, v_to = (_Heads.of(x) for x in (k, v, k_out, v_out))
    k_cols, v_cols = (triton.next_power_of_2(x.width) for x in (keys, values))
    k_tile, v_tile = keys.tile(k_cols), values.tile(v_cols)
    blocks = triton.cdiv(keys.heads, k_tile) + triton.cdiv(values.heads, v_tile)
    _append[(batch.tokens, blocks)](
        k,
        v,
        k_out,
        v_out,
        batch.tok_seq,
        batch.tok_pos,
        batch.block_table,
        batch.block_table.stride(0),
        batch.page_size,
        keys.heads,
        values.heads,
        keys.row_stride,
        keys.head_stride,
        k_to.row_stride,
        k_to.head_stride,
        values.row_stride,
        values.head_stride,
        v_to.row_stride,
        v_to.head_stride,
        K_WIDTH=keys.width,
        V_WIDTH=values.width,
        K_COLS=k_cols,
        V_COLS=v_cols,
        K_HEADS=k_tile,
        V_HEADS=v_tile,
        num_warps=_WARPS,
        **dependent_launch(),
    )


@cuda_kernel("nn.rope", name="triton.rope", nmse=1e-5)
def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    freqs: torch.Tensor,
    batch: DeviceBatch,
    *,
    out,
    style: str,
    scale: float,
) -> None:
    _launch_rope(q, k, None, freqs, batch, out[0], out[1], None, style, scale)


@cuda_kernel("kv.rope_append", name="triton.rope_append", nmse=1e-5)
def rope_append(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    freqs: torch.Tensor,
    kv: State,
    batch: DeviceBatch,
    *,
    out,
    layer: int,
    style: str,
    scale: float,
) -> None:
    keys, values = (part[layer] for part in kv.parts)
    _launch_rope(q, k, v, freqs, batch, out[0], keys, values, style, scale)


@cuda_kernel("kv.rope_append_latent", name="triton.rope_append_latent", nmse=1e-5)
def rope_append_latent(
    q_pe: torch.Tensor,
    k_pe: torch.Tensor,
    c: torch.Tensor,
    freqs: torch.Tensor,
    kv: State,
    batch: DeviceBatch,
    *,
    out,
    layer: int,
    style: str,
    scale: float,
) -> None:
    rows, latent = kv.parts[0][layer], c.shape[-1]
    _launch_rope(
        q_pe, k_pe, c, freqs, batch, out[0], rows[:, latent:], rows[:, :latent], style, scale
    )


@cuda_kernel("kv.append", name="triton.kv_append", nmse=0.0)
def append(
    kv: State, k: torch.Tensor, v: torch.Tensor, batch: DeviceBatch, *, out, layer: int
) -> None:
    keys, values = (part[layer] for part in kv.parts)
    _launch_append(k, v, batch, keys, values)


@cuda_kernel("kv.append_latent", name="triton.kv_append_latent", nmse=0.0)
def append_latent(
    kv: State, c: torch.Tensor, k_pe: torch.Tensor, batch: DeviceBatch, *, out, layer: int
) -> None:
    rows, latent = kv.parts[0][layer], c.shape[-1]
    _launch_append(c, k_pe, batch, rows[:, :latent], rows[:, latent:])


# -- compile cases --------------------------------------------------------------------------------
_BATCH = {"tok_seq": "*i32:16", "tok_pos": "*i32:16", "block_table": "*i32:16"}
_PAGES = {"table_stride": "i32", "page_size": "i32:16"}


def _case(
    name: str, dtype: str, heads: tuple[int, int, int], widths: tuple[int, int, int], j: int,
    style: str,
) -> CompileCase:  # fmt: skip
    constants = _rope_constants(j, *widths, max(1, heads[2]), max(heads))
    pointers = [n for n in ("q", "k", "v", "q_out", "k_out", "v_out") if widths[2] or n[0] != "v"]
    strides = [f"{n}_{a}" for n in "qkv" for a in ("token", "head")]
    strides += ["q_out_token", "q_out_head", "k_out_row", "k_out_head", "v_out_row", "v_out_head"]
    return CompileCase(
        _rope,
        f"{name} {style} {dtype} heads={heads} widths={widths}",
        {n: f"*{dtype}:16" for n in pointers}
        | {"freqs": "*fp32:16", **_BATCH, **_PAGES, "scale": "fp32"}
        | {n: "i32" for n in ("q_heads", "k_heads", "v_heads")}
        | {n: "i32:16" for n in strides},
        {**constants, "CACHE": bool(widths[2]), "STYLE": style}
        | {n: None for n in ("v", "v_out") if not widths[2]},
        num_warps=_WARPS,
    )


COMPILE_CASES = [
    *(
        _case(name, dtype, heads, widths, j, style)
        for name, heads, widths, j, style in (
            ("rope", (32, 4, 0), (128, 128, 0), 64, "half"),
            ("rope_append", (32, 4, 4), (128, 128, 128), 64, "half"),
            ("rope_append partial", (32, 4, 4), (128, 128, 128), 32, "half"),
            ("rope_append_latent", (128, 1, 1), (64, 64, 512), 32, "interleaved_to_half"),
            ("rope_append_latent", (16, 1, 1), (64, 64, 512), 32, "interleaved"),
        )
        for dtype in ("bf16", "fp32")
    ),
    CompileCase(
        _append,
        "kv_append bf16",
        {n: "*bf16:16" for n in ("k", "v", "k_out", "v_out")}
        | {**_BATCH, **_PAGES, "k_heads": "i32", "v_heads": "i32"}
        | {f"{n}_{a}": "i32:16" for n in "kv" for a in ("token", "head", "out_row", "out_head")},
        {"K_WIDTH": 128, "V_WIDTH": 128, "K_COLS": 128, "V_COLS": 128, "K_HEADS": 8, "V_HEADS": 8},
        num_warps=_WARPS,
    ),
]
