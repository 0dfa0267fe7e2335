"""Linear and gated MLP with packed weights: y = x @ w.T + b, and w2 @ (act(gate) * up).

The value of a weight is what its bytes mean; x is taken as it is, but by one token with 4-bit
weights whose encoding says `rows=int8` (tile_bytes.py).  Forms by the number of tokens:

1          packed_row.py: products and sums without matrix units
2..16      packed_tokens.py: words become operands of the matrix units where they were loaded
17..32     packed_rows.py: by way of shared memory.  So do 9..16 rows of x and wide weights of few
           columns, and 2..16 rows of float32.
more       `unpack` into a scratch matrix, then the dense product.
           Floor: packed bytes read, dense bytes written and read; 2*T*N*K FLOPs.

With gate_up the direct forms apply the activation to a pair of tiles before anything is stored.
"""

from __future__ import annotations

import torch

from ktgraph.triton_kernels.dependent import dependent_launch
from ktgraph.triton_kernels.packed import PackedWeight, packed_weights
from ktgraph.triton_kernels.packed_forms import MOST_DIRECT
from ktgraph.triton_kernels.packed_row import (
    FULL_GPU,
    ROW,
    ROW_BYTES,
    ROW_GATE_UP,
    ROW_SHALLOW,
    RowConfig,
    row_launch,
)
from ktgraph.triton_kernels.packed_rows import (
    ROWS,
    ROWS_F16,
    ROWS_F32,
    RowsConfig,
    rows_launch,
)
from ktgraph.triton_kernels.packed_sums import Launch
from ktgraph.triton_kernels.packed_tokens import TokenConfig, token_config, tokens_launch
from ktgraph.triton_kernels.registry import cuda_kernel
from ktgraph.triton_kernels.silu_mul import gated_mul
from ktgraph.triton_kernels.unpack import unpack

Config = RowConfig | TokenConfig | RowsConfig

_SHALLOW = 2048  # columns of a matrix whose programs end before many warps pay


def most_direct(dtype: torch.dtype) -> int:
    """Tokens whose sums fit into registers: float32 products need more of them."""
    return 16 if dtype == torch.float32 else MOST_DIRECT


def config_for(tokens: int, dtype: torch.dtype, w: PackedWeight, *, gate_up: bool) -> Config:
    if tokens > 1:
        return _config_for_rows(tokens, dtype, w)
    bytes_ = w.rounds(dtype)
    if gate_up:
        return ROW_GATE_UP["bytes" if bytes_ else w.format][w.tiles > FULL_GPU]
    if (bytes_ or w.format == "int8") and _is_shallow(w):
        return ROW_SHALLOW
    return ROW_BYTES if bytes_ else ROW


def _config_for_rows(tokens: int, dtype: torch.dtype, w: PackedWeight) -> Config:
    """Beyond 16 tokens sums leave too few registers for words on their way."""
    if dtype == torch.float32:
        return ROWS_F32
    if tokens > 16 or (tokens > 8 and _is_shallow(w)):
        return ROWS_F16 if dtype == torch.float16 else ROWS
    return token_config(tokens, w.format)


def _is_shallow(w: PackedWeight) -> bool:
    return w.cols <= _SHALLOW and w.tiles >= 2 * FULL_GPU


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
    config: Config | None = None,
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
    config: Config | None = None,
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
    config: Config | None = None,
) -> None:
    """y[T, rows] = x @ w.T + b; with `act` y[T, rows / 2] = act(gate) * up (w is gate_up)."""
    assert w.count == 1
    assert x.stride(1) == 1
    assert y.stride(1) == 1
    assert x.shape[1] == w.cols
    assert act is None or (w.gate_up and b is None)
    tokens = x.shape[0]
    if tokens == 0:
        return
    tile = config or config_for(tokens, x.dtype, w, gate_up=act is not None)
    grid, kernel, extra = _launch(x, w, tile)
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


def _launch(x: torch.Tensor, w: PackedWeight, config: Config) -> Launch:
    if isinstance(config, RowConfig):
        return row_launch(x, w, config)
    if isinstance(config, TokenConfig):
        return tokens_launch(x, w, config)
    return rows_launch(x, w, config)


__all__ = [
    "Config",
    "config_for",
    "linear_packed",
    "most_direct",
    "product_of_tiles",
    "swiglu_packed",
]
