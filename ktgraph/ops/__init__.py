"""The op table: importing this package declares every op (one file per family)."""

from ktgraph.ops import attn, kv, logits, mla, moe, nn, sample, tensor, torch_call, xfer
from ktgraph.ops.registry import (
    KernelDef,
    OpDef,
    Refusal,
    all_ops,
    build,
    case,
    is_op,
    kernel,
    kernels_for,
    no,
    op,
    op_def,
    register_kernel,
)
from ktgraph.ops.signature import SignatureError

__all__ = [
    "KernelDef",
    "OpDef",
    "Refusal",
    "SignatureError",
    "all_ops",
    "attn",
    "build",
    "case",
    "is_op",
    "kernel",
    "kernels_for",
    "kv",
    "logits",
    "mla",
    "moe",
    "nn",
    "no",
    "op",
    "op_def",
    "register_kernel",
    "sample",
    "tensor",
    "torch_call",
    "xfer",
]
