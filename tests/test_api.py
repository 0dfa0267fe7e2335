"""What a user may give as a model and as options, and what is read from a checkpoint folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from torch import nn

import ktgraph as kt
from ktgraph.compile_options import compile_options
from ktgraph.errors import UnsupportedInputError
from ktgraph.model_input import ModelCard, read_model
from ktgraph.tokenizer import Tokenizer


def card(**changes: Any) -> ModelCard:
    fields = {"name": "m", "max_context": 1024, "eos": (1,), "bos": 0, "tokenizer": None}
    return ModelCard(**{**fields, **changes})


def test_card_of_a_folder(tiny_deepseek: Path) -> None:
    found = read_model(tiny_deepseek)
    assert found.model == tiny_deepseek
    assert (found.card.name, found.card.max_context) == ("tiny-deepseek-v2", 1024)
    assert (found.card.eos, found.card.bos) == ((1,), 0)
    assert found.card.tokenizer is not None


def test_card_of_a_loaded_model_is_that_of_its_folder(tiny_deepseek: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_deepseek)
    loaded, folder = read_model(model).card, read_model(tiny_deepseek).card
    assert loaded.to_json() == folder.to_json()


def test_end_tokens_come_from_the_generation_config_first(tiny_qwen: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_qwen / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_model(tmp_path).card.eos == (config["eos_token_id"],)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert read_model(tmp_path).card.eos == (7, 8)


def test_a_model_without_tokenizer_says_so_for_texts_only(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    found = read_model(tmp_path).card
    with pytest.raises(UnsupportedInputError) as error:
        found.need_tokenizer("a text prompt")
    assert str(error.value) == (
        f"a text prompt needs a tokenizer, and {tmp_path.name} has no tokenizer.json. Give token "
        "ids, or compile with tokenizer=<folder that holds a tokenizer.json>"
    )


def test_tokenizer_of_another_folder(tiny_qwen: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert read_model(tmp_path, tiny_qwen).card.tokenizer is not None


def test_card_survives_json(tiny_qwen: Path) -> None:
    before = read_model(tiny_qwen).card
    after = ModelCard.from_json(json.loads(json.dumps(before.to_json())))
    assert after.to_json() == before.to_json()
    assert after.tokenizer is not None
    assert after.tokenizer.encode("The sea") == before.need_tokenizer("it").encode("The sea")


@pytest.mark.parametrize("flags", [{}, {"add_bos_token": False}, {"add_bos_token": True}])
def test_tokenizer_is_transformers(
    flags: dict[str, bool], tiny_deepseek: Path, tmp_path: Path
) -> None:
    config = json.loads((tiny_deepseek / "tokenizer_config.json").read_text())
    kept = {k: v for k, v in config.items() if k not in ("add_bos_token", "add_eos_token")}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**kept, **flags}))
    (tmp_path / "tokenizer.json").write_bytes((tiny_deepseek / "tokenizer.json").read_bytes())
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.from_folder(tmp_path)
    assert ours is not None
    for text in ("The sea", " naïve 🙂\n\n", ""):
        assert ours.encode(text) == theirs(text).input_ids
        ids = ours.encode(text, special=False)
        assert ids == theirs(text, add_special_tokens=False).input_ids
        assert ours.decode([*ids, 1]) == theirs.decode([*ids, 1], skip_special_tokens=True)


def test_context_is_the_models_own_up_to_a_limit() -> None:
    assert compile_options(card(), "auto", {}).context == 1024
    assert compile_options(card(max_context=163840), "auto", {}).context == 4096
    assert compile_options(card(max_context=None), "auto", {"context": None}).context == 4096
    assert compile_options(card(), "auto", {"context": 9}).context == 9


def test_options_are_checked_before_anything_is_traced(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedInputError, match="unknown option 'contxt'; did you mean"):
        kt.compile(tmp_path / "no-such-model", contxt=3)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("m.gguf", "m.gguf: no such file, and ktgraph downloads nothing; "),
        ("m.onnx", "m.onnx: ONNX files are not supported yet; "),
        ("no/such", "no/such: no such folder, and ktgraph downloads nothing; "),
        (nn.Linear(2, 2), "Linear: a torch module that is no transformers model is traced"),
    ],
)
def test_models_not_taken(model: str | nn.Module, message: str) -> None:
    with pytest.raises(UnsupportedInputError) as error:
        kt.trace(model)
    assert str(error.value).startswith(message)
    assert str(error.value).endswith(
        "; give a checkpoint folder (config.json and *.safetensors), a .gguf file, or a causal "
        "language model loaded by transformers"
    )


def test_unknown_dtype(tiny_qwen: Path) -> None:
    with pytest.raises(UnsupportedInputError, match="dtype='fp8': expected one of auto, f32, bf16"):
        kt.trace(tiny_qwen, dtype="fp8")


def test_context_beyond_the_model() -> None:
    with pytest.raises(UnsupportedInputError) as error:
        compile_options(card(), "auto", {"context": 2000})
    assert str(error.value) == "context=2000: m was made for 1024 positions"


def test_public_names_are_documented() -> None:
    for name in kt.__all__:
        assert getattr(kt, name).__doc__, name
