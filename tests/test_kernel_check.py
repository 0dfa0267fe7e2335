"""Level 2: kernels against references, beside the interpreter and in lockstep with the plan."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from hybrid_models import HOT_EXPERTS, plan_of
from small_models import gqa_moe, mla_moe

from ktgraph.ir.graph import Module
from ktgraph.kernel_check import KernelError, check_kernels, gpu_kernels, why_no_gpu_kernels
from ktgraph.ops import registry
from ktgraph.pass_api import CompileOptions, Pass, PassContext
from ktgraph.pass_manager import PassError, PassManager
from ktgraph.target import Target, load_target


@dataclass(frozen=True)
class Choose(Pass):
    """Chooses the wrong kernel."""

    name: ClassVar[str] = "choose"

    def run(self, module: Module, ctx: PassContext) -> None:
        next(op for op in module.walk() if op.name == "nn.act").via = "cpu.wrong"


@dataclass(frozen=True)
class Touch(Pass):
    """Changes something that means nothing."""

    name: ClassVar[str] = "touch"

    def run(self, module: Module, ctx: PassContext) -> None:
        next(iter(module.functions.values())).attrs["touched"] = "yes"


@pytest.fixture
def two_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A right and a wrong kernel for nn.act, taken off the table afterwards."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    kept = dict(registry._KERNELS)
    right = lambda x, act: x * torch.sigmoid(x)  # noqa: E731
    registry.register_kernel("nn.act", "cpu.right", "cpu", launch=right)
    registry.register_kernel("nn.act", "cpu.wrong", "cpu", launch=lambda x, act: x, nmse=1e-3)
    yield
    registry._KERNELS.clear()
    registry._KERNELS.update(kept)


def test_kernels_run_on_what_their_ops_meet(two_kernels: None):
    module = mla_moe()
    act = next(op for op in module.walk() if op.name == "nn.act")
    act.via = "cpu.right"
    assert [k.is_wrong for k in check_kernels(module)] == [False]
    act.via = "cpu.wrong"
    (found,) = check_kernels(module)
    assert found.is_wrong
    assert found.op.startswith("%l1.act = nn.act %l1.gate")


def test_level_2_names_the_kernel(two_kernels: None):
    PassManager().run(mla_moe(), [Choose()], validate=1)
    with pytest.raises(PassError, match=r"failed \(kernels\): kernel cpu.wrong: NMSE"):
        PassManager().run(mla_moe(), [Choose()], validate=2)


def lowered(module: Module, quantize: str | None = None) -> Module:
    both = load_target("rtx4090-24g+xeon")
    target = Target("cpu alone", (both.cpu,), "cpu")
    ctx = PassContext(target, options=CompileOptions(quantize=quantize, max_tokens=64))
    PassManager().run(module, "default", ctx)
    return module


@pytest.mark.parametrize(
    "quantize",
    [None, "int4(group=32)", "int8", "int8(group=32)", "int4z(group=32)", "mxfp4", "fp8", "f16"],
)
@pytest.mark.parametrize("make", [mla_moe, gqa_moe])
def test_every_native_kernel_of_a_plan_keeps_its_bound(make, quantize: str | None):
    module = lowered(make(), quantize)
    found = check_kernels(module)
    used = {op.via for op in module.walk() if op.via not in (None, "view")}
    assert {k.kernel for k in found} == used
    assert [k for k in found if k.is_wrong] == []


def test_a_native_kernel_that_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch):
    """Here the reference is turned wrong: the kernel cannot be."""
    real = registry.op_def

    def altered(name: str):
        found = real(name)
        if name != "nn.rms_norm":
            return found
        return replace(found, reference=lambda *a, **k: 1.01 * found.reference(*a, **k))

    module = lowered(gqa_moe())
    monkeypatch.setattr("ktgraph.kernel_check.op_def", altered)
    wrong = [k for k in check_kernels(module) if k.is_wrong]
    assert [k.kernel for k in wrong] == ["cpu.rms_norm"]
    assert wrong[0].error == pytest.approx(1e-4, rel=0.05)
    assert "nn.rms_norm" in wrong[0].op


# -- kernels of a GPU ------------------------------------------------------------------------------
def test_kernels_of_a_gpu_against_their_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a hybrid plan's, in Triton's interpreter where there is no GPU; a wrong one shows."""
    real = registry.op_def

    def altered(name: str) -> registry.OpDef:
        found = real(name)
        if name != "nn.rms_norm":
            return found
        return replace(found, reference=lambda *a, **k: 1.01 * found.reference(*a, **k))

    module = plan_of("gqa", "cpu").module
    monkeypatch.setattr("ktgraph.runtime.gpu.phase_steps.op_def", altered)
    found = check_kernels(module)
    assert {k.kernel for k in found} == gpu_kernels(module)
    (wrong,) = [k for k in found if k.is_wrong]
    assert (wrong.kernel, wrong.op) == ("triton.rms_norm", "nn.rms_norm")
    assert wrong.error == pytest.approx(1e-4, rel=0.05)


def test_each_bound_counts_for_a_kernel_that_has_several() -> None:
    """A larger error within a looser bound does not hide a smaller one beyond its own."""
    rounded, exact = KernelError("k", "op", 1e-6, 1e-5), KernelError("k", "op", 1e-8, 1e-10)
    assert exact.is_worse_than(rounded)
    assert not rounded.is_worse_than(exact)
    assert KernelError("k", "op", 9e-6, 1e-5).is_worse_than(rounded)
    never = KernelError("k", "op", float("inf"), 0.0)
    assert never.is_worse_than(exact)
    assert not exact.is_worse_than(never)


def test_kernels_that_no_call_met_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = plan_of("gqa", "cpu").module
    met = [KernelError(k, "op", 0.0, 1.0) for k in gpu_kernels(module) - {"triton.rms_norm"}]
    monkeypatch.setattr("ktgraph.pass_manager.check_kernels", lambda *given: met)
    report = PassManager().run(module, [Touch()], validate=2)
    note = "not checked, as they do not take the miniature's sizes: triton.rms_norm"
    assert note in report.records[-1].notes


@pytest.mark.gpu
@pytest.mark.parametrize("quantize", [None, "int8", "int4(group=32)", "int4p(group=32)"])
@pytest.mark.parametrize("experts", ["resident", "streamed", *HOT_EXPERTS])
@pytest.mark.parametrize("model", ["mla", "gqa"])
def test_every_kernel_of_a_gpu_keeps_its_bound(
    model: str, experts: str, quantize: str | None
) -> None:
    module = plan_of(model, HOT_EXPERTS.get(experts, experts), quantize=quantize).module
    found = check_kernels(module)
    assert {k.kernel for k in found} == gpu_kernels(module)
    assert [k for k in found if k.is_wrong] == []


def test_what_cannot_be_checked_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert why_no_gpu_kernels() == ""
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "TRITON_INTERPRET=1 runs them" in why_no_gpu_kernels()
    report = PassManager().run(plan_of("gqa", "cpu").module, [Touch()], validate=2)
    notes = "; ".join(report.records[-1].notes)
    assert "kernels of the GPU were not checked: no CUDA device is here" in notes
