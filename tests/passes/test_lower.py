"""lower: the best kernel that supports an op, views for free, refusals with their reasons."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from lowered_models import MIXED, MODELS, NATIVE, lower, make_pair, nmse, prompts

from ktgraph.ir.graph import Module, Op
from ktgraph.ir.parser import parse_module
from ktgraph.ops import registry
from ktgraph.ops.registry import Refusal, no, register_kernel
from ktgraph.pass_api import CompileOptions, PassContext
from ktgraph.passes.lower import Lower
from ktgraph.passes.pack_weights import PackWeights
from ktgraph.passes.plan_memory import PlanMemory
from ktgraph.runtime.plan import Plan, PlanError


def chosen(module: Module) -> Counter[str]:
    return Counter(op.via or "" for op in module.walk() if op.body is None)


@pytest.fixture
def own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that a test registers are forgotten."""
    kept = {op: list(kernels) for op, kernels in registry._KERNELS.items()}
    monkeypatch.setattr(registry, "_KERNELS", kept)


@pytest.mark.parametrize("name", MODELS)
def test_every_op_gets_a_native_kernel(name: str) -> None:
    module = MODELS[name]()
    context = lower(module)
    kernels = chosen(module)
    assert kernels["torch.reference"] == 0
    assert kernels["view"] >= 4
    assert "segment 0: native" in context.artifacts["plan.txt"]
    assert parse_module(str(module)).structural_hash() == module.structural_hash()


def test_refusals_keep_their_reasons() -> None:
    module = MODELS["mla"]()
    context = lower(module, MIXED)
    assert chosen(module)["torch.reference"] > 0
    reasons = {(e.rule, e.reason) for e in context.events if e.outcome == "refused"}
    packing = "@lm_head is f32[VOC, D], not packed in tiles: pack-weights has not run"
    assert ("cpu.linear", packing) in reasons
    assert ("cpu.sigmoid", 'act "silu": it has sigmoid') in reasons
    assert any("run on their torch reference" in line for line in context.notes)


HEADS = """ktgraph.ir 1
module @heads
dim H = 3, N = 4, P = 2
sym O in 1..8
sym T in 1..8

func @main(%x: f32[T, H*(N+P)], %y: f32[H, T, N]) -> (f32[T, H*N], f32[T, H*(2*N+P)]) {
  %a = tensor.reshape %x {shape = [T, H, N+P]} : f32[T, H, N+P]
  %b, %c = tensor.split %a {sizes = [N, P]} : f32[T, H, N], f32[T, H, P]
  %d = tensor.reshape %b {shape = [T, H*N]} : f32[T, H*N]
  %e = tensor.concat %a, %b : f32[T, H, 2*N+P]
  %f = tensor.reshape %e {shape = [T, H*(2*N+P)]} : f32[T, H*(2*N+P)]
  %g = tensor.add %y, %y : f32[H, T, N]
  return %d, %f
}
"""


def test_strides_decide_between_views_copies_and_the_reference() -> None:
    module = parse_module(HEADS)
    context = lower(module, "plan-memory,lower")
    vias = [op.via for op in module.walk()]
    assert vias == ["view", "view", "cpu.copy", "cpu.copy", "view", "torch.reference"]
    (refusal,) = [e for e in context.events if e.rule == "cpu.add"]
    assert "only the first axis may be known at run time only" in refusal.reason


def test_lowering_twice_changes_nothing() -> None:
    module = MODELS["gqa"]()
    lower(module)
    text = str(module)
    lower(module, "plan-memory,lower")
    assert str(module) == text


@pytest.mark.usefixtures("own_kernels")
def test_a_users_kernel_comes_first_where_it_supports_the_op() -> None:
    def supports(op: Op, module: Module) -> bool | Refusal:
        return True if op.results[0].name.startswith("l1") else no("only layer 1", op)

    register_kernel(
        "tensor.add", "mine.add", "cpu", launch=torch.add, supports=supports, priority=99
    )
    module = MODELS["mla"]()
    context = lower(module, "plan-memory,lower")
    adds = {op.results[0].name: op.via for op in module.walk() if op.name == "tensor.add"}
    assert adds["l0.x"] == "cpu.add"
    assert adds["l1.x"] == "mine.add"
    assert "only layer 1" in {e.reason for e in context.events}
    with_launch = Plan.build(module).phase("main")
    assert any(i.kernel == "mine.add" and not i.is_native for i in with_launch.instructions)


def test_bisect_reaches_the_reference() -> None:
    """With `limit`, later ops run their meaning: a wrong kernel can be found by halving."""
    module = MODELS["mla"]()
    lower(module, NATIVE.removesuffix(",lower"))
    Lower().run(module, PassContext(limit=5))
    kernels = chosen(module)
    native = sum(n for k, n in kernels.items() if k.startswith("cpu."))
    assert native == 5
    assert kernels["torch.reference"] > 10


def test_limits_give_the_same_results() -> None:
    texts = prompts(5, 3)
    rows = []
    for pipeline in (NATIVE, MIXED):
        runner = make_pair("gqa", pipeline).runner
        seqs = [runner.open() for _ in texts]
        rows.append(runner.forward(list(zip(seqs, texts, strict=True)), "all"))
    assert nmse(rows[0], rows[1]) <= 1e-12


def test_an_unlowered_module_cannot_be_planned() -> None:
    module = MODELS["mla"]()
    lower(module, "plan-memory")
    with pytest.raises(PlanError, match=r"run the pass lower\n  in: %x = nn.embedding"):
        Plan.build(module)


def test_an_unknown_kernel_is_named() -> None:
    module = MODELS["mla"]()
    lower(module)
    next(module.walk()).via = "cpu.imaginary"
    with pytest.raises(
        PlanError, match=r"kernel cpu\.imaginary is not registered for nn\.embedding"
    ):
        Plan.build(module)


ON_GPU = """ktgraph.ir 1
module @gpu home cuda:0
dim D = 64, F = 64
sym T in 1..64
weight @a : {dtype}[F, D]<int4(group=32)> from "a"
weight @b : {dtype}[F, D]<int4p(group=32)> from "b"
weight @c : {dtype}[F, D]<int8> from "c"
weight @w13 : {dtype}[2*F, D]<int8> from "w13"

func @main(%x: {dtype}[T, D]) -> ({dtype}[T, F], {dtype}[T, F], {dtype}[T, F], {dtype}[T, D]) {{
  %a = nn.linear %x, @a : {dtype}[T, F]
  %b = nn.linear %x, @b : {dtype}[T, F]
  %c = nn.linear %x, @c : {dtype}[T, F]
  %d = nn.swiglu %x, @w13, @a : {dtype}[T, D]
  return %a, %b, %c, %d
}}
"""


@pytest.mark.parametrize(("dtype", "activations", "rounding", "rows"), [
    ("bf16", "auto", "abd", ", rows=int8"),  # %a and %d of int4, %b of int4p
    ("f16", "auto", "abd", ", rows=int8"),
    ("bf16", "f32", "b", ""),  # int4p rounds rows whatever is asked for
    ("f32", "auto", "", ""),
])  # fmt: skip
def test_a_gpu_kernel_says_whether_it_rounds_rows(
    dtype: str, activations: str, rounding: str, rows: str
) -> None:
    module = parse_module(ON_GPU.format(dtype=dtype))
    context = PassContext(options=CompileOptions(activations=activations))
    for step in (PackWeights(), PlanMemory(), Lower()):
        step.run(module, context)
    assert str(module.weights["a.p"].type.encoding) == f"tile.int4(group=32{rows})"
    assert str(module.weights["c.p"].type.encoding) == "tile.int8"
    via = {op.results[0].name: op.via for op in module.walk()}
    assert via == {
        name: f"triton.{kernel}_packed{'_int8' if name in rounding else ''}"
        for name, kernel in (("a", "linear"), ("b", "linear"), ("c", "linear"), ("d", "swiglu"))
    }
