"""Weight sources: the same tensors from a model, a folder and a seed; damaged folders are named."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from ktgraph.errors import UnsupportedInputError
from ktgraph.frontends.errors import UnsupportedModelError
from ktgraph.frontends.safetensors_files import CheckpointError
from ktgraph.ir import parse_module
from ktgraph.weights.safetensors_source import SafetensorsSource
from ktgraph.weights.sources import (
    ModelSource,
    RandomSource,
    WeightSource,
    WeightSourceError,
)

SIZES: dict[str, Any] = {
    "vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 40, "moe_intermediate_size": 24,
    "num_experts_per_tok": 2, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
HEAD: dict[str, Any] = {"head_dim": 8}
EXPERTS = "model.layers.1.mlp.experts.gate_up_proj"


def _model(name: str) -> Any:
    configs: dict[str, Callable[[], Any]] = {
        "qwen3_moe": lambda: tf.Qwen3MoeConfig(**SIZES, num_experts=11, **HEAD),
        "mixtral": lambda: tf.MixtralConfig(**SIZES, num_local_experts=4),
        "gpt_oss": lambda: tf.GptOssConfig(**SIZES, **HEAD, num_local_experts=4),
        "deepseek_v2": lambda: tf.DeepseekV2Config(
            **{**SIZES, "num_key_value_heads": 4}, n_routed_experts=4, n_shared_experts=1,
            first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=None, qk_rope_head_dim=4,
            qk_nope_head_dim=8, v_head_dim=8,
        ),
        "tied": lambda: tf.Qwen3MoeConfig(
            **SIZES, **HEAD, num_experts=4, tie_word_embeddings=True
        ),
    }  # fmt: skip
    torch.manual_seed(3)
    return tf.AutoModelForCausalLM.from_config(configs[name](), dtype=torch.bfloat16).eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Qwen3-MoE checkpoint of several shards (11 experts: their order is not alphabetical)."""
    _model("qwen3_moe").save_pretrained(tmp_path, max_shard_size="40KB")
    return tmp_path


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v2", "tied"])
def test_folder_gives_what_the_model_holds(name: str, tmp_path: Path) -> None:
    model = _model(name)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    by_model, by_folder = ModelSource(model), SafetensorsSource(tmp_path)
    assert set(by_model.names()) <= set(by_folder.names())
    for key in by_model.names():
        want, got = by_model.get(key), by_folder.get(key)
        assert torch.equal(got, want), key
        assert by_folder.shape(key) == by_model.shape(key) == tuple(want.shape)
        assert by_folder.dtype(key) == by_model.dtype(key) == got.dtype
    assert isinstance(by_folder, WeightSource)


def test_experts_and_rows(folder: Path) -> None:
    source = SafetensorsSource(folder)
    whole = source.get(EXPERTS)
    assert source.shape(EXPERTS) == (11, 48, 32)
    for e in (0, 2, 10):
        assert torch.equal(source.get(EXPERTS, expert=e), whole[e])
        rows = source.get(EXPERTS, expert=e, rows=slice(20, 29))
        assert torch.equal(rows, whole[e, 20:29])
    assert torch.equal(
        source.get("lm_head.weight", rows=slice(3, 7)), source.get("lm_head.weight")[3:7]
    )


def test_single_expert_is_a_view_of_the_file(folder: Path) -> None:
    """down_proj of an expert is one file tensor: nothing is copied."""
    source = SafetensorsSource(folder)
    name = EXPERTS.replace("gate_up", "down")
    a, b = source.get(name, expert=3), source.get(name, expert=3)
    assert a.shape == (32, 24)
    assert torch.equal(a, b)
    assert source.nbytes == ModelSource(_model("qwen3_moe")).nbytes - 2 * 4 * 4  # no inv_freq


def test_fingerprint_follows_the_bytes(folder: Path) -> None:
    before = SafetensorsSource(folder).fingerprint()
    assert SafetensorsSource(folder).fingerprint() == before
    shard = sorted(folder.glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert SafetensorsSource(folder).fingerprint() != before
    model = _model("qwen3_moe")
    first = ModelSource(model).fingerprint()
    assert ModelSource(_model("qwen3_moe")).fingerprint() == first
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert ModelSource(model).fingerprint() != first


def test_unknown_name_suggests(folder: Path) -> None:
    for source in (SafetensorsSource(folder), ModelSource(_model("qwen3_moe"))):
        with pytest.raises(WeightSourceError, match=r"'lm_head.weigth'; did you mean 'lm_head"):
            source.get("lm_head.weigth")


def test_model_on_meta_has_no_weights() -> None:
    with torch.device("meta"):
        model = tf.AutoModelForCausalLM.from_config(tf.LlamaConfig(**SIZES))
    with pytest.raises(WeightSourceError, match="meta device"):
        ModelSource(model)


# ---------------------------------------------------------------- random


TEXT = """ktgraph.ir 1
module @m
dim D = 6, E = 3, F = 4
weight @norm : f32[D]<bf16> from "norm.weight"
weight @layers[i in 1..2].w : f32[E, F, D] from "layers.{i}.w"
weight @freqs : f32[4] from "rotary.inv_freq"
"""


def test_random_source() -> None:
    module = parse_module(TEXT)
    source = RandomSource(module, seed=5)
    assert list(source.names()) == ["norm.weight", "layers.1.w", "layers.2.w", "rotary.inv_freq"]
    whole = source.get("layers.2.w")
    assert torch.equal(whole, RandomSource(module, seed=5).get("layers.2.w"))
    assert torch.equal(whole[1], source.get("layers.2.w", expert=1))
    assert torch.equal(whole[1, 1:3], source.get("layers.2.w", expert=1, rows=slice(1, 3)))
    assert not torch.equal(whole, source.get("layers.1.w"))
    assert not torch.equal(whole, RandomSource(module, seed=6).get("layers.2.w"))
    assert source.dtype("norm.weight") == torch.bfloat16 == source.get("norm.weight").dtype
    assert source.get("rotary.inv_freq")[0] == 1
    assert RandomSource(module.rebind(D=9), 5).shape("layers.1.w") == (3, 4, 9)
    assert source.fingerprint() != RandomSource(module, seed=6).fingerprint()


# ---------------------------------------------------------------- damaged folders


def _first_shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


def _truncate(folder: Path) -> None:
    shard = _first_shard(folder)
    shard.write_bytes(shard.read_bytes()[:-100])


def _cut_header(folder: Path) -> None:
    shard = _first_shard(folder)
    shard.write_bytes(shard.read_bytes()[:50])


def _empty(folder: Path) -> None:
    _first_shard(folder).write_bytes(b"")


def _garble_header(folder: Path) -> None:
    shard = _first_shard(folder)
    data = bytearray(shard.read_bytes())
    data[9:20] = b"\xff" * 11
    shard.write_bytes(data)


def _lie_about_size(folder: Path) -> None:
    """A header whose tensor claims more elements than its bytes hold."""
    shard = _first_shard(folder)
    data = shard.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    table = json.loads(data[8 : 8 + length])
    key = next(k for k in table if k != "__metadata__")
    table[key]["shape"][0] += 1
    header = json.dumps(table).encode()
    shard.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])


def _drop_shard(folder: Path) -> None:
    _first_shard(folder).unlink()


def _break_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{")


def _drop_tensor(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    for shard in folder.glob("*.safetensors"):
        tensors = load_file(shard)
        tensors.pop("model.layers.0.self_attn.q_proj.weight", None)
        save_file(tensors, shard)


def _drop_expert(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    for shard in folder.glob("*.safetensors"):
        tensors = load_file(shard)
        tensors.pop("model.layers.1.mlp.experts.4.up_proj.weight", None)
        save_file(tensors, shard)


def _other_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["moe_intermediate_size"] = 20
    (folder / "config.json").write_text(json.dumps(config))


def _no_weights(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


DAMAGE: list[tuple[Callable[[Path], None], str]] = [
    (_truncate, r"model-00001.*safetensors: truncated or corrupt, tensor '.*' ends at byte"),
    (
        _cut_header,
        r"model-00001.*truncated or corrupt, its header claims \d+ bytes of a file of 50",
    ),
    (_empty, r"model-00001.*truncated or corrupt"),
    (_garble_header, r"model-00001.*header is not valid"),
    (_lie_about_size, r"model-00001.*tensor '.*' BF16\[.*\] needs \d+ bytes, has \d+"),
    (_drop_shard, r"1 of \d+ shards of .*index.json are missing: model-00001.*Finish the download"),
    (_break_index, r"index.json: not an index of shards"),
    (_drop_tensor, r"no tensor for parameter 'model.layers.0.self_attn.q_proj.weight' \(closest"),
    (_drop_expert, r"parameter 'model.layers.1.mlp.experts.gate_up_proj' is \[11, 48, 32\]"),
    (_other_config, r"is \[11, 40, 32\] by config.json, the file gives \[11, 48, 32\]"),
    (_no_weights, r"no \*.safetensors in it \(found pytorch_model.bin\)"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE, ids=lambda d: getattr(d, "__name__", ""))
def test_damage_is_named(folder: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(folder)
    with pytest.raises(CheckpointError, match=message) as error:
        SafetensorsSource(folder)
    assert isinstance(error.value, UnsupportedInputError)
    assert "\n" not in str(error.value)


def test_not_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"expected a checkpoint folder.*found nothing"):
        SafetensorsSource(tmp_path / "nowhere")
    with pytest.raises(UnsupportedModelError, match=r"no config\.json"):
        SafetensorsSource(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UnsupportedModelError, match="found a file"):
        SafetensorsSource(tmp_path / "file")
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(UnsupportedModelError, match=r"cannot read it.*no_such_model"):
        SafetensorsSource(tmp_path)


def test_quantized_checkpoint_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "aqlm"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"by 'aqlm', which ktgraph does not read"):
        SafetensorsSource(folder)
