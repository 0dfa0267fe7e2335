"""Every script of examples/ runs as it is, and prints what it promises."""

from __future__ import annotations

import runpy
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from ktgraph.drive import one_thread
from ktgraph.frontends.module import OpaqueCallWarning
from ktgraph.ir.parser import parse_file
from ktgraph.ops import registry
from ktgraph.pass_manager import PassManager

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
PRINTS = {
    "quickstart.py": ["-- what it costs", "tok/s", "%routed"],
    "read_the_ir.py": ["fuse-norms      yes", "nn.add_rms_norm", "do not broadcast"],
    "write_an_op.py": [
        "'cpu.my_relu_squared'",
        "checked against its meaning: [('cpu.my_relu_squared', False)]",
        "my.relu_squared  1  cpu",
    ],
    "compile_handwritten_moe.py": [
        "lifted: {'': 'top 2 of 8 experts (softmax_after_topk, silu)'}",
        "%routed = moe.grouped_mlp",
        "['torch.call']",
    ],
}
CHECKED_ELSEWHERE = {
    "my_pass.py",  # a pass, not a script: below, and in test_write_a_pass.py
    "patch_transformers.py",  # surface/test_patch.py
    "plan_a_model.py",  # planner/test_example.py
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On one thread; what a script registers is forgotten."""
    monkeypatch.setattr(registry, "_OPS", dict(registry._OPS))
    kept = {op: list(kernels) for op, kernels in registry._KERNELS.items()}
    monkeypatch.setattr(registry, "_KERNELS", kept)
    with one_thread():
        yield


@pytest.mark.parametrize("name", PRINTS)
def test_a_script_runs(name: str, capsys: pytest.CaptureFixture[str]):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.simplefilter("ignore", OpaqueCallWarning)
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    out = capsys.readouterr().out
    for expected in PRINTS[name]:
        assert expected in out
    for line in out.splitlines():
        if "difference to eager" in line:
            assert float(line.split()[-1]) < 1e-5


def test_my_pass_runs_by_its_file_name():
    module = parse_file(EXAMPLES / "moe_layer.ktir")
    report = PassManager().run(module, f"{EXAMPLES / 'my_pass.py'}:sum-in-one-pass", validate=1)
    assert report.records[0].changed
    assert report.records[0].error == 0


def test_no_example_is_forgotten():
    assert {p.name for p in EXAMPLES.glob("*.py")} == PRINTS.keys() | CHECKED_ELSEWHERE
