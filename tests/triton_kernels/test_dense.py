"""Dense kernels take rows of bf16, f16 and f32 and refuse packed or quantized weights by name."""

import pytest
import torch

import ktgraph.triton_kernels.grouped_mlp
import ktgraph.triton_kernels.linear  # noqa: F401  (registers its kernel)
from ktgraph.ir.parser import parse_module
from ktgraph.ops.registry import Refusal, kernels_for
from ktgraph.triton_kernels.dense import unaligned

TEXT = """ktgraph.ir 1
module @m
dim D = 64, N = 32
sym T in 1..64
weight @w : f32[N, D]{encoding} from "w"
func @main(%x: f32[T, D]) -> (f32[T, N]) {{
  %y = nn.linear %x, @w : f32[T, N]
  return %y
}}
"""


@pytest.mark.parametrize("encoding", ["", "<bf16>", "<f16>", "<f32>"])
def test_dense_rows_are_taken(encoding: str) -> None:
    assert _answer(encoding) is True


@pytest.mark.parametrize("encoding", ["<int8>", "<int4(group=32)>", "<tile.int8>"])
def test_other_encodings_are_refused_by_name(encoding: str) -> None:
    answer = _answer(encoding)
    assert isinstance(answer, Refusal)
    assert "@w is f32[N, D]<int" in answer.reason or "@w is f32[N, D]<tile" in answer.reason


def _answer(encoding: str) -> bool | Refusal:
    module = parse_module(TEXT.format(encoding=encoding))
    (kernel,) = [k for k in kernels_for("nn.linear", "cuda") if k.name == "triton.linear"]
    return kernel.supports(next(iter(module.walk())), module)


def test_unaligned_looks_at_starts_and_at_strides_of_axes_that_are_walked() -> None:
    whole = torch.empty(4, 64, dtype=torch.bfloat16)
    assert not unaligned(whole, whole[:, 8:])
    assert unaligned(whole[:, 1:])
    assert unaligned(torch.empty(4, 63, dtype=torch.bfloat16))
    assert not unaligned(torch.empty(1, 63, dtype=torch.bfloat16))
