# pyright: basic
"""attn.sdpa: chooses the decode form (`sdpa_decode`) or the prefill form (`sdpa_prefill`)."""

from __future__ import annotations

import torch

from ktgraph.ir.graph import Module, Op, Value
from ktgraph.ir.types import StateType
from ktgraph.ops.registry import Refusal, no
from ktgraph.runtime.state import State
from ktgraph.triton_kernels import sdpa_decode, sdpa_prefill
from ktgraph.triton_kernels.batch import DeviceBatch
from ktgraph.triton_kernels.registry import cuda_kernel

_LARGEST_HEAD = 256


def _supports(op: Op, module: Module) -> bool | Refusal:
    kv = op.operands[1]
    if not isinstance(kv, Value) or not isinstance(kv.type, StateType):
        return no("its second operand is not a cache state", op)
    sizes = [part.dims[-1].at(module.dims) for part in kv.type.parts]
    if max(sizes) > _LARGEST_HEAD:
        return no(f"head size {max(sizes)}: {_LARGEST_HEAD} at most", op)
    return True


@cuda_kernel("attn.sdpa", name="triton.sdpa", nmse=2e-5, supports=_supports)
def sdpa(
    q: torch.Tensor,
    kv: State,
    batch: DeviceBatch,
    sinks: torch.Tensor | None = None,
    *,
    out: tuple[torch.Tensor],
    layer: int,
    scale: float,
    window: int,
    softcap: float,
) -> None:
    """The decode form where all new tokens and heads of a key head fit one query tile."""
    (result,) = out
    k, v = (part[layer] for part in kv.parts)
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == result.stride(-1) == 1
    rows = batch.max_new * (q.shape[1] // k.shape[1])
    form = sdpa_decode if rows <= sdpa_decode.most_rows(q.dtype) else sdpa_prefill
    form.launch(q, k, v, batch, sinks, result, scale=scale, window=window, softcap=softcap)


__all__ = ["sdpa"]
