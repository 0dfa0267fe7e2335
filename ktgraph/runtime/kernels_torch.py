"""Ops that torch runs best, or alone: its own kernels on the CPU and on a GPU.

`torch.call` is torch by its meaning.  It runs on the CPU, where the module that it calls lives.
"""

from __future__ import annotations

from typing import Any

import torch

from ktgraph.ops.attn import attend
from ktgraph.ops.nn import act, layer_norm
from ktgraph.ops.registry import register_kernel
from ktgraph.ops.tensor import reshape, scale
from ktgraph.ops.torch_call import torch_call

_OWN = (
    ("nn.layer_norm", "torch.layer_norm", layer_norm),
    ("attn.attend", "torch.attend", attend),
)


def register_all() -> None:
    """Register them; on a GPU they write to results that they are given."""
    for op, name, function in _OWN:
        register_kernel(op, name, "cpu", launch=function)
        register_kernel(op, name, "cuda", into=_into(function), nmse=1e-4)
    register_kernel("nn.act", "torch.act", "cpu", launch=act)
    register_kernel("tensor.scale", "torch.scale", "cpu", launch=scale)
    register_kernel("tensor.reshape", "torch.copy", "cpu", launch=reshape, nmse=0.0)
    register_kernel("torch.call", "torch.eager", "cpu", launch=torch_call, nmse=0.0)


def _into(function: Any) -> Any:
    def launch(*operands: Any, out: Any, **attrs: Any) -> None:
        target: torch.Tensor = out[0]
        target.copy_(function(*operands, **attrs))

    return launch


register_all()

__all__ = ["register_all"]
