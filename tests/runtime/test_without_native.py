"""Without the compiled part every op runs on its torch reference: slow, named, and right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import ktgraph as kt
from ktgraph.target import Target, load_target

_SCRIPT = """
import sys
sys.modules["ktgraph.cpu_kernels._native"] = None
import ktgraph as kt
from ktgraph.target import Target, load_target
cpu = Target("cpu alone", (load_target("rtx4090-24g+xeon").cpu,), "cpu")
exe = kt.compile(sys.argv[1], cpu, context=64, threads=1)
print(exe.generate([5, 3, 8], 4, eos=()))
"""


def test_a_model_runs_on_references(tiny_deepseek: Path) -> None:
    command = [sys.executable, "-c", _SCRIPT, str(tiny_deepseek)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    cpu = Target("cpu alone", (load_target("rtx4090-24g+xeon").cpu,), "cpu")
    wanted = kt.compile(tiny_deepseek, cpu, context=64, threads=1).generate([5, 3, 8], 4, eos=())
    assert done.stdout.strip() == str(wanted)
    assert "FallbackWarning" in done.stderr
