"""The checks of `ktgraph doctor`: every kernel passes its own, and a wrong one does not."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from ktgraph.ops import op_def
from ktgraph.ops.registry import kernels_for
from ktgraph.triton_kernels.checks import WrongKernelError, check_kernel, self_check

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CHECKS = dict(self_check(DEVICE))


@pytest.mark.parametrize("name", CHECKS)
def test_every_kernel_passes_its_own_check(name: str) -> None:
    assert CHECKS[name]().startswith("NMSE ")


def test_the_list_is_that_of_the_ops_with_cases() -> None:
    names = {name.split(" ")[0] for name in CHECKS}
    assert {"triton.linear", "triton.linear_packed", "triton.sdpa", "triton.mla_attend"} <= names
    assert {"triton.moe_route", "triton.grouped_mlp_packed", "triton.rope_append_latent"} <= names


def test_a_wrong_kernel_is_found() -> None:
    (kernel,) = [k for k in kernels_for("nn.linear", "cuda") if k.name == "triton.linear"]

    def twice(*operands: Any, out: tuple[torch.Tensor], **attrs: Any) -> None:
        assert kernel.into is not None
        kernel.into(*operands, out=out, **attrs)
        out[0].mul_(1.001)

    broken = replace(kernel, into=twice)
    with pytest.raises(WrongKernelError, match=r"NMSE 1e-06 against nn\.linear, at most 1e-10"):
        check_kernel(op_def("nn.linear"), broken, torch.float32, DEVICE)
