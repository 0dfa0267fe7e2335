"""tests/soak.py for 20 seconds, and that it notices what it is there for."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import soak

import ktgraph as kt

SCRIPT = Path(soak.__file__)


@pytest.mark.slow
def test_soak_of_a_simulated_gpu() -> None:
    """In a process of its own: what other tests allocate must not count."""
    done = subprocess.run(
        [sys.executable, SCRIPT, "--seconds", "20", "--target", "simulated"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = re.search(r"soak: (\d+) jobs .*, (\d+) tokens compared", done.stdout)
    assert found is not None, done.stdout
    assert int(found[1]) >= 2  # many more on a machine that is not busy
    assert int(found[2]) > 0


@pytest.fixture(scope="module")
def exe(tiny_deepseek: Path) -> kt.Compiled:
    return soak.compiled(kt.trace(tiny_deepseek), "cpu")


@pytest.fixture(scope="module")
def known(exe: kt.Compiled) -> list[soak.Reference]:
    return soak.references(exe, random.Random(3))


def test_each_kind_of_job(exe: kt.Compiled, known: list[soak.Reference]) -> None:
    work = soak.Soak(exe, known, random.Random(0))
    while len(work.jobs) < 4:
        work.job()
    assert work.tokens > 0


def test_a_wrong_token_is_noticed(exe: kt.Compiled, known: list[soak.Reference]) -> None:
    broken = [soak.Reference(r.prompt, [*r.ids[:-1], r.ids[-1] ^ 1]) for r in known]
    with pytest.raises(soak.SoakError, match=r"job \d+ of seed 5: wrong tokens"):
        soak.soak(exe, broken, seconds=30, seed=5)


def test_a_lost_sequence_is_noticed(exe: kt.Compiled, known: list[soak.Reference]) -> None:
    seq = exe.runner.open()
    with pytest.raises(soak.SoakError, match="left 1 sequences open"):
        soak.soak(exe, known, seconds=30, seed=5)
    exe.runner.close(seq)


def test_growth() -> None:
    assert soak.growth([9] * 3) == 0  # too few to say
    assert soak.growth([10, 50, 90, 100, 100, 100, 100, 100]) == 0  # warm-up
    assert soak.growth(list(range(0, 800, 10))) == 400


def test_growing_memory_is_noticed(
    exe: kt.Compiled, known: list[soak.Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    leaks = iter(range(0, 1 << 62, 32 << 20))
    monkeypatch.setattr(soak, "resident", lambda: next(leaks))
    monkeypatch.setattr(soak.Soak, "job", lambda self: self.jobs.update(["none"]))
    with pytest.raises(soak.SoakError, match="memory grows"):
        soak.soak(exe, known, seconds=0.1, seed=5)


def test_a_hang_shows_stacks_and_fails() -> None:
    code = "import time, soak\ndef stuck():\n    time.sleep(60)\nsoak.watch(0.5)\nstuck()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=SCRIPT.parent,
        env={"PYTHONPATH": str(SCRIPT.parent), "PATH": ""},
    )
    assert done.returncode != 0
    assert "Timeout" in done.stderr
    assert "in stuck" in done.stderr
