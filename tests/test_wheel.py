"""The built wheel works on its own: installed elsewhere and imported away from the checkout."""

import json
import os
import site
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
SUFFIXES = {".py", ".pyi", ".so", ".toml", ".typed", ".html", ".css", ".js", ".yaml"}

pytestmark = pytest.mark.slow
Python = Callable[..., str]


def checked(*command: str | Path, cwd: Path) -> str:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [str(c) for c in command], cwd=cwd, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    flags = ("--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", folder)
    checked(*pip, "wheel", REPO, *flags, cwd=folder)
    (built,) = folder.glob("ktgraph-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Python:
    """Runs Python code in a fresh environment that holds the wheel and sees our dependencies.

    A plain path line in a .pth file adds the dependencies without running the .pth files among
    them, so an editable install of ktgraph in the developers' environment stays out of the way.
    """
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    python = folder / "venv" / "bin" / "python"
    purelib = checked(
        python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder
    )
    target = Path(purelib.strip())
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    (target / "dependencies.pth").write_text("\n".join(site.getsitepackages()) + "\n")

    def run(code: str, *arguments: str | Path) -> str:
        return checked(python, "-I", "-c", code, *arguments, cwd=folder)

    return run


def test_wheel_holds_only_what_runs(wheel: Path) -> None:
    names = [Path(n) for n in zipfile.ZipFile(wheel).namelist()]
    package = [n for n in names if n.parts[0] == "ktgraph"]
    others = {n.parts[0] for n in names} - {"ktgraph"}
    assert all(o.endswith(".dist-info") for o in others), f"bare top-level packages: {others}"
    assert {n.suffix for n in package} <= SUFFIXES
    assert sum(n.name.startswith("_native") and n.suffix == ".so" for n in package) == 1


def test_wheel_imports(installed: Python) -> None:
    where = installed(
        "import ktgraph, ktgraph.passes, ktgraph.frontends, ktgraph.triton_kernels\n"
        "import ktgraph.cpu_kernels._native as native\n"
        "print(ktgraph.__file__, ktgraph.passes.__file__, native.__file__)"
    )
    assert str(REPO) not in where


def test_wheel_ships_targets(installed: Python) -> None:
    names = installed("from ktgraph.target import shipped_targets; print(*shipped_targets())")
    assert "h200+xeon-amx" in names.split()


def test_wheel_compiles_a_model(installed: Python, tiny_deepseek: Path) -> None:
    """From the wheel alone: trace, passes, native kernels, and the reference's first words."""
    expected = json.loads((tiny_deepseek / "reference.json").read_text())["greedy_float32"][0]
    text = installed(
        "import sys, ktgraph as kt\n"
        "exe = kt.compile(sys.argv[1], target='cpu', threads=2)\n"
        "print(exe.generate(sys.argv[2], max_new_tokens=12))",
        tiny_deepseek,
        expected["prompt"],
    )
    assert expected["text"].startswith(text.rstrip("\n")[:20])
