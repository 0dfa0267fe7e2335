"""A model of 671 billion weights on the machine that people ask about: what a plan says and costs.

examples/plan_a_model.py, which runs in test_example.py, plans the one of 236 billion.
"""

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

CONFIGS = Path(__file__).resolve().parents[2] / "examples/configs"
MACHINE = (
    "--target", "rtx4090-24g+xeon", "--gpu-memory", "24GiB", "--ram", "192GiB",
    "--quantize", "experts=int4p(group=64),*=int8",
)  # fmt: skip


@dataclass(frozen=True)
class Ran:
    code: int
    text: str
    cpu_seconds: float
    peak: int  # bytes


def plan(model: str, *more: str) -> Ran:
    """`ktgraph plan` in a process of its own."""
    config = str(CONFIGS / f"{model}.json")
    command = [sys.executable, "-m", "ktgraph.cli", "plan", config, *MACHINE]
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen([*command, *more], stdout=out, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        text = out.read()
    seconds = used.ru_utime + used.ru_stime
    return Ran(process.returncode, text, seconds, used.ru_maxrss * 1024)


def test_deepseek_v3_needs_384_gib() -> None:
    """Its experts in int4p: 58 layers x 256 x 3 matrices of 7168 x 2048, 0.53 bytes a weight."""
    experts = 58 * 256 * 3 * 7168 * 2048 * 0.53125 / (1 << 30)
    assert 310 < experts < 330
    ran = plan("deepseek-v3", "--what-if", "ram=384GiB")
    assert ran.code == 1, ran.text
    refused = re.search(r"cpu has 192 GiB, and this needs ([\d.]+) GiB there", ran.text)
    assert refused is not None
    assert 0.95 * experts < float(refused[1]) < experts + 10
    assert "mlp.experts.gate_up_proj" in ran.text
    assert re.search(r"a\s+disk of 6 GB/s", ran.text)
    rows = {x.split()[0]: x.split() for x in ran.text.split("what if")[1].splitlines() if x.strip()}
    assert rows["base"][1:3] == ["from", "disk"]
    assert rows["ram=384GiB"][1] == "yes"
    assert float(rows["ram=384GiB"][2]) > 4 * float(rows["base"][3])  # tokens/s
    assert ran.cpu_seconds < 45  # two forecasts
    assert ran.peak < 4 << 30
