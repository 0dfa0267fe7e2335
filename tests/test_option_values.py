"""Values that make no sense are refused by name, before any pass runs or anything is loaded."""

from pathlib import Path
from typing import Any

import pytest
import torch

import ktgraph as kt
from ktgraph.cli import main as command_line
from ktgraph.errors import UnsupportedInputError, user_message
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


@pytest.mark.parametrize("name", ["context", "cache_rows", "page_size", "max_batch", "defer"])
def test_a_plain_module_has_no_cache(name: str) -> None:
    module, x = torch.nn.Linear(4, 4), torch.zeros(2, 4)
    given: dict[str, Any] = {name: 2}
    with pytest.raises(UnsupportedInputError, match=f"{name}=2: a module .* has no cache"):
        kt.compile(module, "cpu", example_inputs=(x,), **given)
    exe = kt.compile(module, "cpu", example_inputs=(x,), threads=1, context=None)
    assert exe(x).shape == (2, 4)


@pytest.mark.parametrize("option", ["popularity", "rules"])
@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "No such file"), ("{", "p.json"), ("[1]", "p.json"), ("\xff", "p.json")],
)
def test_files_are_read_before_a_model_is_traced(
    option: str, text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.json"
    if text is not None:
        path.write_text(text, encoding="latin-1")
    model = tmp_path / "no-model"  # it would be missed next
    given: dict[str, Any] = {option: path}
    with pytest.raises(UnsupportedInputError, match=message) as caught:
        kt.compile(model, "cpu", **given)
    assert ("ktgraph profile MODEL prompts.txt -o FILE" in str(caught.value)) == (
        option == "popularity"
    )
    assert command_line(["run", str(model), "x", f"--{option}", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_a_plan_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(kt.KtgraphError, match=r"x\.ktplan: no such file; give the \.ktplan"):
        kt.load(tmp_path / "x.ktplan")


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


@pytest.fixture(scope="module")
def exe(tiny_deepseek: Path) -> kt.Compiled:
    return kt.compile(tiny_deepseek, "cpu", context=64, max_batch=2)


@pytest.mark.parametrize(
    "given",
    [
        {"stop": 5},
        {"stop": ["a", 5]},
        {"stop": ["a", ""]},
        {"temperature": "x"},
        {"temperature": True},
        {"top_k": 1.5},
        {"top_p": None},
        {"min_p": "0"},
        {"repetition_penalty": [1]},
        {"seed": "a"},
        {"seed": 1 << 70},
        {"eos": "x"},
        {"eos": [1.5]},
        {"max_new_tokens": "3"},
        {"max_new_tokens": 0},
    ],
)
def test_sampling_values(exe: kt.Compiled, given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(UnsupportedInputError, match=f"^{name}=.*expected"):
        exe.generate("The sea", **{"max_new_tokens": 2, **given})


def test_other_calls_name_what_is_wrong(exe: kt.Compiled, tmp_path: Path) -> None:
    away = tmp_path / "none" / "t.html"
    calls: dict[str, Any] = {
        r"path=5: expected a path": lambda: exe.save(5),  # type: ignore[arg-type]
        rf"{away}: there is no folder {away.parent}: make it": lambda: exe.timeline(away),
        r"tokens='a': expected a whole number": lambda: exe.timeline(tmp_path / "t", "a"),  # type: ignore[arg-type]
        r"window='x'": lambda: exe.perplexity("a b", window="x"),  # type: ignore[arg-type]
        r"called with token ids": lambda: exe(5),  # type: ignore[call-overload]
        r"prompt 0 holds token 'a'": lambda: exe([[1, "a"]]),  # type: ignore[list-item]
        r"prompt 0 holds token 1.5": lambda: exe.generate([[1.5]], 2),
    }
    for message, call in calls.items():
        with pytest.raises(UnsupportedInputError, match=message):
            call()
    assert len(exe([torch.tensor([1, 2]), [3]])) == 2  # type: ignore[list-item]


def test_stages_name_what_is_wrong(exe: kt.Compiled, tiny_deepseek: Path) -> None:
    traced = kt.Traced(exe.module, kt.trace.__globals__["read_model"](tiny_deepseek), "auto")
    for given, message in (
        ({"target": 5}, "target=5: expected one of auto, cpu"),
        ({"pipeline": 5}, "pipeline 5: expected a pipeline string"),
        ({"pipeline": [5]}, r"pipeline \[5\]: expected a pipeline string"),
        ({"validate": "x"}, "validate='x': expected 0, 1, 2"),
        ({"dump": 5}, "dump=5: expected a path"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            traced.lower(**{"target": "cpu", **given})  # type: ignore[arg-type]
        assert user_message(error.value) is not None
    for call, message in (
        (lambda: kt.trace(5), "a model of type int; give a checkpoint folder"),  # type: ignore[arg-type]
        (lambda: kt.trace(tiny_deepseek, dtype=["a"]), "dtype="),  # type: ignore[arg-type]
        (lambda: kt.trace(tiny_deepseek, tokenizer=5), "tokenizer=5: expected a path"),  # type: ignore[arg-type]
        (lambda: kt.load(5), "path=5: expected a path"),  # type: ignore[arg-type]
    ):
        with pytest.raises(UnsupportedInputError, match=message):
            call()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--top-p", "7"], "top_p=7.0: expected above 0 and at most 1"),
        (["--max-new-tokens", "0"], "max_new_tokens=0: expected 1 or more"),
        (["--stop", ""], "stop="),
    ],
)
def test_the_command_line_checks_sampling_before_it_loads(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def traced(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the model was traced")

    monkeypatch.setattr("ktgraph.cli.run.open_model", traced)
    assert command_line(["run", "model", "prompt", *arguments]) == 2
    assert message in capsys.readouterr().err
