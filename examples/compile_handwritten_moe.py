"""Compile a hand-written MoE layer: a gate, top-k and a Python loop over experts.

python examples/compile_handwritten_moe.py

The loop depends on data, so torch.export alone cannot trace it.  ktgraph runs the layer on random
tokens, finds the formula that it computes, and compiles that: one router, one grouped MLP over
stacked weights.  What is no such layer runs as it is, and is named.
"""

import torch
import torch.nn.functional as F
from torch import nn

import ktgraph as kt


class Expert(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class MoeLayer(nn.Module):
    def __init__(self, dim: int = 64, hidden: int = 128, experts: int = 8, top_k: int = 2) -> None:
        super().__init__()
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList([Expert(dim, hidden) for _ in range(experts)])
        self.top_k = top_k

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        weights, ids = self.router(flat).softmax(-1).topk(self.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        y = torch.zeros_like(flat)
        for e in ids.unique().tolist():  # the loop that no tracer can follow
            token, slot = torch.where(ids == e)
            y.index_add_(0, token, self.experts[e](flat[token]) * weights[token, slot, None])
        return y.view_as(x)


class DropsTokens(MoeLayer):
    """Not a weighted sum of the top-k: only a token's best expert counts, when it is sure."""

    def forward(self, x):
        best = self.router(x).softmax(-1).amax(-1, keepdim=True)
        return torch.where(best > 0.5, super().forward(x), x)


def main() -> None:
    torch.manual_seed(0)
    layer = MoeLayer().eval()
    example = torch.randn(2, 5, 64)  # sizes above 1 may differ in later calls

    print("-- the graph, before any pass")
    traced = kt.trace(layer, example_inputs=example)
    print(traced)
    print("lifted:", traced.lifted)

    print("-- compiled for this CPU")
    exe = traced.lower("cpu").compile()
    for shape in ((2, 5, 64), (1, 1, 64), (3, 100, 64)):
        x = torch.randn(shape)
        with torch.no_grad():
            difference = (exe(x) - layer(x)).abs().max()
        print(f"{list(shape)}: largest difference to eager {difference:.1e}")
    print(exe.explain("%routed"))

    print("-- a layer that computes something else stays with torch, and says so")
    odd = DropsTokens().eval()
    exe = kt.compile(odd, "cpu", example_inputs=example)
    print([op.name for op in exe.module.walk()])
    with torch.no_grad():
        print(f"largest difference to eager {(exe(example) - odd(example)).abs().max():.1e}")


if __name__ == "__main__":
    main()
