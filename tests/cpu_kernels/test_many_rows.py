"""Rows from which a weight's kernel takes its path for many, as a plan gives them."""

import pytest
import torch
from gguf_blocks import FORMATS as GGUF

INTEGERS = [
    ("int8", 0), ("int8", 64), ("int4", 32), ("int4p", 128), ("int4z", 64), ("mxfp4", 32),
    *((fmt, 0) for fmt in GGUF),
]  # fmt: skip
EXPERTS, INNER, HIDDEN = 4, 96, 256


def experts(lab, ids, x, fmt, group, rows, many_rows):
    """One chosen expert for each token, on weights that are the same in every call."""
    made = lab.__class__(lab.isa, lab.dtype, lab.threads)
    w13 = made.randn(EXPERTS, 2 * INNER, HIDDEN, dtype=torch.float32, scale=0.1)
    w2 = made.randn(EXPERTS, HIDDEN, INNER if fmt not in GGUF else HIDDEN, dtype=torch.float32)
    w13 = w13 if fmt not in GGUF else w13.repeat(1, 3, 1)[:, : 2 * HIDDEN].contiguous()
    y = made.out(*x.shape)
    operands = [
        made.tok(x),
        made.tok(torch.tensor(ids, dtype=torch.int32)[:, None]),
        made.tok(torch.ones(len(x), 1)),
        made.weight(fmt, w13, group, True, rows, many_rows)[0],
        made.weight(fmt, w2, group, False, rows, many_rows)[0],
        None,
        None,
        made.tok(y),
    ]
    made.run("cpu.grouped_mlp", operands, {"act": "silu"}, T=len(x))
    assert torch.isfinite(y).all()
    return y


@pytest.mark.parametrize(("fmt", "group"), INTEGERS)
def test_integers_have_equal_bits_at_any_count(isa, tools, fmt, group):
    lab = tools.Lab(isa, torch.float32)
    x, ids = lab.randn(40, HIDDEN), [0] * 20 + [1] * 9 + [3] * 11
    first, *others = [experts(lab, ids, x, fmt, group, "int8", n) for n in (0, 1, 10, 4096)]
    assert all(torch.equal(y, first) for y in others)


@pytest.mark.parametrize("fmt", ["bf16", "fp8"])
def test_experts_take_bf16_rows_by_the_tokens_of_a_call(isa, tools, fmt):
    """Four experts with four rows each: from 16 tokens on, however they are routed."""
    lab = tools.Lab(isa, torch.float32)
    x, group = lab.randn(16, HIDDEN), 128 if fmt == "fp8" else 0
    even, uneven = [t % EXPERTS for t in range(16)], [0] * 15 + [1]
    y = experts(lab, even, x, fmt, group, "bf16", 4)
    f32 = experts(lab, even, x, fmt, group, "bf16", 4096)
    has_bf16_rows = isa in ("avx512_bf16", "amx", "amx_emulated")
    assert torch.equal(y, f32) != has_bf16_rows
    one = experts(lab, uneven, x, fmt, group, "bf16", 4)
    assert torch.equal(one[0], y[0])  # token 0 has expert 0 in both
    fewer = experts(lab, even[:15], x[:15], fmt, group, "bf16", 4)
    assert torch.equal(fewer, f32[:15])


def test_linears_count_the_tokens(isa, tools):
    lab = tools.Lab(isa, torch.float32)
    x, w = lab.randn(20, 64), lab.randn(48, 64)

    def linear(tokens, many_rows):
        packed, _ = lab.weight("bf16", w, 0, False, "bf16", many_rows)
        y = lab.out(tokens, 48)
        lab.run("cpu.linear", [lab.tok(x[:tokens]), packed, None, lab.tok(y)], T=tokens)
        return y

    f32, bf16 = linear(20, 4096), linear(20, 1)
    assert torch.equal(f32, bf16) != (isa in ("avx512_bf16", "amx", "amx_emulated"))
    assert torch.equal(linear(20, 20), bf16)
    assert torch.equal(linear(19, 20), f32[:19])
    assert torch.equal(linear(8, 1), f32[:8])  # so few meet bf16 weights as f32, always


def test_a_negative_count_is_refused(tools):
    lab = tools.Lab("avx2", torch.float32)
    with pytest.raises(ValueError, match="many_rows must be positive, or 0 for the default"):
        lab.weight("int8", lab.randn(16, 64), many_rows=-1)
