"""The transformers config that a GGUF file's metadata describes.

Keys: llama.cpp's gguf-py/gguf/constants.py.  What a file leaves out is what llama.cpp assumes for
that architecture (src/llama-model.cpp).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as tf
from transformers import PreTrainedConfig

from ktgraph.frontends.errors import UnsupportedModelError
from ktgraph.frontends.gguf_file import GgufFile

_SOFTMAX, _SIGMOID = 1, 2  # expert_gating_func


def gguf_config(file: GgufFile) -> PreTrainedConfig:
    """The config; raises UnsupportedModelError for an architecture that is not read."""
    make = _ARCHITECTURES.get(file.architecture)
    if make is None:
        known = ", ".join(_ARCHITECTURES)
        raise UnsupportedModelError(
            f"{file.path}: architecture {file.architecture!r} is not read from GGUF (read are "
            f"{known}). Use the model's safetensors checkpoint"
        )
    config = make(file)
    config.dtype = "float32"
    return config


def _common(file: GgufFile) -> dict[str, Any]:
    embedding = file.tensors.get("token_embd.weight")
    heads = file.need("attention.head_count")
    rows = embedding.shape[0] if embedding is not None else file.need("vocab_size")
    common = {
        "vocab_size": rows,
        "hidden_size": file.need("embedding_length"),
        "num_hidden_layers": file.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.of_model("attention.head_count_kv") or heads,
        "intermediate_size": file.of_model("feed_forward_length"),
        "max_position_embeddings": file.need("context_length"),
        "rms_norm_eps": round(float(file.need("attention.layer_norm_rms_epsilon")), 12),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.get("tokenizer.ggml.padding_token_id"),
        "rope_parameters": _rope(file),
    }
    return {k: v for k, v in common.items() if v is not None}


def _rope(file: GgufFile) -> dict[str, Any]:
    base = float(file.of_model("rope.freq_base") or 10000.0)
    kind = file.of_model("rope.scaling.type")
    if kind in (None, "none"):
        return {"rope_type": "default", "rope_theta": base}
    factor = float(file.of_model("rope.scaling.factor") or 1.0)
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": base, "factor": factor}
    if kind != "yarn":
        raise UnsupportedModelError(
            f"{file.path}: rope scaling {kind!r} is not read from GGUF (none, linear, yarn are)"
        )
    found = {
        "rope_type": "yarn",
        "rope_theta": base,
        "factor": factor,
        "original_max_position_embeddings": file.need("rope.scaling.original_context_length"),
        "beta_fast": float(file.of_model("rope.scaling.yarn_beta_fast") or 32.0),
        "beta_slow": float(file.of_model("rope.scaling.yarn_beta_slow") or 1.0),
    }
    multiplier = file.of_model("rope.scaling.yarn_log_multiplier")  # 0.1 * mscale_all_dim
    if multiplier is not None:
        scale = round(float(multiplier) * 10.0, 6)
        found |= {"mscale": scale, "mscale_all_dim": scale}
    return found


def _head_dim(file: GgufFile, common: dict[str, Any]) -> int:
    own = common["hidden_size"] // common["num_attention_heads"]
    return int(file.of_model("attention.key_length") or own)


def _llama(file: GgufFile) -> PreTrainedConfig:
    common, experts = _common(file), file.of_model("expert_count")
    common["head_dim"] = _head_dim(file, common)
    if not experts:
        biased = "blk.0.attn_q.bias" in file.tensors
        return tf.LlamaConfig(**common, attention_bias=biased)
    given = common | {
        "num_local_experts": experts,
        "num_experts_per_tok": file.need("expert_used_count"),
        "sliding_window": None,
    }
    return tf.MixtralConfig(**given)


def _qwen_moe(file: GgufFile) -> dict[str, Any]:
    common = _common(file)
    layers = range(common["num_hidden_layers"])
    dense = [n for n in layers if f"blk.{n}.ffn_gate_exps.weight" not in file.tensors]
    return common | {
        "num_experts": file.need("expert_count"),
        "num_experts_per_tok": file.need("expert_used_count"),
        "moe_intermediate_size": file.need("expert_feed_forward_length"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
    }


def _qwen3_moe(file: GgufFile) -> PreTrainedConfig:
    given, norm = _qwen_moe(file), file.of_model("expert_weights_norm")
    given["head_dim"] = _head_dim(file, given)
    return tf.Qwen3MoeConfig(**given, norm_topk_prob=True if norm is None else bool(norm))


def _qwen2_moe(file: GgufFile) -> PreTrainedConfig:
    shared = file.of_model("expert_shared_feed_forward_length")
    stored = file.tensors.get("blk.0.ffn_up_shexp.weight")
    width = shared or (stored.shape[0] if stored is not None else None)
    given = _qwen_moe(file) | {
        "shared_expert_intermediate_size": width,
        "norm_topk_prob": bool(file.of_model("expert_weights_norm")),
    }
    return tf.Qwen2MoeConfig(**given)


def _deepseek2(file: GgufFile) -> PreTrainedConfig:
    """DeepSeek-V2, or V3 where the gate is a sigmoid.

    Files with separate halves of kv_b describe attention over the latent: one key-value head,
    and the heads' own sizes under key_length_mla and value_length_mla.
    """
    common = _common(file)
    rope = file.need("rope.dimension_count")
    key = file.of_model("attention.key_length_mla") or file.need("attention.key_length")
    value = file.of_model("attention.value_length_mla") or file.need("attention.value_length")
    gating = file.of_model("expert_gating_func") or _SOFTMAX
    groups = file.of_model("expert_group_count") or 1
    given = common | {
        "num_key_value_heads": common["num_attention_heads"],
        "q_lora_rank": file.of_model("attention.q_lora_rank") or None,
        "kv_lora_rank": file.need("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": key - rope,
        "v_head_dim": value,
        "first_k_dense_replace": file.of_model("leading_dense_block_count") or 0,
        "n_routed_experts": file.need("expert_count"),
        "num_experts_per_tok": file.need("expert_used_count"),
        "n_shared_experts": file.of_model("expert_shared_count") or None,
        "moe_intermediate_size": file.need("expert_feed_forward_length"),
        "routed_scaling_factor": float(file.of_model("expert_weights_scale") or 1.0),
        "norm_topk_prob": bool(file.of_model("expert_weights_norm")),
        "n_group": groups,
        "topk_group": file.of_model("expert_group_used_count") or 1,
    }
    if gating == _SIGMOID:
        return tf.DeepseekV3Config(**given, rope_interleave=True)
    if gating != _SOFTMAX:
        raise UnsupportedModelError(
            f"{file.path}: deepseek2.expert_gating_func is {gating}; 1 (softmax) and 2 (sigmoid) "
            "are read"
        )
    method = "greedy" if groups == 1 else "group_limited_greedy"
    return tf.DeepseekV2Config(**given, topk_method=method)


_ARCHITECTURES: dict[str, Callable[[GgufFile], PreTrainedConfig]] = {
    "deepseek2": _deepseek2,
    "llama": _llama,
    "qwen2moe": _qwen2_moe,
    "qwen3moe": _qwen3_moe,
}

__all__ = ["gguf_config"]
