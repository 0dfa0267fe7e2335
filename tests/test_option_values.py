"""Values that make no sense are refused by name, before any pass runs or anything is loaded."""

from pathlib import Path
from typing import Any

import pytest
import torch

import ktgraph as kt
from ktgraph.errors import UnsupportedInputError
from ktgraph.ir import ParseError, parse_file
from ktgraph.ir.verify import VerifyError, verify
from ktgraph.pass_api import option_fault


@pytest.mark.parametrize(
    "given",
    [
        {"context": 0},
        {"max_batch": -1},
        {"max_tokens": 0},
        {"threads": -2},
        {"threads": "x"},
        {"page_size": 1.5},
        {"exact": "yes"},
        {"quantize": 8},
    ],
)
def test_option_values(given: dict[str, Any], tiny_deepseek: Path) -> None:
    (name,) = given
    with pytest.raises(UnsupportedInputError, match=f"{name}=.*expected"):
        kt.compile(tiny_deepseek, "cpu", **given)


def test_none_means_the_default() -> None:
    assert option_fault("context", None) is None


def test_a_tokenizer_that_is_not_there_is_named(tiny_deepseek: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedInputError, match=f"tokenizer={tmp_path}"):
        kt.compile(tiny_deepseek, "cpu", tokenizer=tmp_path)


def test_calls_and_layers(tiny_deepseek: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traced = kt.trace(tiny_deepseek)
    monkeypatch.setenv("KTGRAPH_ISA", "nonsense")
    with pytest.raises(UnsupportedInputError, match="KTGRAPH_ISA"):
        traced.lower("cpu")
    monkeypatch.delenv("KTGRAPH_ISA")
    lowered = traced.lower("cpu", context=64, max_batch=2)
    for layer in (-5, 99):
        with pytest.raises(UnsupportedInputError, match=r"the model has layers 0\.\.4"):
            lowered.why_not("mla-absorb", layer=layer)
    exe = lowered.compile()
    for wrong in ("hi", [1, 2, 3], torch.rand(1, 3)):
        with pytest.raises(UnsupportedInputError, match="ids"):
            exe(wrong)  # type: ignore[call-overload]


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.ktir"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ParseError, match=r"a\.ktir: not a text file"):
        parse_file(path)


def test_an_unknown_encoding_is_a_fault() -> None:
    from ktgraph.ir import parse_module

    text = 'ktgraph.ir 1\nmodule @m\nweight @w : f32[9, 9]<bT16> from "w"\n'
    with pytest.raises(VerifyError, match="unknown encoding bT16"):
        verify(parse_module(text))
