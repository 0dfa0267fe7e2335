"""Every shipped configuration compiles for every GPU that it is shipped for, without spills."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

LIMITS = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """One process without the interpreter compiles everything."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "ktgraph.triton_kernels.compile", "--json"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_everything_compiles(report: dict[str, Any]) -> None:
    assert report["failures"] == []
    assert report["usages"], "no kernel lists COMPILE_CASES"


@pytest.mark.slow
def test_no_spills_and_shared_memory_fits(report: dict[str, Any]) -> None:
    bad = [
        u
        for u in report["usages"]
        if u["spills"] > 0
        or u["stack"] > u["allowed_stack"]
        or u["shared"] > LIMITS[u["capability"]]
    ]
    assert bad == []
