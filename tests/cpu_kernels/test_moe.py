"""Routing, grouped experts and the dense gated MLP, against plain torch."""

import pytest
import torch
import torch.nn.functional as F


def act_ref(act, g, u):
    if act == "swiglu_clamped":
        g, u = g.clamp(max=7.0), u.clamp(-7.0, 7.0)
        return (u + 1) * g * torch.sigmoid(1.702 * g)
    fn = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "relu": F.relu,
    }[act]
    return fn(g) * u


def mlp_ref(x, ids, wts, w13, w2, act, b13=None, b2=None):
    y = torch.zeros(x.shape[0], w2.shape[1], dtype=torch.float64)
    inner = w13.shape[1] // 2
    for e in range(w13.shape[0]):
        t, k = (ids == e).nonzero(as_tuple=True)
        h = x[t].double() @ w13[e].T + (b13[e].double() if b13 is not None else 0)
        d = act_ref(act, h[:, :inner], h[:, inner:]) @ w2[e].T + (
            b2[e].double() if b2 is not None else 0
        )
        y.index_add_(0, t, wts[t, k].double()[:, None] * d)
    return y


@pytest.mark.parametrize(
    ("fmt", "group"), [("f32", 0), ("bf16", 0), ("int8", 0), ("int4", 32), ("int4", 64)]
)
@pytest.mark.parametrize(
    ("T", "E", "K", "D", "inner"), [(1, 6, 2, 33, 20), (3, 4, 4, 48, 15), (64, 5, 2, 250, 40)]
)
def test_grouped_mlp(lab, fmt, group, T, E, K, D, inner):
    x, y = lab.strided(T, D), lab.out(T, D)
    ids = torch.stack([torch.randperm(E, generator=lab.gen)[:K] for _ in range(T)]).int()
    ids[T // 2, K - 1] = -1
    wts = torch.rand(T, K, generator=lab.gen)
    w13, d13 = lab.weight(
        fmt, lab.randn(E, 2 * inner, D, dtype=torch.float32, scale=D**-0.5), group, gate_up=True
    )
    w2, d2 = lab.weight(fmt, lab.randn(E, D, inner, dtype=torch.float32), group)
    ops = [lab.tok(x), lab.tok(ids), lab.tok(wts), w13, w2, None, None, lab.tok(y)]
    lab.run("cpu.grouped_mlp", ops, {"act": "silu"}, T=T)
    lab.close(y, mlp_ref(x, ids, wts, d13, d2, "silu"))


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh", "relu", "swiglu_clamped"])
def test_activations_and_biases(lab, act):
    T, E, K, D, inner = 7, 3, 2, 40, 21
    x, y = lab.randn(T, D, scale=3.0), lab.out(T, D)
    ids, wts = (
        torch.randint(0, E, (T, K), generator=lab.gen).int(),
        torch.rand(T, K, generator=lab.gen),
    )
    w13, d13 = lab.weight("f32", lab.randn(E, 2 * inner, D, dtype=torch.float32), gate_up=True)
    w2, d2 = lab.weight("f32", lab.randn(E, D, inner, dtype=torch.float32))
    b13, b2 = lab.randn(E, 2 * inner, dtype=torch.float32), lab.randn(E, D, dtype=torch.float32)
    ops = [
        lab.tok(x),
        lab.tok(ids),
        lab.tok(wts),
        w13,
        w2,
        lab.tensor(b13),
        lab.tensor(b2),
        lab.tok(y),
    ]
    lab.run("cpu.grouped_mlp", ops, {"act": act}, T=T)
    lab.close(y, mlp_ref(x, ids, wts, d13, d2, act, b13, b2))


def test_many_tokens_all_skipped_and_bad_ids(lab):
    """More tokens than one slice, experts with no token at all, and tokens with none."""
    T, E, K, D, inner = 1100, 9, 2, 16, 16
    x, y = lab.randn(T, D), lab.out(T, D)
    ids, wts = (
        torch.randint(0, E - 2, (T, K), generator=lab.gen).int(),
        torch.rand(T, K, generator=lab.gen),
    )
    ids[600:620] = -1
    w13, d13 = lab.weight("bf16", lab.randn(E, 2 * inner, D), gate_up=True)
    w2, d2 = lab.weight("bf16", lab.randn(E, D, inner))
    ops = [lab.tok(x), lab.tok(ids), lab.tok(wts), w13, w2, None, None, lab.tok(y)]
    lab.run("cpu.grouped_mlp", ops, {"act": "silu"}, T=T)
    lab.close(y, mlp_ref(x, ids, wts, d13, d2, "silu"))
    assert (y[600:620] == 0).all()
    ids[5, 0] = E
    with pytest.raises(RuntimeError, match="expert id outside the stack: 9"):
        lab.run("cpu.grouped_mlp", ops, {"act": "silu"}, T=T)


@pytest.mark.parametrize("T", [1, 3, 64])
@pytest.mark.parametrize("fmt", ["bf16", "int8"])
def test_swiglu(lab, T, fmt):
    D, inner = 50, 33
    x, y = lab.strided(T, D), lab.out(T, D)
    w13, d13 = lab.weight(fmt, lab.randn(2 * inner, D, dtype=torch.float32), gate_up=True)
    w2, d2 = lab.weight(fmt, lab.randn(D, inner, dtype=torch.float32))
    lab.run("cpu.swiglu", [lab.tok(x), w13, w2, lab.tok(y)], {"act": "silu"}, T=T)
    h = x.double() @ d13.T
    lab.close(y, act_ref("silu", h[:, :inner], h[:, inner:]) @ d2.T)


def test_bits_do_not_depend_on_threads_isa_or_batch(tools):
    results = []
    for isa in tools.ISAS:
        for threads in (1, 2, 3):
            for T in (70, 1):
                lab = tools.Lab(isa, torch.float32, threads)
                E, K, D, inner = 4, 2, 96, 80
                x = lab.randn(70, D)
                ids, wts = (
                    torch.randint(0, E, (70, K), generator=lab.gen).int(),
                    torch.rand(70, K, generator=lab.gen),
                )
                w13, _ = lab.weight("int4", lab.randn(E, 2 * inner, D), 32, gate_up=True)
                w2, _ = lab.weight("int4", lab.randn(E, D, inner), 32)
                y = lab.out(T, D)
                ops = [lab.tok(x), lab.tok(ids), lab.tok(wts), w13, w2, None, None, lab.tok(y)]
                lab.run("cpu.grouped_mlp", ops, {"act": "silu"}, T=T)
                results.append(y)
    for y in results:
        assert torch.equal(y, results[0][: len(y)])


# routing


def route_ref(
    logits,
    K,
    *,
    score,
    renorm=False,
    scale=1.0,
    groups=1,
    topk_groups=1,
    group_score="max",
    mask="neg_inf",
    bias=None,
    bias_in_logits=False,
):
    logits = logits.float()
    if bias_in_logits:
        logits, bias = logits + bias, None
    scores = {"softmax": lambda x: x.softmax(-1), "sigmoid": torch.sigmoid}.get(score, lambda x: x)(
        logits
    )
    pick = scores if bias is None else scores + bias
    T, E = pick.shape
    if groups > 1:
        g = pick.view(T, groups, -1)
        value = g.max(-1).values if group_score == "max" else g.topk(2, -1).values.sum(-1)
        kept = torch.zeros(T, groups, dtype=torch.bool)
        kept.scatter_(1, value.argsort(dim=-1, descending=True, stable=True)[:, :topk_groups], True)
        kept = kept[:, :, None].expand(-1, -1, E // groups).reshape(T, E)
        pick = pick.masked_fill(~kept, 0.0 if mask == "zero" else float("-inf"))
    ids = pick.argsort(dim=-1, descending=True, stable=True)[:, :K]
    wts = scores.gather(1, ids)
    if score == "softmax_after_topk":
        wts = wts.softmax(-1)
    if renorm:
        wts = wts / wts.sum(-1, keepdim=True)
    return ids, wts * scale


@pytest.mark.parametrize("gate_kind", ["bf16", "f32", "int8", "tensor_f32", "tensor_bf16"])
@pytest.mark.parametrize(
    ("E", "K", "attrs", "bias"),
    [
        (8, 2, {"score": "softmax", "renorm": True}, False),
        (60, 4, {"score": "softmax"}, False),
        (
            64,
            6,
            {"score": "softmax", "groups": 8, "topk_groups": 3, "mask": "zero", "scale": 16.0},
            False,
        ),
        (
            256,
            8,
            {
                "score": "sigmoid",
                "groups": 8,
                "topk_groups": 4,
                "group_score": "top2sum",
                "renorm": True,
                "scale": 2.5,
            },
            True,
        ),
        (32, 4, {"score": "softmax_after_topk", "bias_in_logits": True}, True),
    ],
)
@pytest.mark.parametrize("T", [1, 17])
def test_moe_route(lab, gate_kind, E, K, attrs, bias, T):
    D = 75
    x, ids, wts = (
        lab.strided(T, D),
        lab.out(T, K, dtype=torch.int32),
        lab.out(T, K, dtype=torch.float32),
    )
    w = lab.randn(E, D, dtype=torch.bfloat16 if "bf16" in gate_kind else torch.float32)
    gate, meaning = (
        (lab.tensor(w), w) if gate_kind.startswith("tensor") else lab.weight(gate_kind, w)
    )
    b = lab.randn(E, dtype=torch.float32, scale=0.1) if bias else None
    lab.run(
        "cpu.moe_route",
        [lab.tok(x), gate, lab.tensor(b) if bias else None, lab.tok(ids), lab.tok(wts)],
        attrs,
        T=T,
    )
    want_ids, want_wts = route_ref(x.double() @ meaning.double().T, K, bias=b, **attrs)
    assert torch.equal(ids.long(), want_ids)
    torch.testing.assert_close(wts, want_wts, rtol=1e-5, atol=1e-7)


def test_route_ties_go_to_the_lower_id(lab):
    x, ids, wts = (
        lab.randn(2, 16),
        lab.out(2, 3, dtype=torch.int32),
        lab.out(2, 3, dtype=torch.float32),
    )
    gate = torch.zeros(20, 16)
    lab.run(
        "cpu.moe_route",
        [lab.tok(x), lab.tensor(gate), None, lab.tok(ids), lab.tok(wts)],
        {"score": "softmax"},
        T=2,
    )
    assert ids.tolist() == [[0, 1, 2]] * 2
