"""examples/plan_a_model.py runs, and DeepSeek-V2 236B fits 24 GiB of GPU memory and 192 of RAM."""

import re
import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/plan_a_model.py"


def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE))["main"]()
    shown = capsys.readouterr().out
    assert shown.startswith("deepseek-v2: 235.7 billion weights, 60 layers, 6 of 160 experts")
    assert re.search(r"fits: cpu \d+\.?\d* of 192 GiB, cuda:0 2\d\.\d+ of 24 GiB", shown)
    assert "decode is bound by " in shown
    assert re.search(r"with 64 GiB of RAM: [\d.]+ GiB of experts on disk, [\d.]+ tokens/s", shown)
