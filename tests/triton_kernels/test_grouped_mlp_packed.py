"""Packed experts against the op reference on the values of the packed bytes, in both forms."""

from dataclasses import replace

import pytest
import torch
from tile_weights import FORMATS, packed

from ktgraph.ops import op_def
from ktgraph.triton_kernels.grouped_mlp_packed import (
    DecodeConfig,
    experts_of_chunk,
    grouped_mlp_packed,
)
from ktgraph.triton_kernels.packed import PackedWeight
from tests.triton_kernels.close import DTYPES, check, poisoned, strided

D, F, EXPERTS, K = 72, 26, 4, 3
BOUND = 1e-4  # of what is rounded in 16 bits
BYTES = 5e-4  # two products with bytes of x, and an activation that may square
CONFIG = DecodeConfig(2, 16, 2, 1, down_warps=2, down_stages=2)
AHEAD = DecodeConfig(2, 16, 2, 1, gate_up_ahead=True, down_warps=2, down_ahead=True)
Weights = tuple[PackedWeight, torch.Tensor]


def experts(format: str, group: int, device: torch.device) -> tuple[Weights, Weights]:
    w13 = packed(torch.randn(EXPERTS, 2 * F, D) / D**0.5, format, group, device, gate_up=True)
    return w13, packed(torch.randn(EXPERTS, D, F) / F**0.5, format, group, device)


def choices(tokens: int, top_k: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct experts of each token, some skipped, and their weights."""
    ids = torch.rand(tokens, EXPERTS).argsort(-1)[:, :top_k].to(torch.int32)
    ids[torch.rand(tokens, top_k) < 0.2] = -1
    return ids.contiguous().to(device), torch.rand(tokens, top_k, device=device)


@pytest.mark.parametrize(("format", "group"), FORMATS)
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize(("decode_pairs", "config"), [(0, CONFIG), (64, CONFIG), (64, AHEAD)])
def test_formats(
    format: str,
    group: int,
    tokens: int,
    decode_pairs: int,
    config: DecodeConfig,
    device: torch.device,
) -> None:
    (exact13, v13), (exact2, v2) = experts(format, group, device)
    ids, weights = choices(tokens, K, device)
    forms = [(dtype, "f32") for dtype in DTYPES] if tokens == 1 else [(torch.bfloat16, "f32")]
    if decode_pairs and format != "int8":
        forms += [(torch.bfloat16, "int8")]
    for dtype, row_form in forms:
        w13, w2 = replace(exact13, row_form=row_form), replace(exact2, row_form=row_form)
        x = strided(torch.randn(tokens, D, device=device).to(dtype))
        out = strided(poisoned(tokens, D, dtype=dtype, device=device))
        attrs = {"act": "silu", "alpha": 1.702, "limit": 7.0}
        grouped_mlp_packed(
            x, ids, weights, w13, w2, None, None, out=(out,), decode_pairs=decode_pairs,
            config=config, **attrs,
        )  # fmt: skip
        wanted = op_def("moe.grouped_mlp").reference(
            x, ids, weights, v13.to(dtype), v2.to(dtype), None, None, **attrs
        )
        check(out, wanted, BYTES if w13.rounds(dtype) else BOUND)


@pytest.mark.parametrize("act", ["gelu", "gelu_tanh", "relu", "relu2", "swiglu_clamped"])
@pytest.mark.parametrize("decode_pairs", [0, 64])
@pytest.mark.parametrize("top_k", [1, 4])
def test_activations_and_biases(
    act: str, decode_pairs: int, top_k: int, device: torch.device
) -> None:
    (w13, v13), (w2, v2) = experts("int4", 32, device)
    ids, weights = choices(3, top_k, device)
    x = torch.randn(3, D, device=device)
    b13, b2 = torch.randn(EXPERTS, 2 * F, device=device), torch.randn(EXPERTS, D, device=device)
    out = poisoned(3, D, dtype=x.dtype, device=device)
    attrs = {"act": act, "alpha": 1.5, "limit": 0.7}
    grouped_mlp_packed(
        x, ids, weights, w13, w2, b13, b2, out=(out,), decode_pairs=decode_pairs, config=CONFIG,
        **attrs,
    )  # fmt: skip
    wanted = op_def("moe.grouped_mlp").reference(x, ids, weights, v13, v2, b13, b2, **attrs)
    check(out, wanted, BOUND)


@pytest.mark.parametrize("tokens", [7, 33])
def test_chunks_of_experts(tokens: int, device: torch.device) -> None:
    (w13, v13), (w2, v2) = experts("int4", 64, device)
    ids, weights = choices(tokens, K, device)
    x = torch.randn(tokens, D, device=device)
    attrs = {"act": "silu", "alpha": 1.702, "limit": 7.0}
    wanted = op_def("moe.grouped_mlp").reference(x, ids, weights, v13, v2, None, None, **attrs)
    one = 4 * 3 * D * F
    for scratch_bytes, size in ((1, 1), (2 * one, 2), (3 * one, 2), (4 * one, 4)):
        assert experts_of_chunk(w13, w2, x.dtype, scratch_bytes) == size
        out = poisoned(tokens, D, dtype=x.dtype, device=device)
        grouped_mlp_packed(
            x, ids, weights, w13, w2, None, None, out=(out,), decode_pairs=0,
            scratch_bytes=scratch_bytes, **attrs,
        )  # fmt: skip
        check(out, wanted, BOUND)


def test_a_token_without_experts_gets_zeros(device: torch.device) -> None:
    (w13, _), (w2, _) = experts("int4p", 32, device)
    ids = torch.full((2, K), -1, dtype=torch.int32, device=device)
    weights, x = torch.rand(2, K, device=device), torch.randn(2, D, device=device)
    for decode_pairs in (0, 64):
        out = poisoned(2, D, dtype=x.dtype, device=device)
        grouped_mlp_packed(
            x, ids, weights, w13, w2, None, None, out=(out,), act="silu", alpha=1.0, limit=7.0,
            decode_pairs=decode_pairs,
        )  # fmt: skip
        assert torch.equal(out, torch.zeros_like(out))
