"""What `ktgraph doctor` runs: a check of every kernel in this build, each able to fail."""

from dataclasses import replace

import pytest
import torch

from ktgraph.cpu_kernels import load_native, self_check
from ktgraph.doctor import run_check
from ktgraph.ops import op_def
from ktgraph.runtime.state import State


def test_every_native_kernel_has_a_check() -> None:
    names = {name.split()[0] for name, _ in self_check()}
    assert names >= load_native().kernels().keys()


@pytest.mark.parametrize(
    ("op", "kernel"),
    [("nn.rope", "cpu.rope"), ("kv.append", "cpu.kv_append"), ("moe.route", "cpu.moe_route")],
)
def test_a_check_sees_a_kernel_that_differs(
    op: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the reference is another one: the kernel cannot be. Tensors, caches and ids differ."""
    real = op_def(op)
    other = replace(real, reference=lambda *a, **k: _moved(real.reference(*a, **k)))
    monkeypatch.setattr("ktgraph.cpu_kernels.checks.op_def", lambda name: other)
    (check,) = [c for name, c in self_check() if name == kernel]
    found = run_check(kernel, check)
    assert not found.ok
    assert "allowed" in found.detail


def _moved(found: object) -> object:
    """The last result, or the first where it holds ids, moved by a little."""
    if isinstance(found, State):
        return State((found.parts[0] * 1.001, *found.parts[1:]))
    assert isinstance(found, tuple)
    first, last = found
    return (first + 1, last) if first.dtype == torch.int32 else (first, last * 1.001)


def test_an_unknown_kernel_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    native = load_native()
    listed = {**native.kernels(), "cpu.new": ""}
    monkeypatch.setattr(native, "kernels", lambda: listed)
    name, check = self_check()[-1]
    assert name == "cpu.new"
    assert not run_check(name, check).ok
