"""Units by memory node: equal bits on any engine, on nodes as the system has them or simulated."""

import pytest
import torch

NODES = [[0, 0, 0, 0], [0, 0, 1, 1], [2, 0, 1, 0]]


def outputs(lab, native, nodes, kernel, operands, attrs, tokens, y):
    y.fill_(float("nan"))
    plan = native.Plan(native.Engine(len(nodes), isa=lab.isa, nodes=nodes))
    plan.add(kernel, operands, attrs)
    plan.run(tokens)
    assert torch.isfinite(y).all()
    return y.clone()


@pytest.mark.parametrize("tokens", [1, 7, 40, 600])
def test_experts(isa, tools, tokens):
    """Fine and coarse units, down by columns and by experts: all four ways through the kernel."""
    lab = tools.Lab(isa, torch.float32)
    d, f, count, k = 200, 1100, 3, 2
    x, y = lab.randn(tokens, d), lab.out(tokens, d)
    ids = torch.stack([(torch.arange(tokens) + i) % count for i in range(k)], 1).int()
    operands = [
        lab.tok(x),
        lab.tok(ids),
        lab.tok(torch.full((tokens, k), 0.5)),
        lab.weight("int8", lab.randn(count, 2 * f, d), 0, True, "int8")[0],
        lab.weight("int8", lab.randn(count, d, f), 0, False, "int8")[0],
        None,
        None,
        lab.tok(y),
    ]
    given = ("cpu.grouped_mlp", operands, {"act": "silu"}, tokens, y)
    first, *others = [outputs(lab, tools.native, nodes, *given) for nodes in NODES]
    assert all(torch.equal(other, first) for other in others)


@pytest.mark.parametrize("tokens", [1, 300])
@pytest.mark.parametrize("heads", [1, 3])
def test_linears(isa, tools, tokens, heads):
    lab = tools.Lab(isa, torch.float32)
    n = 16 if heads == 3 else 200  # one unit for all nodes, or several
    x, y = lab.randn(tokens, heads, 64), lab.out(tokens, heads, n)
    weight, _ = lab.weight("f32", lab.randn(heads, n, 64))
    given = ("cpu.batched_linear", [lab.tok(x), weight, lab.tok(y)], {}, tokens, y)
    first, *others = [outputs(lab, tools.native, nodes, *given) for nodes in NODES]
    assert all(torch.equal(other, first) for other in others)
