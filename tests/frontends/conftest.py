"""Tiny random models of each family, and running a traced module beside the model itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers as tf

from ktgraph.frontends.hf import HfTrace, trace_hf_full
from ktgraph.ir.graph import Module
from ktgraph.ir.interp import Interpreter
from ktgraph.ir.types import StateType
from ktgraph.runtime.batch import Batch
from ktgraph.weights.evaluate import WeightEvaluator
from ktgraph.weights.sources import ModelSource, WeightSource

PAGE = 4
COMMON: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
MOE: dict[str, Any] = {
    "intermediate_size": 80, "moe_intermediate_size": 24, "num_experts_per_tok": 3,
}  # fmt: skip
MLA: dict[str, Any] = {
    **COMMON, **MOE, "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1,
    "kv_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10,
    "num_key_value_heads": 4,
}  # fmt: skip
YARN: dict[str, Any] = {
    "rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 64, "rope_theta": 10000.0,
}  # fmt: skip


def _gqa(cls: type, experts: str, **more: Any) -> Any:
    return cls(**{**COMMON, **MOE, experts: 8, "num_key_value_heads": 2, **more})


CONFIGS: dict[str, Callable[[], Any]] = {
    "deepseek_v2": lambda: tf.DeepseekV2Config(
        **MLA, q_lora_rank=None, topk_method="greedy", rope_parameters=YARN
    ),
    "deepseek_v2_grouped": lambda: tf.DeepseekV2Config(
        **MLA,
        q_lora_rank=28,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
    ),
    "qwen3_moe": lambda: _gqa(tf.Qwen3MoeConfig, "num_experts", head_dim=12, norm_topk_prob=True),
    "deepseek_v3": lambda: tf.DeepseekV3Config(
        **{**MLA, "num_hidden_layers": 4, "first_k_dense_replace": 2},
        q_lora_rank=28,
        n_group=4,
        topk_group=2,
    ),
    "qwen2_moe": lambda: _gqa(tf.Qwen2MoeConfig, "num_experts", shared_expert_intermediate_size=40),
    "mixtral": lambda: _gqa(tf.MixtralConfig, "num_local_experts", sliding_window=None),
    "olmoe": lambda: _gqa(tf.OlmoeConfig, "num_experts"),
    "glm4_moe": lambda: _gqa(
        tf.Glm4MoeConfig,
        "n_routed_experts",
        head_dim=16,
        first_k_dense_replace=1,
        use_qk_norm=True,
        attention_bias=True,
    ),
    "gpt_oss": lambda: _gqa(
        tf.GptOssConfig, "num_local_experts", head_dim=16, sliding_window=5, num_hidden_layers=4
    ),
    "llama": lambda: tf.LlamaConfig(
        **COMMON, intermediate_size=80, num_key_value_heads=2, tie_word_embeddings=True
    ),
}


@functools.cache
def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A random model with weights large enough that every part matters to the logits."""
    torch.manual_seed(7)
    model = tf.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=dtype).eval()
    with torch.no_grad():
        for p in model.parameters():
            wide = p.dim() > 1
            p.copy_(torch.randn(p.shape) * (p.shape[-1] ** -0.5 if wide else 0.2) + (not wide))
    return model


@functools.cache
def trace(name: str, dtype: torch.dtype = torch.float32) -> HfTrace:
    """The module of `build(name, dtype)` without witnesses; not to be changed."""
    return trace_hf_full(build(name, dtype), witnesses=False)


def nmse(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.double(), want.double()
    return float((got - want).square().sum() / want.square().sum())


def run_module(
    module: Module,
    source: WeightSource,
    ids: torch.Tensor,
    chunks: Sequence[int],
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Logits of `ids` [b, s], fed in chunks, through the reference interpreter."""
    rows = ids.shape[0]
    interp = Interpreter(module, WeightEvaluator(module, source), dtype)
    pages = -(-ids.shape[1] // PAGE)
    tables = [[q * pages + p for p in reversed(range(pages))] for q in range(rows)]
    state_type = module.functions["main"].args[2].type
    assert isinstance(state_type, StateType)
    state, out, past = interp.new_state(state_type, rows * pages * PAGE), [], 0
    for new in chunks:
        batch = Batch.build([past] * rows, [new] * rows, tables, PAGE)
        inputs = [ids[:, past : past + new], batch, state]
        logits, state = interp.run("main", inputs, {"t": past + new})
        out.append(logits)
        past += new
    return torch.cat(out, 1)


def eager(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


class Kit:
    """The helpers above, for tests."""

    build = staticmethod(build)
    trace = staticmethod(trace)
    config = staticmethod(lambda name: CONFIGS[name]())
    nmse = staticmethod(nmse)
    run = staticmethod(run_module)
    eager = staticmethod(eager)
    source = staticmethod(ModelSource)


@pytest.fixture(scope="session")
def kit() -> type[Kit]:
    return Kit
