"""What users see when something is wrong: one message, what, expected against got, next step.

Each case runs the real thing.  `shown` is what the command line prints, so a native traceback or a
bare library error fails here.
"""

from __future__ import annotations

import errno
import os
import shutil
import struct
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import ktgraph as kt
from ktgraph.cli import main as command_line
from ktgraph.errors import KtgraphError, MemoryBudgetError, user_message
from ktgraph.frontends.errors import export_failed
from ktgraph.frontends.hf_build import load_config
from ktgraph.ir import parse_module
from ktgraph.runtime import runner as runner_module
from ktgraph.stages import FallbackWarning
from ktgraph.target import most_threads
from ktgraph.target.probe import MemoryInfo
from ktgraph.tokenizer import Tokenizer

TRAINED = Path(__file__).resolve().parent.parent / "examples" / "models" / "tiny-deepseek-v2"

CONFIG: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 40,
    "intermediate_size": 56,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE checkpoint of a few kilobytes, random."""
    folder = tmp_path_factory.mktemp("tiny-random")
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**CONFIG)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def traced(checkpoint: Path) -> kt.Traced:
    return kt.trace(checkpoint)


@pytest.fixture(scope="module")
def compiled(traced: kt.Traced) -> kt.Compiled:
    return traced.lower("cpu", context=32).compile()


@pytest.fixture
def broken(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint to damage."""
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def shown(action: Callable[[], Any]) -> str:
    """The message that a user sees; the error must be one that ktgraph means for users."""
    with pytest.raises(Exception) as error:  # noqa: PT011 - the class is not the point
        action()
    message = user_message(error.value)
    assert message is not None, f"no message for users: {error.value!r}"
    assert "Traceback" not in message
    return message


def lower_and_load(folder: Path, traced: kt.Traced) -> None:
    """Compile with a damaged checkpoint; the graph is the whole one's."""
    given = kt.trace.__globals__["read_model"](folder)
    kt.Traced(traced.ir, given, "auto").lower("cpu").compile()


# ---- models


def test_unsupported_architecture(tmp_path: Path) -> None:
    transformers.T5Config(d_model=8, num_heads=2, num_layers=1).save_pretrained(tmp_path)
    message = shown(lambda: kt.trace(tmp_path))
    assert message.startswith("T5Config")
    assert "no causal language model can be built from it" in message


def test_an_encoder(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=40
    )
    model = transformers.BertForMaskedLM(config)
    model.save_pretrained(tmp_path)
    assert shown(lambda: kt.trace(tmp_path)) == (
        "BertConfig: the checkpoint holds BertForMaskedLM, which is no causal language model "
        "(…ForCausalLM): it does not generate text, so ktgraph cannot run it"
    )
    assert "is not a causal language model of transformers" in shown(lambda: kt.trace(model))


def test_no_message_sends_to_files_that_cannot_be_read(broken: Path, traced: kt.Traced) -> None:
    (broken / "model.safetensors").rename(broken / "pytorch_model.bin")
    message = shown(lambda: lower_and_load(broken, traced))
    assert "no *.safetensors in it (found pytorch_model.bin). Load the checkpoint with" in message
    export = export_failed(ValueError("x"), torch.nn.Linear(2, 2))
    for text in (message, str(export), shown(lambda: load_config(broken.parent))):
        assert "gguf" not in text.lower()


def test_a_folder_of_gguf_files_names_them(tmp_path: Path) -> None:
    (tmp_path / "m-Q4_K_M.gguf").touch()
    assert "but m-Q4_K_M.gguf: give the file's own path" in shown(lambda: kt.trace(tmp_path))


def test_names_and_texts_that_are_no_utf8(tmp_path: Path) -> None:
    """A path may be any bytes; a text may not."""
    folder = tmp_path / os.fsdecode(b"m\xff\xfe")
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TRAINED / name, folder)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode("The sea")) == "The sea"
    assert "it is not UTF-8" in shown(lambda: tokenizer.encode(os.fsdecode(b"sea \xff")))
    assert "the name is not UTF-8" in shown(lambda: kt.trace(folder))
    (folder / "tokenizer.json").write_text("{")
    assert "not a tokenizer file" in shown(lambda: Tokenizer.from_folder(folder))


def test_unknown_architecture(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    message = shown(lambda: kt.trace(tmp_path))
    assert str(tmp_path / "config.json") in message
    assert "no-such-model" in message
    assert "a newer transformers may know it" in message


def test_missing_tensor(broken: Path, traced: kt.Traced) -> None:
    weights = load_file(broken / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    message = shown(lambda: lower_and_load(broken, traced))
    assert "model.layers.1.self_attn.q_proj.weight" in message
    assert "download the checkpoint again" in message


def test_wrong_shape(broken: Path, traced: kt.Traced) -> None:
    weights = load_file(broken / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight"
    weights[name] = weights[name][:-3].clone()
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    message = shown(lambda: lower_and_load(broken, traced))
    assert message == (
        f"{broken / 'model.safetensors'}: tensor {name!r}: parameter {name!r} is [40, 48] by "
        "config.json, the file gives [37, 48]. The files belong to another config; download the "
        "checkpoint again"
    )


def test_truncated_safetensors(broken: Path, traced: kt.Traced) -> None:
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    message = shown(lambda: lower_and_load(broken, traced))
    assert message.startswith(f"{file}: truncated or corrupt, tensor ")
    assert message.endswith(". Download this file again")


def test_safetensors_with_a_wild_header(broken: Path, traced: kt.Traced) -> None:
    file = broken / "model.safetensors"
    file.write_bytes(struct.pack("<Q", 2**60) + file.read_bytes()[8:])
    message = shown(lambda: lower_and_load(broken, traced))
    assert message.startswith(f"{file}: truncated or corrupt, its header claims {2**60} bytes")


# ---- calls


def test_prompt_longer_than_the_cache(compiled: kt.Compiled) -> None:
    assert shown(lambda: compiled.generate([1] * 33, 1)) == (
        "prompt 0 has 33 tokens, and the cache was compiled for 32 rows a sequence. Shorten the "
        "prompt, or compile with context=33 or more"
    )


def test_text_for_a_model_without_tokenizer(compiled: kt.Compiled) -> None:
    message = shown(lambda: compiled.generate("The sea", 1))
    assert message.startswith("a text prompt needs a tokenizer, and tiny-random")
    assert message.endswith(
        "Give token ids, or compile with tokenizer=<folder that holds a tokenizer.json>"
    )


@pytest.mark.parametrize("prompt", [{}, 3, None, [], [1, "x"]])
def test_prompts_of_other_kinds(compiled: kt.Compiled, prompt: Any) -> None:
    assert shown(lambda: compiled.generate(prompt, 1)) == (
        f"prompt of type {type(prompt).__name__}: expected a text, a list of texts, token ids, or "
        "a list of token id lists"
    )


def test_input_ids_of_another_rank(compiled: kt.Compiled) -> None:
    assert shown(lambda: compiled(torch.tensor([1, 2]))) == (
        "input_ids has shape [2]: expected [b, s]; for prompts of different lengths give a list of "
        "id lists"
    )


# ---- passes, options, files


def test_unknown_pass(traced: kt.Traced) -> None:
    message = shown(lambda: traced.lower("cpu", "default,-fuse-norm"))
    assert message.startswith(
        "-fuse-norm: no such pass in the pipeline (did you mean fuse-norms?); it holds name-dims, "
    )


def test_unknown_option_of_a_pass(traced: kt.Traced) -> None:
    message = shown(lambda: traced.lower("cpu", "default,place{gpu_memry=3}"))
    assert message.startswith(
        "pass place: unknown option 'gpu_memry' (did you mean gpu_memory?); it has: gpu_memory: "
    )


def test_unknown_option(traced: kt.Traced) -> None:
    assert shown(lambda: traced.lower("cpu", cache_row=3)) == (
        "unknown option 'cache_row'; did you mean cache_rows?"
    )


def test_unknown_policy(traced: kt.Traced) -> None:
    message = shown(lambda: traced.lower("cpu", quantize="int3"))
    assert message == "quantize 'int3': unknown encoding int3 (did you mean int8, int4, int4z?)"


def test_malformed_ktir() -> None:
    text = "ktgraph.ir 1\nmodule @m\n\nfunc @main(%x: f32[3]) -> (f32[3]) {\n  %y = \n}\n"
    message = shown(lambda: parse_module(text, "m.ktir"))
    assert message == "m.ktir:6:1: expected a name, got '}'\n  }\n  ^"


def test_malformed_ktplan(compiled: kt.Compiled, tmp_path: Path) -> None:
    path = tmp_path / "m.ktplan"
    compiled.save(path)
    path.write_bytes(path.read_bytes()[:-200])
    message = shown(lambda: kt.load(path))
    assert message.startswith(f"{path} is no whole .ktplan")
    assert message.endswith("Save it again")


def test_missing_ktplan(tmp_path: Path) -> None:
    path = tmp_path / "none.ktplan"
    assert shown(lambda: kt.load(path)).startswith(f"{path}: no such file; give the .ktplan")


def test_placement_rule_that_matches_nothing(traced: kt.Traced, tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text("- match: {name: 'layers\\..*\\.no_such_part'}\n  replace: {device: cpu}\n")
    message = shown(lambda: traced.lower("cpu", rules=str(rules)))
    assert message.startswith(
        f"{rules}:1 (name: layers\\..*\\.no_such_part): the rule matches nothing;"
    )


# ---- machines


def test_hybrid_without_a_gpu(traced: kt.Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ktgraph.target.choose.gpu_names", list)
    message = shown(lambda: traced.lower("hybrid"))
    assert message.startswith('target="hybrid" needs a CUDA GPU')
    assert 'target="cpu"' in message
    assert 'kt.hybrid(gpu="simulated")' in message


def test_memory_too_small(traced: kt.Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    small = MemoryInfo(total=2**21, available=2**20, limit=None)
    monkeypatch.setattr(runner_module, "probe_memory", lambda: small)
    monkeypatch.setattr("ktgraph.target.choose.most_threads", lambda: 16)
    lowered = traced.lower("cpu", threads=16)
    with pytest.raises(MemoryBudgetError):
        lowered.compile()
    message = shown(lowered.compile)
    assert message.startswith("this needs ")
    assert " of memory, and 1 MiB are available. The largest terms:\n" in message
    assert message.endswith(
        "Compile with a smaller max_tokens, context or max_batch, or fewer threads"
    )


def test_more_threads_than_cpus(traced: kt.Traced) -> None:
    most = most_threads()
    for refused in (most + 1, 999):
        message = shown(lambda threads=refused: traced.lower("cpu", threads=threads))
        assert message.startswith(f"threads={refused}: this process may run on 1 to {most} CPUs")
    elsewhere = traced.lower("rtx4090-24g+xeon", threads=16)  # planned for another machine
    assert elsewhere.target.cpu_threads == 16
    assert traced.lower("cpu", threads=1).target.cpu_threads == 1  # and priced so


def test_no_native_extension(traced: kt.Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    lowered = traced.lower("cpu")
    monkeypatch.setitem(sys.modules, "ktgraph.cpu_kernels._native", None)
    monkeypatch.delattr("ktgraph.cpu_kernels._native")
    message = shown(lowered.compile)
    assert message.startswith("ktgraph's native CPU kernels are not built for this Python (")
    assert "Build them with: pip install" in message


def test_ops_without_a_native_kernel_are_named_once(traced: kt.Traced) -> None:
    lowered = traced.lower("cpu", "default,-pack-weights", context=32)
    with pytest.warns(FallbackWarning) as warned:
        lowered.compile()
    (message,) = [str(w.message) for w in warned if w.category is FallbackWarning]
    assert message.startswith("these ops run on their torch reference, which is slow: ")
    for op in ("moe.grouped_mlp (cpu.grouped_mlp: @", "nn.linear (cpu.linear: @"):
        assert op in message
    assert "not packed in tiles: pack-weights has not run" in message
    assert "nn.rms_norm" not in message  # native, though weights are unpacked
    assert warned[0].filename == __file__


def test_no_warning_when_all_is_native(traced: kt.Traced) -> None:
    lowered = traced.lower("cpu", context=32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowered.compile()


# ---- the command line


def test_command_line_prints_one_message(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert command_line(["run", str(tmp_path / "none"), "x"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"ktgraph run: {tmp_path / 'none'}: no such folder")
    assert error.count("\n") == 1


def test_command_line_needs_something_to_do(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert command_line(["run", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        "ktgraph run: nothing to do: give a prompt, or --check FILE\n"
    )


def test_a_full_disk_is_no_fault_of_ktgraph() -> None:
    message = user_message(OSError(errno.ENOSPC, "No space left on device"))
    assert message is not None
    assert "No space left on device" in message
    assert "make room" in message


def test_faults_of_ktgraph_itself_are_not_dressed_up() -> None:
    assert user_message(ZeroDivisionError("x")) is None
    assert user_message(KtgraphError("x")) == "x"
