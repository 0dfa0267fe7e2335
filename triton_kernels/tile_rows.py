# pyright: basic, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
"""A row of x times packed tiles, without matrix units: what one token and few pairs run.

Rows meet the weights as floats, or as bytes (tile_bytes.py) where the weight's encoding says
`rows=int8`.  See tile_words.py for words, scales and the budget.
"""

import triton
import triton.language as tl

from ktgraph.triton_kernels.dependent import wait_for_inputs
from ktgraph.triton_kernels.dots import INTERPRETED
from ktgraph.triton_kernels.e4m3 import e4m3, e4m3_factor
from ktgraph.triton_kernels.tile_bytes import byte_products, column_of
from ktgraph.triton_kernels.tile_words import (
    added,
    column,
    factors,
    has_row_scales,
    loaded,
    mantissa,
    row_scales,
    span_of,
    step_of,
    stored_scales,
)

_PLAIN = tl.constexpr(INTERPRETED)  # the interpreter runs no inline PTX


@triton.jit
def _float_products(x, words, codes, first, cols, valid, FORMAT: tl.constexpr, EVEN: tl.constexpr):
    """Sums over the columns of a block from `first`, without the scale of their row."""
    STEP: tl.constexpr = step_of(FORMAT)
    # What was added and taken off costs up to 6 bits of a sum: too many of a float32 result.
    EXACT: tl.constexpr = x.dtype.scalar.element_ty == tl.float32
    part = words.to(tl.float32) * 0.0
    over = first.to(tl.float32) * 0.0  # what `mantissa` adds, times x
    total = over  # sum of x: only int4p asks for it
    for n in tl.static_range(STEP):
        at = first + column(n, FORMAT)
        value = column_of(x, at, cols, valid, EVEN)
        number = mantissa(words, n, FORMAT)
        if EXACT:
            part += value * (number - added(n, FORMAT))
        else:
            part += value * number
            over += value * added(n, FORMAT)
        total += value
    part -= over
    if FORMAT == "int8":
        return part
    else:
        scale, less = factors(codes, FORMAT)
        if FORMAT == "int4p":
            part += less * total
        return scale * part


@triton.jit
def _e4m3_products(x, words, scale, first, cols, valid, EVEN: tl.constexpr):
    """`_float_products` of fp8 and 4 columns, divided by `e4m3_factor`."""
    part = column_of(x, first, cols, valid, EVEN) * e4m3(words, 0)
    for n in tl.static_range(1, 4):
        part += column_of(x, first + n, cols, valid, EVEN) * e4m3(words, n)
    return part * scale


@triton.jit
def _step(
    words_at,
    scales,
    tile,
    row,
    kb,
    valid,
    end,
    groups,
    FORMAT: tl.constexpr,
    SPAN: tl.constexpr,
    EVEN: tl.constexpr,
    TILES: tl.constexpr,
    BYTES: tl.constexpr,
):
    """(words, words of the blocks behind, codes of their groups) of blocks kb, as they are stored.

    Only bytes ask for the blocks behind; int8 has no codes.
    """
    # Hints to Triton's choice of who loads what.  The rows of a thread: 16 bytes of words, not of
    # codes; 8 where tiles do not share x.  Then blocks over the threads and tiles within a thread,
    # which then loads x once for all its rows: axes are taken in the order of how contiguous they
    # are, and left alone Triton 3.6 takes tiles before blocks.
    ROWS: tl.constexpr = 8 if TILES == 1 or (BYTES and TILES > 2) else 4
    inside = valid & (kb < end)
    at = tl.max_contiguous(kb * 16 + row, [1, 2, ROWS])
    words = loaded(words_at + at, inside, EVEN)
    more = loaded(words_at + 16 + at, inside, EVEN) if BYTES else words
    if FORMAT == "int8":
        return words, more, words
    else:
        at = tl.max_contiguous((tile * groups + kb // SPAN) * 16 + row, [1, 2, ROWS])
        return words, more, stored_scales(scales, at, inside, FORMAT, EVEN)


@triton.jit
def loads_stay_before():
    """Loads above this line are issued above it: left alone, ptxas moves a load to its first use,
    across all the products that should have hidden it, to save registers."""
    if not _PLAIN:
        tl.inline_asm_elementwise(
            "bar.warp.sync 0xffffffff; mov.b32 $0, 0;", "=r", [], tl.int32, False, 1
        )


@triton.jit
def tiles_times_rows(
    x,  # pointer, or pointers [P, 1, 1], to the row of x that meets each tile
    data,  # uint8 pointer to the stack
    matrix,  # [P, 1, 1] byte offset of each tile's matrix
    tile,  # [P, 1, 1] number of the tile in its matrix
    valid,  # [P, 1, 1] False: contributes 0 and reads nothing
    cols,
    blocks,
    first,  # the blocks first .. end - 1 are multiplied
    end,
    groups,
    scales_at,
    row_scales_at,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,  # every tile is valid, first .. end are whole steps of KB, cols is kpad
    TILES: tl.constexpr,
    KB: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    BYTES: tl.constexpr,  # x is rounded to bytes: 4-bit weights and 16 bits of x only
    QUADS: tl.constexpr,  # see `in_quads`
    ENTER: tl.constexpr,  # wait for x here, behind the first step's words
):
    """[P, 16] f32: P tiles, each times a row of x; P = TILES.

    KB blocks of every tile a step.  Partial sums stay with the thread that owns the words (4 rows
    of a block: one 16-byte load) and meet once, at the end.  A step has fewer columns of x than
    threads, so that Triton loads x where it is used instead of sending it through shared memory.

    AHEAD: a step's words are loaded into registers while the one before is multiplied.  Without
    it, and with one stage, all warps wait for memory together and then compute together.
    """
    STEP: tl.constexpr = step_of(FORMAT)
    SPAN: tl.constexpr = span_of(FORMAT, GROUP)
    WHOLE: tl.constexpr = EVEN and not AHEAD  # the step after the last one is masked
    UNIT: tl.constexpr = 2 if BYTES else 1  # blocks
    row = tl.arange(0, 16)[None, None, :]
    block = tl.arange(0, KB // UNIT)[None, :, None] * UNIT
    acc = tl.zeros([TILES, KB // UNIT, 16], dtype=tl.float32)
    words_at = (data + matrix + tile.to(tl.int64) * blocks * 64).to(tl.pointer_type(tl.int32))
    scales = data + matrix + scales_at
    if ENTER and not AHEAD:
        wait_for_inputs()
    if AHEAD:
        kb = first + block
        words, more, codes = _step(
            words_at, scales, tile, row, kb, valid, end, groups, FORMAT, SPAN, WHOLE, TILES, BYTES
        )
        if ENTER:
            wait_for_inputs()
    for start in tl.range(first, end, KB, num_stages=STAGES):
        kb = start + block
        if AHEAD:
            words_next, more_next, codes_next = _step(
                words_at,
                scales,
                tile,
                row,
                kb + KB,
                valid,
                end,
                groups,
                FORMAT,
                SPAN,
                WHOLE,
                TILES,
                BYTES,
            )
            loads_stay_before()
        else:
            words, more, codes = _step(
                words_at,
                scales,
                tile,
                row,
                kb,
                valid,
                end,
                groups,
                FORMAT,
                SPAN,
                WHOLE,
                TILES,
                BYTES,
            )
        if BYTES:
            acc += byte_products(x, words, more, codes, kb * STEP, cols, valid, FORMAT, EVEN, QUADS)
        elif FORMAT == "fp8":
            acc += _e4m3_products(x, words, codes, kb * STEP, cols, valid, EVEN)
        else:
            acc += _float_products(x, words, codes, kb * STEP, cols, valid, FORMAT, EVEN)
        if AHEAD:
            words, more, codes = words_next, more_next, codes_next
    valid = tl.reshape(valid, [TILES, 1])
    sums = tl.sum(acc, axis=1)
    if FORMAT == "fp8":
        sums *= e4m3_factor()
    if has_row_scales(FORMAT):
        at = (matrix + row_scales_at) // 4 + tile * 16 + row
        sums *= row_scales(data, tl.reshape(at, [TILES, 16]), valid)
    return sums


@triton.jit
def gate_and_up(acc, TILES: tl.constexpr):
    """[P, TILES * 16] of tiles gate, up, gate ... as two of [P, TILES * 8]."""
    P: tl.constexpr = acc.shape[0]
    pairs = tl.reshape(acc, [P, TILES // 2, 2, 16])
    gate, up = tl.split(tl.permute(pairs, [0, 1, 3, 2]))
    return tl.reshape(gate, [P, TILES * 8]), tl.reshape(up, [P, TILES * 8])


__all__ = ["gate_and_up", "loads_stay_before", "tiles_times_rows"]
