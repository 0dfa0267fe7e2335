"""Tiny GGUF files written here with the gguf package, and transformers' model of their values.

Names, cuts and orders are those of llama.cpp's convert_hf_to_gguf.py, written down again: nothing
of ktgraph is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers as tf
from gguf_blocks import random_blocks

Array = np.ndarray
_K_QUANTS = ("q4_k", "q5_k", "q6_k", "iq4_xs")
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 256, "num_experts_per_tok": 2,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
}  # fmt: skip
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32,
    "v_head_dim": 48, "moe_intermediate_size": 64,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.7, "beta_fast": 32.0,
    "beta_slow": 1.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """An architecture: its model, its metadata, how tensors are cut, and in which formats."""

    arch: str
    config: Callable[[], Any]
    metadata: dict[str, Any]
    formats: dict[str, str] = field(default_factory=dict[str, str])  # a part of a name -> format
    splits_kv_b: bool = True
    pairs: bool = False  # q and k in the order for neighbouring channels
    rope_factors: bool = False


_MOE_KEYS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 64}
_LATENT = {  # as new files say it: one key-value head over the latent
    "attention.head_count_kv": 1, "attention.key_length": 80, "attention.value_length": 64,
    "attention.key_length_mla": 48, "attention.value_length_mla": 48, "rope.dimension_count": 16,
    "attention.kv_lora_rank": 64, "leading_dense_block_count": 1, "expert_shared_count": 1,
    **_MOE_KEYS,
}  # fmt: skip
CASES: dict[str, Case] = {
    "deepseek2": Case(
        "deepseek2",
        lambda: tf.DeepseekV2Config(
            **{**SIZES, **_MLA}, q_lora_rank=None, topk_method="greedy", n_group=1, topk_group=1,
            rope_parameters=_YARN,
        ),
        {**_LATENT, "expert_weights_scale": 1.0, "expert_weights_norm": False,
         "expert_gating_func": 1, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
         "rope.scaling.original_context_length": 16, "rope.scaling.yarn_log_multiplier": 0.07},
        {"attn_output": "f16", "ffn_gate_exps": "q4_k", "ffn_up_exps": "q4_k",
         "blk.2.ffn_down_exps": "q4_0", "ffn_down_exps": "q5_0", "attn_k_b": "q5_0",
         "attn_v_b": "q4_0", "attn_q": "q6_k", "token_embd": "q4_k", "output.": "q6_k",
         "shexp": "q8_0"},
    ),
    "deepseek2, sigmoid": Case(
        "deepseek2",
        lambda: tf.DeepseekV3Config(
            **{**SIZES, **_MLA}, q_lora_rank=32, n_group=2, topk_group=1, norm_topk_prob=True,
            routed_scaling_factor=2.5,
        ),
        {**_LATENT, "attention.head_count_kv": 4, "attention.key_length": 48,
         "attention.value_length": 48, "attention.key_length_mla": None,
         "attention.value_length_mla": None, "attention.q_lora_rank": 32,
         "expert_weights_scale": 2.5, "expert_weights_norm": True, "expert_gating_func": 2,
         "expert_group_count": 2, "expert_group_used_count": 1},
        {"exps": "iq4_nl", "attn_kv_b": "q8_0", "attn_q_a": "q5_k", "shexp": "q4_0",
         "blk.0.ffn_down": "q2_k", "ffn_": "iq4_xs"},
        splits_kv_b=False,
    ),
    "qwen3moe": Case(
        "qwen3moe",
        lambda: tf.Qwen3MoeConfig(
            **{**SIZES, "head_dim": 32}, num_experts=4, moe_intermediate_size=256,
            norm_topk_prob=True, tie_word_embeddings=True,
        ),
        {**_MOE_KEYS, "expert_feed_forward_length": 256, "attention.key_length": 32,
         "attention.value_length": 32},
        {"exps": "q4_k", "attn_v": "q6_k", "attn_output": "q8_0", "attn": "q4_k",
         "token_embd": "q6_k"},
    ),
    "qwen2moe": Case(
        "qwen2moe",
        lambda: tf.Qwen2MoeConfig(
            **SIZES, num_experts=4, moe_intermediate_size=64, shared_expert_intermediate_size=96,
        ),
        {**_MOE_KEYS, "expert_shared_feed_forward_length": 96},
        {"exps": "q8_0", "shexp": "q4_0", "inp": "f32", "attn": "bf16"},
    ),
    "llama": Case(
        "llama",
        lambda: tf.LlamaConfig(
            **{**SIZES, "head_dim": 64}, rope_parameters={
                "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0,
                "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        ),
        {"rope.freq_base": 500000.0, "rope.dimension_count": 64},
        {"attn_q": "q5_k", "attn_k": "q4_0", "attn_v": "q4_1", "ffn": "q4_k"},
        pairs=True, rope_factors=True,
    ),
    "llama, experts": Case(
        "llama",
        lambda: tf.MixtralConfig(**SIZES, num_local_experts=4, head_dim=64, sliding_window=None),
        {"expert_count": 4, "expert_used_count": 2, "rope.freq_base": 1e6},
        {"exps": "q5_k", "attn": "q8_0"},
        pairs=True,
    ),
}  # fmt: skip


def write(path: Path, name: str) -> Any:
    """Write the file of a case; returns transformers' model of the values it holds, in f32."""
    case = CASES[name]
    torch.manual_seed(5)
    model = tf.AutoModelForCausalLM.from_config(case.config(), dtype=torch.float32).eval()
    state: dict[str, torch.Tensor] = {}
    rng = np.random.default_rng(3)
    writer = _writer(path, case, model.config)
    for key, tensor in model.state_dict().items():
        wide = tensor.dim() > 1
        scale = 1.5 * tensor.shape[-1] ** -0.5 if wide else 0.2
        values = torch.randn(tensor.shape) * scale + (0.0 if wide or "bias" in key else 1.0)
        pieces = []
        for stored, piece in _pieces(case, model.config, key, values.numpy()):
            if key == "lm_head.weight" and model.config.tie_word_embeddings:
                continue
            data, kind, back = _stored(case, stored, piece, rng)
            writer.add_tensor(stored, data, raw_dtype=kind)
            pieces.append(back)
        if pieces:
            state[key] = torch.from_numpy(_whole(case, model.config, key, pieces))
    if case.rope_factors:
        inv_freq = model.model.rotary_emb.inv_freq.numpy()
        base = 1.0 / 500000.0 ** (np.arange(32, dtype=np.float32) / 32)
        writer.add_tensor("rope_freqs.weight", (base / inv_freq).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if model.config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model


def _writer(path: Path, case: Case, config: Any) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, case.arch)
    fields = {
        "block_count": config.num_hidden_layers, "embedding_length": config.hidden_size,
        "context_length": config.max_position_embeddings,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 10000.0, **case.metadata,
    }  # fmt: skip
    for key, value in fields.items():
        name = f"{case.arch}.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
    writer.add_uint32("tokenizer.ggml.bos_token_id", 0)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 1)
    return writer


_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b", "mlp.gate": "ffn_gate_inp", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.shared_expert{s}.{x}_proj": f"ffn_{x}_shexp"
       for s in ("", "s") for x in ("gate", "up", "down")},
}  # fmt: skip


def _pieces(case: Case, config: Any, key: str, value: Array) -> Iterator[tuple[str, Array]]:
    """Tensors of the file that a parameter becomes."""
    whole = {"model.embed_tokens.weight": "token_embd.weight", "lm_head.weight": "output.weight",
             "model.norm.weight": "output_norm.weight"}  # fmt: skip
    if key in whole:
        yield whole[key], value
        return
    _, _, layer, rest = key.split(".", 3)
    block, (module, _, leaf) = f"blk.{layer}.", rest.rpartition(".")
    if rest == "mlp.experts.gate_up_proj":
        half = value.shape[1] // 2
        yield block + "ffn_gate_exps.weight", np.ascontiguousarray(value[:, :half])
        yield block + "ffn_up_exps.weight", np.ascontiguousarray(value[:, half:])
    elif rest == "mlp.experts.down_proj":
        yield block + "ffn_down_exps.weight", value
    elif leaf == "e_score_correction_bias":
        yield block + "exp_probs_b.bias", value
    elif module == "self_attn.kv_b_proj" and case.splits_kv_b:
        heads = value.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
        key_half = heads[:, : config.qk_nope_head_dim].swapaxes(1, 2)
        yield block + "attn_k_b.weight", np.ascontiguousarray(key_half)
        value_half = heads[:, config.qk_nope_head_dim :]
        yield block + "attn_v_b.weight", np.ascontiguousarray(value_half)
    else:
        if case.pairs and module in ("self_attn.q_proj", "self_attn.k_proj"):
            value = _paired(value, _heads(config, module))
        value = value[0] if module == "mlp.shared_expert_gate" else value
        yield f"{block}{_NAMES[module]}.{leaf}", value


def _heads(config: Any, module: str) -> int:
    return config.num_attention_heads if ".q_" in module else config.num_key_value_heads


def _paired(value: Array, heads: int) -> Array:
    """LlamaModel.permute of convert_hf_to_gguf.py."""
    halves = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(value.shape))


def _unpaired(value: Array, heads: int) -> Array:
    pairs = value.reshape(heads, value.shape[0] // heads // 2, 2, *value.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(value.shape))


def _stored(
    case: Case, name: str, value: Array, rng: np.random.Generator
) -> tuple[Array, gguf.GGMLQuantizationType, Array]:
    """What the file holds of a tensor, its type, and the values that this means."""
    wanted = [f for part, f in case.formats.items() if part in name and value.ndim > 1]
    format = wanted[0] if wanted and "_inp" not in name and "norm" not in name else "f32"
    kind = gguf.GGMLQuantizationType[format.upper()]
    if format == "f32":
        return value.astype(np.float32), kind, value.astype(np.float32)
    rows = value.reshape(-1, value.shape[-1])
    if format in _K_QUANTS:
        data = random_blocks(format, *rows.shape, rng, float(rows.std()))
    elif format == "q2_k":
        data = _q2_k(rows.shape[0], rows.shape[1], rng)
    elif format == "iq4_nl":
        data = _iq4_nl(rows.shape[0], rows.shape[1], rng)
    else:
        data = gguf.quants.quantize(rows, kind)
    back = gguf.quants.dequantize(data, kind).astype(np.float32).reshape(value.shape)
    data = data.reshape(*value.shape[:-1], -1)
    return data, kind, back


def _q2_k(rows: int, cols: int, rng: np.random.Generator) -> Array:
    """16 sub-scales with minima, 64 bytes of 2-bit values, d and dmin."""
    each = rng.integers(0, 256, (rows, cols // 256, 84)).astype(np.uint8)
    each[..., 80:82] = np.full((*each.shape[:2], 1), 0.004, np.float16).view(np.uint8)
    each[..., 82:84] = np.full((*each.shape[:2], 1), 0.006, np.float16).view(np.uint8)
    return each.reshape(rows, -1)


def _iq4_nl(rows: int, cols: int, rng: np.random.Generator) -> Array:
    each = rng.integers(0, 256, (rows, cols // 32, 18)).astype(np.uint8)
    scale = rng.uniform(0.0008, 0.002, (*each.shape[:2], 1)).astype(np.float16)
    each[..., :2] = scale.view(np.uint8)
    return each.reshape(rows, -1)


def _whole(case: Case, config: Any, key: str, pieces: list[Array]) -> Array:
    """The parameter of the values that its pieces mean."""
    module = key.split(".", 3)[-1].rpartition(".")[0]
    if "experts.gate_up_proj" in key:
        return np.concatenate(pieces, axis=1)
    if len(pieces) == 2:
        heads = [np.concatenate([k.T, v]) for k, v in zip(*pieces, strict=True)]
        return np.concatenate(heads)
    if case.pairs and module in ("self_attn.q_proj", "self_attn.k_proj"):
        return _unpaired(pieces[0], _heads(config, module))
    return pieces[0][None] if module == "mlp.shared_expert_gate" else pieces[0]
