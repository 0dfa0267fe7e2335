"""Views without copies where strides allow, against torch; repeats unrolled."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ktgraph.ir.dims import Dim
from ktgraph.ir.parser import parse_module
from ktgraph.ir.types import TensorType
from ktgraph.runtime.flat import Layouts, Slot, View, dense_strides, flatten, reshaped_strides

TEXT = """ktgraph.ir 1
module @views
dim H = 3, N = 4, P = 2
sym T in 1..8

func @main(%x: f32[T, H*(N+P)]) -> (f32[T, H*N], f32[T, H, P]) {{
  %a = tensor.reshape %x {{shape = [T, H, N+P]}} : f32[T, H, N+P]
  %b, %c = tensor.split %a {{sizes = [N, P]}} : f32[T, H, N], f32[T, H, P]
  {extra}
  %d = tensor.reshape %b {{shape = [T, H*N]}} : f32[T, H*N]
  return %d, %c
}}
"""


def layouts(extra: str = "") -> Layouts:
    module = parse_module(TEXT.format(extra=extra))
    return Layouts(flatten(module, module.functions["main"]))


def as_tensor(view: View, base: torch.Tensor, tokens: int) -> torch.Tensor:
    sizes = {"T": tokens}
    dims, strides = [d.at(sizes) for d in view.dims], [s.at(sizes) for s in view.strides]
    return base.as_strided(dims, strides, view.offset.at(sizes))


def test_split_heads_are_views_and_joined_ones_a_copy() -> None:
    found = layouts()
    x = torch.arange(5 * 18.0).reshape(5, 18)
    a = x.reshape(5, 3, 6)
    assert torch.equal(as_tensor(found.views["b"], x, 5), a[..., :4])
    assert torch.equal(as_tensor(found.views["c"], x, 5), a[..., 4:])
    assert found.views["d"].root.name == "d"  # [H, N] of [H, N+P] do not lie together
    views = [found.is_view(step.op) for step in found.flat.ops]
    assert views == [True, True, False]


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ("%e = tensor.slice %a {start = 1, size = 2, axis = 1} : f32[T, 2, N+P]", (1, 3)),
        ("%e = tensor.permute %a {order = [1, 0, 2]} : f32[H, T, N+P]", None),
    ],
)
def test_other_views(line: str, want: tuple[int, int] | None) -> None:
    x = torch.arange(5 * 18.0).reshape(5, 18)
    a = x.reshape(5, 3, 6)
    expected = a.permute(1, 0, 2) if want is None else a[:, want[0] : want[1]]
    assert torch.equal(as_tensor(layouts(line).views["e"], x, 5), expected)


@st.composite
def strided(draw: st.DrawFn) -> tuple[torch.Tensor, list[int]]:
    """A view of a dense tensor, and another shape of as many elements."""
    sizes = st.lists(st.integers(1, 4), min_size=1, max_size=4)
    x = torch.arange(1000.0).as_strided(shape := draw(sizes), dense(shape))
    if draw(st.booleans()):
        axis = draw(st.integers(0, len(shape) - 1))
        start = draw(st.integers(0, shape[axis] - 1))
        x = x.narrow(axis, start, draw(st.integers(1, shape[axis] - start)))
    if draw(st.booleans()):
        x = x.permute(draw(st.permutations(range(len(shape)))))
    factors = [p for n in x.shape for p in prime_factors(n)]
    order = draw(st.permutations(factors)) if draw(st.booleans()) else factors
    wanted: list[int] = []
    for factor in order:
        if wanted and draw(st.booleans()):
            wanted[-1] *= factor
        else:
            wanted.append(factor)
        if draw(st.integers(0, 4)) == 0:
            wanted.append(1)
    return x, wanted or [1]


def dense(shape: list[int]) -> list[int]:
    return [s.const() for s in dense_strides([Dim.of(n) for n in shape])]


def prime_factors(n: int) -> list[int]:
    return {1: [], 4: [2, 2]}.get(n, [n])


@given(strided())
def test_reshape_is_a_view_just_where_torch_says_so(case: tuple[torch.Tensor, list[int]]) -> None:
    x, shape = case
    given_ = View(
        Slot("x", TensorType("f32", ())),
        Dim.of(int(x.storage_offset())),
        tuple(Dim.of(int(n)) for n in x.shape),
        tuple(Dim.of(int(n)) for n in x.stride()),
    )
    strides = reshaped_strides(given_, tuple(map(Dim.of, shape)))
    try:
        want = x.view(shape)
    except RuntimeError:
        assert strides is None
        return
    assert strides is not None
    got = x.as_strided(shape, [s.const() for s in strides], x.storage_offset())
    assert torch.equal(got, want)


def test_repeats_are_unrolled_in_order() -> None:
    module = parse_module("""ktgraph.ir 1
module @twice
dim D = 9
sym T in 1..8
weight @layers[i in 2..3].norm : f32[D] from "norm.{i}"

func @main(%x: f32[T, D]) -> (f32[T, D]) {
  %z = repeat i in 2..3 (%y = %x) {
    %h = nn.rms_norm %y, @layers[i].norm {eps = 1e-06} : f32[T, D]
    %s = tensor.add %y, %h : f32[T, D]
    yield %s
  } : f32[T, D]
  return %z
}
""")
    flat = flatten(module, module.functions["main"])
    assert [r.name for step in flat.ops for r in step.results] == ["h[2]", "s[2]", "h[3]", "s[3]"]
    assert [s.name for s in flat.ops[3].slots] == ["s[2]", "h[3]"]
    assert [str(w) for step in flat.ops for w in step.operands if w not in step.slots] == [
        "FlatWeight(ref=WeightRef(name='layers[].norm', index=Dim(i)), index=2)",
        "FlatWeight(ref=WeightRef(name='layers[].norm', index=Dim(i)), index=3)",
    ]
    assert flat.returns[0].name == "s[3]"
