"""What every launch passes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton

from ktgraph.triton_kernels import compile as compile_module
from ktgraph.triton_kernels import linear, sample_tokens
from ktgraph.triton_kernels.dependent import dependent_launch
from ktgraph.triton_kernels.registry import launcher


class Recorder:
    """Stands for a kernel: notes the options of its launches."""

    def __init__(self) -> None:
        self.options: list[dict[str, Any]] = []

    def __getitem__(self, grid: object) -> Any:
        return lambda *given, **options: self.options.append(options)


def test_products_are_fused_into_sums_whatever_triton_does_unasked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert dependent_launch()["enable_fp_fusion"] is True
    recorder = Recorder()
    monkeypatch.setattr(linear, "_multiply_add", recorder)
    x, w, y = (torch.zeros(s) for s in ((1, 16), (8, 16), (1, 8)))
    launcher("nn.linear", "triton.linear")(x, w, None, out=(y,))
    assert [o["enable_fp_fusion"] for o in recorder.options] == [True]


def test_chosen_tokens_are_rounded_as_their_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    for name in ("_best", "_weigh", "_choose"):
        monkeypatch.setattr(sample_tokens, name, recorder)
    logits, how = torch.zeros(1, 97), torch.zeros(1, 8, dtype=torch.int32)
    out = torch.zeros(1, dtype=torch.int32)
    choose = launcher("sample.tokens", "triton.sample_tokens")
    choose(logits, how, None, None, out=(out,), most="filter")
    assert [o["enable_fp_fusion"] for o in recorder.options] == [False] * 3


def test_what_is_compiled_ahead_is_what_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stop(Exception):
        pass

    def compiled(*given: object, options: dict[str, Any], **more: object) -> None:
        assert options["enable_fp_fusion"] is True
        raise Stop

    monkeypatch.setattr(triton, "compile", compiled)
    case = linear.COMPILE_CASES[0]
    monkeypatch.setattr(compile_module, "_source_of", lambda kernel: lambda *given: None)
    with pytest.raises(Stop):
        compile_module.compile_case(case, 90)
