"""gated_mul against `ktgraph.ops.nn.gated`."""

import pytest
import torch

from ktgraph.ops.nn import gated
from ktgraph.triton_kernels.activations import GATED
from ktgraph.triton_kernels.silu_mul import gated_mul
from tests.triton_kernels.close import DTYPES, check, poisoned, strided


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", GATED)
@pytest.mark.parametrize(("rows", "width"), [(1, 33), (7, 256), (2, 1408), (65, 8)])
def test_gated_mul(
    rows: int, width: int, act: str, dtype: torch.dtype, device: torch.device
) -> None:
    x13 = strided((4 * torch.randn(rows, 2 * width)).to(device, dtype))
    out = strided(poisoned(rows, width, dtype=dtype, device=device))
    gated_mul(x13, out, act=act, alpha=1.5, limit=3.3)
    gate, up = x13.cpu().chunk(2, dim=-1)
    check(out, gated(gate, up, act, 1.5, 3.3), 1e-6)


def test_unknown_activation(device: torch.device) -> None:
    x = torch.ones(1, 4, device=device)
    with pytest.raises(ValueError, match="swish"):
        gated_mul(x, x[:, :2].clone(), act="swish")
