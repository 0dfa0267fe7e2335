"""Write an op: its meaning in plain torch, a kernel, and a rule that puts it into graphs.

python examples/write_an_op.py

The signature is the type rule and the documentation; printer, verifier, interpreter, cost model and
kernel checks read it.  Nothing in ktgraph is changed: this file could be your own package.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

import ktgraph as kt
from ktgraph.kernel_check import check_kernels
from ktgraph.ops import case
from ktgraph.pass_api import Numerics, reorder
from ktgraph.rewrite import RulePass


@kt.op(
    "my.relu_squared(x: f[..., W]; scale: float = 1.0) -> f[..., W]",
    flops=lambda d: 3.0 * d.tokens * d.W,
    cases=[case(T=1, W=33), case(T=7, W=256)],
)
def relu_squared(x, *, scale):
    """scale * relu(x)^2 (So et al., arXiv 2109.08668)."""
    return scale * F.relu(x) * F.relu(x)


@kt.kernel("my.relu_squared", name="cpu.my_relu_squared", device="cpu", nmse=1e-12)
def relu_squared_cpu(x, *, scale):
    """One pass over x, then two in place."""
    y = x.clamp_min(0)
    return y.mul_(y).mul_(scale)


class SquareOfRelu(kt.Rule):
    name = "square-of-relu"
    match = """
      %r = nn.act %x {act = "relu"}
      %y = tensor.mul %r, %r"""
    emit = "%y = my.relu_squared %x"


@kt.register_pass
@dataclass(frozen=True)
class RelusSquared(RulePass):
    """relus-squared: relu(x) * relu(x) becomes one op."""

    name: ClassVar[str] = "relus-squared"
    numerics: ClassVar[Numerics] = reorder()
    rules = (SquareOfRelu,)


class Mlp(nn.Module):
    """Primer's MLP: down(relu(up(x))^2)."""

    def __init__(self, dim: int = 32, hidden: int = 96) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x):
        h = F.relu(self.up(x))
        return self.down(h * h)


def main() -> None:
    torch.manual_seed(0)
    mlp = Mlp().eval()
    traced = kt.trace(mlp, example_inputs=torch.randn(4, 32))
    lowered = traced.lower("cpu", "default,+relus-squared@before:place", validate=1)
    print(lowered.diff("relus-squared"))
    print("kernels:", [op.via for op in lowered.module.walk()])
    checked = [k for k in check_kernels(lowered.module) if k.kernel == "cpu.my_relu_squared"]
    print("checked against its meaning:", [(k.kernel, k.is_wrong) for k in checked])

    exe = lowered.compile()
    x = torch.randn(9, 32)
    with torch.no_grad():
        print(f"largest difference to eager: {(exe(x) - mlp(x)).abs().max():.1e}")
    print(exe.cost_analysis().at(T=9).table())


if __name__ == "__main__":
    main()
