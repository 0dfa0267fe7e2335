"""Tiny quantized checkpoints, encoded here from each format's definition, and what they mean.

`encode_*` take random integers and scales of one matrix [out, in] and give the file tensors and the
f32 values; nothing of ktgraph is used.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

Files = dict[str, torch.Tensor]
Encoded = tuple[Files, np.ndarray]  # file tensors by full name, values f32
Array = np.ndarray

_SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "num_experts_per_tok": 2,
    "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1, "max_position_embeddings": 128,
}  # fmt: skip
_GQA: dict[str, Any] = {**_SIZES, "head_dim": 16}
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4, "n_routed_experts": 6, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 32, "q_lora_rank": 48,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 24, "v_head_dim": 16,
}  # fmt: skip


# -- one matrix per format -------------------------------------------------------------------------
def encode_fp8(name: str, rows: int, cols: int, rng: np.random.Generator) -> Encoded:
    """e4m3: sign, 4 bits of exponent (bias 7), 3 of mantissa; a scale per 128 x 128."""
    codes = rng.integers(0, 256, (rows, cols)).astype(np.uint8)
    codes[codes & 0x7F == 0x7F] = 0x80  # no NaN
    exponent, fraction = (codes >> 3 & 15).astype(np.int32), (codes & 7).astype(np.float32)
    normal = (8 + fraction) * np.exp2(exponent - 10.0, dtype=np.float32)
    size = np.where(exponent == 0, fraction * np.float32(2**-9), normal).astype(np.float32)
    signed = np.where(codes & 128, -size, size).astype(np.float32)
    shape = (-(-rows // 128), -(-cols // 128))
    scale = rng.uniform(2e-4, 6e-4, shape).astype(np.float32)
    each = scale[np.arange(rows)[:, None] // 128, np.arange(cols)[None] // 128]
    weight = torch.from_numpy(codes).view(torch.float8_e4m3fn)
    files = {f"{name}.weight": weight, f"{name}.weight_scale_inv": torch.from_numpy(scale)}
    return files, signed * each


def words(values: Array, axis: int, places: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)) -> Array:
    """Eight 4-bit values along `axis` in one 32-bit word; places[i] is what nibble i holds."""
    values = np.moveaxis(values.astype(np.uint32), axis, -1)
    out = np.zeros((*values.shape[:-1], values.shape[-1] // 8), np.uint32)
    for i, place in enumerate(places):
        out |= values[..., place::8] << np.uint32(4 * i)
    return np.ascontiguousarray(np.moveaxis(out.view(np.int32), -1, axis))


def encode_compressed(
    name: str, rows: int, cols: int, rng: np.random.Generator, *, half: bool = False
) -> Encoded:
    """compressed-tensors pack-quantized: symmetric, groups of 32, bf16 scales (or f16)."""
    q = rng.integers(-8, 8, (rows, cols))
    kind = torch.float16 if half else torch.bfloat16
    scale = torch.from_numpy(rng.uniform(5e-3, 2e-2, (rows, cols // 32))).to(kind)
    value = q.astype(np.float32) * np.repeat(scale.float().numpy(), 32, axis=1)
    files = {
        f"{name}.weight_packed": torch.from_numpy(words(q + 8, 1)),
        f"{name}.weight_scale": scale,
        f"{name}.weight_shape": torch.tensor([rows, cols], dtype=torch.int32),
    }
    return files, value


def encode_gptq(name: str, rows: int, cols: int, rng: np.random.Generator) -> Encoded:
    """AutoGPTQ: words run along the inputs, zero points are stored less one; groups of 32."""
    q, zero = rng.integers(0, 16, (cols, rows)), rng.integers(1, 17, (cols // 32, rows))
    scale = rng.uniform(5e-3, 2e-2, (cols // 32, rows)).astype(np.float16)
    group = np.arange(cols) // 32
    value = (q - zero[group]).astype(np.float32) * scale[group].astype(np.float32)
    files = {
        f"{name}.qweight": torch.from_numpy(words(q, 0)),
        f"{name}.qzeros": torch.from_numpy(words(zero - 1, 1)),
        f"{name}.scales": torch.from_numpy(scale),
        f"{name}.g_idx": torch.from_numpy(group.astype(np.int32)),
    }
    return files, np.ascontiguousarray(value.T)


def encode_awq(name: str, rows: int, cols: int, rng: np.random.Generator) -> Encoded:
    """AutoAWQ gemm: words run along the outputs, which lie as 0 2 4 6 1 3 5 7; groups of 64."""
    size = 64 if cols % 64 == 0 else 32
    q, zero = rng.integers(0, 16, (cols, rows)), rng.integers(0, 16, (cols // size, rows))
    scale = rng.uniform(5e-3, 2e-2, (cols // size, rows)).astype(np.float16)
    group, places = np.arange(cols) // size, (0, 2, 4, 6, 1, 3, 5, 7)
    value = (q - zero[group]).astype(np.float32) * scale[group].astype(np.float32)
    files = {
        f"{name}.qweight": torch.from_numpy(words(q, 1, places)),
        f"{name}.qzeros": torch.from_numpy(words(zero, 1, places)),
        f"{name}.scales": torch.from_numpy(scale),
    }
    return files, np.ascontiguousarray(value.T)


def encode_mxfp4(
    name: str, experts: int, rows: int, cols: int, rng: np.random.Generator
) -> Encoded:
    """OCP MX: e2m1, a power of two per 32 columns; values [experts, rows = out, cols = in]."""
    codes = rng.integers(0, 16, (experts, rows, cols)).astype(np.uint8)
    scale = rng.integers(119, 122, (experts, rows, cols // 32)).astype(np.uint8)
    magnitude = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)[codes & 7]
    signed = np.where(codes & 8, -magnitude, magnitude)
    power = np.exp2(scale.astype(np.float32) - 127)
    value = signed * np.repeat(power, 32, axis=2)
    pairs = codes[..., 0::2] | codes[..., 1::2] << 4
    blocks = pairs.reshape(experts, rows, cols // 32, 16)
    files = {f"{name}_blocks": torch.from_numpy(blocks), f"{name}_scales": torch.from_numpy(scale)}
    return files, value.astype(np.float32)


# -- whole checkpoints -----------------------------------------------------------------------------
@dataclass(frozen=True)
class Case:
    """A format: its model, its quantization_config, and which matrices are quantized."""

    config: Callable[[], Any]
    settings: dict[str, Any]
    encode: Callable[[str, int, int, np.random.Generator], Encoded]
    is_quantized: Callable[[str], bool]
    encoding: str  # as the IR prints it


def _linear(name: str) -> bool:
    return "proj" in name


def _not_one_by_one(name: str, rows: int, cols: int, rng: np.random.Generator) -> Encoded:
    """gpt-oss stores stacks of experts: `encode_mxfp4`."""
    raise AssertionError


CASES: dict[str, Case] = {
    "fp8": Case(
        lambda: tf.DeepseekV3Config(
            **{**_SIZES, **_MLA, "hidden_size": 160, "intermediate_size": 200},
            moe_intermediate_size=72,
        ),
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
         "weight_block_size": [128, 128]},
        encode_fp8, _linear, "fp8(group=128)",
    ),
    "compressed-tensors": Case(
        lambda: tf.DeepseekV3Config(**{**_SIZES, **_MLA}, moe_intermediate_size=32),
        {"quant_method": "compressed-tensors", "format": "pack-quantized",
         "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
                    "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
         "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
             "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32,
             "symmetric": True}}}},
        encode_compressed, lambda n: ".experts." in n, "int4(group=32)",
    ),
    "gptq": Case(
        lambda: tf.Qwen3MoeConfig(**_GQA, num_experts=6, moe_intermediate_size=32),
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False},
        encode_gptq, _linear, "int4z(group=32)",
    ),
    "awq": Case(
        lambda: tf.Qwen3MoeConfig(**_GQA, num_experts=6, moe_intermediate_size=32),
        {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True,
         "version": "gemm"},
        encode_awq, lambda n: _linear(n) and "down_proj" not in n, "int4z(group=64)",
    ),
    "mxfp4": Case(
        lambda: tf.GptOssConfig(
            **{**_SIZES, "intermediate_size": 64}, head_dim=16, num_local_experts=5,
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=8,
        ),
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
        _not_one_by_one, lambda n: n.endswith(("gate_up_proj", "down_proj")),
        "mxfp4(group=32)",
    ),
}  # fmt: skip


def make(folder: Path, name: str) -> Any:
    """Write the checkpoint of a case; returns transformers' model of its values, in f32."""
    case, rng = CASES[name], np.random.default_rng(len(name))
    plain, folder = folder / "plain", folder / name
    torch.manual_seed(1)
    model = tf.AutoModelForCausalLM.from_config(case.config(), dtype=torch.bfloat16)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.08)
    model.save_pretrained(folder)
    files: Files = {}
    values: Files = {}
    for key, tensor in load_file(folder / "model.safetensors").items():
        files[key], values[key] = tensor, tensor.float()
        stem = key.removesuffix(".weight")
        if not case.is_quantized(stem):
            continue
        del files[key]
        if name == "mxfp4":  # the parameter is [experts, in, out], the file [experts, out, in]
            experts, cols, rows = tensor.shape
            made, value = encode_mxfp4(stem, experts, rows, cols, rng)
            value = np.ascontiguousarray(value.swapaxes(1, 2))
        else:
            made, value = case.encode(stem, tensor.shape[0], tensor.shape[1], rng)
        files.update(made)
        values[key] = torch.from_numpy(value)
    save_file(files, folder / "model.safetensors")
    edit_config(folder, quantization_config=case.settings)
    model.save_pretrained(plain)
    save_file(values, plain / "model.safetensors", {"format": "pt"})
    return tf.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()


def edit_config(folder: Path, **changes: Any) -> None:
    """Change fields of config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def edit_files(folder: Path, change: Callable[[Files], None]) -> None:
    """Change the tensors of model.safetensors."""
    files = load_file(folder / "model.safetensors")
    change(files)
    save_file(files, folder / "model.safetensors")
