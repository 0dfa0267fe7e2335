"""Random packed weights made on the GPU, for the benchmarks of packed kernels."""

from __future__ import annotations

import torch

from ktgraph.cpu_kernels.reference_layouts import Layout
from ktgraph.triton_kernels.packed import PackedWeight


def random_packed(
    format: str,
    rows: int,
    cols: int,
    *,
    count: int = 1,
    group: int = 64,
    gate_up: bool = False,
    row_form: str = "int8",
) -> PackedWeight:
    """Any bytes are integers, nibbles or (but for NaN) e4m3; scales make rows of norm about 1.

    group: of int4 and int4p.  row_form: as `kt.compile` chooses it; "f32" as with
    activations="f32".
    """
    group = {"int8": 0, "fp8": 128}.get(format, group)
    layout = Layout(format, rows, cols, group, gate_up)
    data = torch.randint(256, (count, layout.stride), dtype=torch.uint8, device="cuda")
    if format == "fp8":
        data.masked_fill_(data & 0x7F == 0x7F, 0)
    at, end = layout.data_nbytes, layout.data_nbytes + layout.scale_nbytes
    deviation = {"int8": 74.0, "int4": 4.6, "int4p": 4.6 * 8, "fp8": 100.0}[format]
    scale = torch.empty(count, (end - at) // 4, device="cuda").uniform_(0.5, 1.5)
    scale /= deviation * cols**0.5
    if format in ("int8", "fp8"):
        data[:, at:end] = scale.view(torch.uint8)
    elif format == "int4":
        halves = scale.repeat_interleave(2, dim=1).bfloat16()
        data[:, at:end] = halves.view(torch.uint8)
    else:
        rows_at = end - 64 * layout.tiles
        data[:, rows_at:end] = scale[:, : 16 * layout.tiles].contiguous().view(torch.uint8)
    return PackedWeight(data.reshape(-1), format, rows, cols, count, group, gate_up, row_form)


def sets_beyond_l2(nbytes: int) -> int:
    """Weights of this size that together exceed the 60 MB of L2 by far."""
    return max(2, -(-(256 << 20) // nbytes))
