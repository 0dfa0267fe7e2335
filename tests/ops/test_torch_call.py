"""torch.call: its text, its arguments, what it runs, and what it says when it cannot."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from ktgraph.errors import UnsupportedInputError
from ktgraph.ir.dims import Dim
from ktgraph.ir.interp import InterpError, Interpreter
from ktgraph.ir.parser import parse_module
from ktgraph.ir.verify import VerifyError, verify
from ktgraph.ops.bound_modules import bind_module, name_of
from ktgraph.ops.call_args import ArgumentError, ArgumentWriter, read_arguments

TEXT = """ktgraph.ir 1
module @m
sym b in 1..64
sym s in 1..64

func @main(%x: f32[b, s, 4]) -> (f32[b, s], i64[b, s], f32[s*b, 4]) {
  %most, %at = torch.call %x {op = "aten.max.dim", args = "%0, -1", dtypes = ["f32", "i64"], shapes = [[b, s], [b, s]]} : f32[b, s], i64[b, s]
  %flat = torch.call %x {op = "aten.view.default", args = "%0, [#0, 4]", sizes = [b*s], dtypes = ["f32"], shapes = [[b*s, 4]]} : f32[b*s, 4]
  return %most, %at, %flat
}
"""  # noqa: E501


def _one(attrs: str, result: str = "f32[b, 4]") -> str:
    return (
        "ktgraph.ir 1\nmodule @m\nsym b in 1..64\n\n"
        f"func @main(%x: f32[b, 4]) -> ({result}) {{\n"
        f"  %y = torch.call %x {{{attrs}}} : {result}\n  return %y\n}}\n"
    )


def _run(text: str, *inputs: torch.Tensor, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    module = parse_module(text)
    verify(module)
    return Interpreter(module, None, dtype).run("main", inputs)  # pyright: ignore[reportArgumentType]


def test_text_parses_back_and_runs_with_results_and_sizes():
    text = TEXT.replace("s*b", "b*s")
    assert str(parse_module(text)) == text
    x = torch.randn(3, 5, 4)
    most, at, flat = _run(text, x)
    assert torch.equal(most, x.max(-1).values)
    assert torch.equal(at, x.argmax(-1))
    assert torch.equal(flat, x.view(15, 4))


@pytest.mark.parametrize(
    ("attrs", "cause"),
    [
        ('args = "%0", dtypes = ["f32"], shapes = [[b, 4]]', "one of the attributes module and op"),
        ('module = "A", op = "b", dtypes = ["f32"], shapes = [[b, 4]]', "module and op"),
        ('op = "aten.relu.default", dtypes = ["f32"], shapes = []', "1 dtypes for 0 shapes"),
        ('op = "aten.relu.default", dtypes = ["f33"], shapes = [[b, 4]]', "'f33' is not one of"),
        ('op = "aten.relu.default", dtypes = ["f32"], shapes = [b]', "a list of sizes for each"),
        ('op = "aten.relu.default", dtypes = ["f32"], shapes = [[b, 5]]', "the operands give"),
    ],
)
def test_malformed_calls_are_verifier_faults(attrs: str, cause: str):
    with pytest.raises(VerifyError, match=cause):
        verify(parse_module(_one(attrs)))


@pytest.mark.parametrize(
    ("attrs", "cause"),
    [
        (
            'op = "aten.no_such.default", args = "%0", dtypes = ["f32"], shapes = [[b, 4]]',
            "operator aten.no_such.default, which torch .* does not have",
        ),
        (
            'op = "aten.t.default", args = "%0", dtypes = ["f32"], shapes = [[b, 4]]',
            r"gave a tensor of shape \[4, 3\], the IR says \[3, 4\]",
        ),
        (
            'op = "aten.argsort.default", args = "%0", dtypes = ["f32"], shapes = [[b, 4]]',
            "gave torch.int64, the IR says torch.float32",
        ),
        (
            'op = "aten.relu.default", args = "%3", dtypes = ["f32"], shapes = [[b, 4]]',
            "asks for number 3 of 1 operands",
        ),
        (
            'module = "Nobody/moe", args = "%0", dtypes = ["f32"], shapes = [[b, 4]]',
            r"no module is bound to the name 'Nobody'.*ktgraph.bind_module\('Nobody', model\)",
        ),
    ],
)
def test_a_call_that_cannot_run_says_why_and_where(attrs: str, cause: str):
    with pytest.raises(InterpError, match=cause) as found:
        _run(_one(attrs), torch.randn(3, 4))
    assert "in: %y = torch.call" in str(found.value)


class _Scale(nn.Module):
    """Writes into its argument, which the graph must not see."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 3.0))

    def forward(self, x: torch.Tensor, *, plus: float) -> torch.Tensor:
        x.mul_(self.weight)
        return x + plus


MODULE = 'module = "{}", args = "%0, plus=0.5", dtypes = ["f32"], shapes = [[b, 4]]'


def test_a_module_is_found_by_its_name_and_leaves_operands_alone():
    scale = _Scale()
    bind_module("Bound", nn.Sequential(scale))
    x = torch.randn(3, 4)
    before = x.clone()
    (y,) = _run(_one(MODULE.format("Bound/0")), x)
    assert torch.equal(y, before * 3 + 0.5)
    assert torch.equal(x, before)
    with pytest.raises(InterpError, match="has no submodule '7'"):
        _run(_one(MODULE.format("Bound/7")), x)


def test_a_module_runs_in_float64_where_its_operands_do():
    scale = _Scale()
    with torch.no_grad():
        scale.weight.fill_(1 / 3)
    bind_module("Wide", scale)
    x = torch.randn(3, 4, dtype=torch.float64)
    (y,) = _run(_one(MODULE.format("Wide")), x, dtype=torch.float64)
    assert y.dtype == torch.float64
    assert torch.equal(y, x * scale.weight.double() + 0.5)
    assert scale.weight.dtype == torch.float32


def test_names_are_those_of_classes_and_free_again_when_the_module_is_gone():
    class Fresh(nn.Module):
        pass

    first, second = Fresh(), Fresh()
    assert (name_of(first), name_of(second), name_of(first)) == ("Fresh", "Fresh.2", "Fresh")
    del first
    gc.collect()
    assert name_of(Fresh()) == "Fresh"
    with pytest.raises(UnsupportedInputError, match="before the slash"):
        bind_module("Net/moe", second)
    with pytest.raises(UnsupportedInputError, match="expected a torch module"):
        bind_module("Net", "net")  # pyright: ignore[reportArgumentType]


def test_arguments_are_written_and_read_back():
    tensor = torch.zeros(2)
    sizes = {7: Dim.of("b")}

    def operand(value: object) -> object:
        return "x" if value is tensor else None

    def size(value: object) -> Dim | None:
        return sizes.get(value) if isinstance(value, int) and value in sizes else None

    args = (tensor, [7, -1, None], (1.5, float("-inf")), {"a": True}, "it", torch.float32, tensor)
    writer = ArgumentWriter(operand, size)
    text = writer.text(args, {"memory_format": torch.contiguous_format, "device": None})
    assert text == (
        "%0, [#0, -1, None], (1.5, -inf), {'a': True}, 'it', torch.float32, %1, "
        "memory_format=torch.contiguous_format, device=None"
    )
    assert (writer.operands, writer.sizes) == (["x", "x"], [Dim.of("b")])
    given, named = read_arguments(text, [tensor, tensor], [7])
    assert given == [*args[:1], [7, -1, None], *args[2:]]
    assert named == {"memory_format": torch.contiguous_format, "device": None}


@pytest.mark.parametrize(
    "text", ["__import__('os')", "torch.load", "%0.shape", "len(%0)", "x", "("]
)
def test_nothing_but_literals_is_read(text: str):
    with pytest.raises(ArgumentError):
        read_arguments(text, [1], [])


@pytest.mark.parametrize("value", [object(), 'a"b', torch.Size([1]).numel])
def test_what_has_no_text_is_refused(value: object):
    with pytest.raises(ArgumentError, match="an argument of type"):
        ArgumentWriter(lambda v: None, lambda v: None).text([value], {})
