"""The house rules that a machine can check: lint, format, types, layout."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

REPO = Path(__file__).resolve().parent.parent
MAPPED = ("passes", "frontends", "triton_kernels", "cpu_kernels")


def run(*command: str) -> None:
    env = os.environ | {"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}  # no look-up of newer releases
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=REPO, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"


def test_ruff_check() -> None:
    run("ruff", "check", ".")


def test_ruff_format() -> None:
    run("ruff", "format", "--check", ".")


@pytest.mark.slow
@pytest.mark.skipif(
    not triton.__version__.startswith("3.9."),
    reason="kernels are typed against Triton 3.9: others annotate the same functions otherwise",
)
def test_types() -> None:
    """Pyright, strict over ktgraph/ and passes/, basic elsewhere ([tool.pyright])."""
    run("pyright", "--pythonpath", sys.executable)


@pytest.mark.parametrize("name", MAPPED)
def test_mapped_package_has_one_home(name: str) -> None:
    """passes/ *is* ktgraph.passes: a folder ktgraph/passes would shadow it."""
    assert not (REPO / "ktgraph" / name).exists()
    assert (REPO / "typings" / "ktgraph" / name).resolve() == REPO / name
