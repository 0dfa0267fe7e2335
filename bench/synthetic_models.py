"""Models of real shapes without their weights: configurations, and weights made on the spot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from ktgraph.ir.graph import Module
from ktgraph.ops.tensor import torch_dtype
from ktgraph.runtime.native import dense_dtype
from ktgraph.runtime.operands import WeightUse
from ktgraph.runtime.packed import LoadedWeights
from ktgraph.weights.encodings import empty_packed, pack_matrix
from ktgraph.weights.evaluate import WeightEvaluator
from ktgraph.weights.sources import RandomSource

# Routers get normal weights of this size: scores differ from token to token and layer to layer, so
# that every expert is chosen now and then.
ROUTER = 0.5


def _deepseek(layers: int | None, **sizes: Any) -> Any:
    import transformers

    common = dict(
        vocab_size=102400, n_shared_experts=2, first_k_dense_replace=1, kv_lora_rank=512,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, norm_topk_prob=False,
        num_experts_per_tok=6, max_position_embeddings=8192,
    )  # fmt: skip
    return transformers.DeepseekV2Config(**{**common, **sizes})


def deepseek_v2_lite(layers: int | None) -> Any:
    return _deepseek(
        layers, hidden_size=2048, intermediate_size=10944, moe_intermediate_size=1408,
        num_hidden_layers=layers or 27, num_attention_heads=16, num_key_value_heads=16,
        n_routed_experts=64, q_lora_rank=None, topk_method="greedy", routed_scaling_factor=1.0,
    )  # fmt: skip


def deepseek_v2(layers: int | None) -> Any:
    return _deepseek(
        layers, hidden_size=5120, intermediate_size=12288, moe_intermediate_size=1536,
        num_hidden_layers=layers or 60, num_attention_heads=128, num_key_value_heads=128,
        n_routed_experts=160, q_lora_rank=1536, topk_method="group_limited_greedy", n_group=8,
        topk_group=3, routed_scaling_factor=16.0,
    )  # fmt: skip


def qwen3_30b_a3b(layers: int | None) -> Any:
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
        num_hidden_layers=layers or 48, num_attention_heads=32, num_key_value_heads=4,
        num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, max_position_embeddings=8192,
        tie_word_embeddings=False,
    )  # fmt: skip
    config.head_dim = 128
    return config


def qwen2_57b_a14b(layers: int | None) -> Any:
    import transformers

    return transformers.Qwen2MoeConfig(
        vocab_size=151936, hidden_size=3584, intermediate_size=18944, moe_intermediate_size=2560,
        shared_expert_intermediate_size=20480, num_hidden_layers=layers or 28,
        num_attention_heads=28, num_key_value_heads=4, num_experts=64, num_experts_per_tok=8,
        norm_topk_prob=False, max_position_embeddings=8192, tie_word_embeddings=False,
    )  # fmt: skip


MODELS: dict[str, Callable[[int | None], Any]] = {
    "deepseek-v2-lite": deepseek_v2_lite,
    "deepseek-v2": deepseek_v2,
    "qwen3-30b-a3b": qwen3_30b_a3b,
    "qwen2-57b-a14b": qwen2_57b_a14b,
}


class CopiedWeights:
    """One random matrix per (shape, encoding), copied to every place that wants one.

    Tables of hot experts are the module's own.
    """

    def __init__(self, module: Module, gpu: torch.device | None = None) -> None:
        self.gpu = gpu
        self._tables = WeightEvaluator(module, RandomSource(module))
        self._random = torch.Generator().manual_seed(0)
        self._packed: dict[tuple[tuple[int, ...], str], torch.Tensor] = {}

    def load(self, uses: Sequence[WeightUse]) -> LoadedWeights:
        return LoadedWeights({use.key: self._make(use) for use in uses})

    def _make(self, use: WeightUse) -> torch.Tensor:
        shape = tuple(d.const() for d in use.type.dims)
        if use.form == "tile":
            return self._tiles(use, shape)
        return self._dense(use, shape)

    def _tiles(self, use: WeightUse, shape: tuple[int, ...]) -> torch.Tensor:
        one, count = self._one(use, shape[-2:]), prod(shape[:-2])
        if use.device != "cpu":
            return one.to(self.gpu).repeat(count)
        whole = empty_packed(shape, use.tile.encoding)
        whole.reshape(count, -1)[:] = one
        return whole

    def _one(self, use: WeightUse, shape: tuple[int, ...]) -> torch.Tensor:
        key = (shape, str(use.tile.encoding))
        if key not in self._packed:
            values = torch.randn(shape, generator=self._random) * shape[-1] ** -0.5
            one = empty_packed(shape, use.tile.encoding)
            pack_matrix(one, 0, values, shape, use.tile.encoding)
            self._packed[key] = one
        return self._packed[key]

    def _dense(self, use: WeightUse, shape: tuple[int, ...]) -> torch.Tensor:
        dtype = torch_dtype(dense_dtype(use))
        place = self.gpu if use.device != "cpu" else torch.device("cpu")
        if dtype == torch.int32:
            return self._tables.tensor(use.ref, use.index).to(place)
        if len(shape) == 1:  # norms, biases, tables of frequencies
            return torch.full(shape, 0.5, dtype=dtype, device=place)
        scale = ROUTER if use.ref.name.endswith("gate") else shape[-1] ** -0.5
        if "embed" in use.ref.name:
            scale = 1.0  # tokens must differ in what routers see, not only in a small part of it
        made = torch.empty(shape, dtype=dtype, device=place)
        return made.normal_(std=scale)


__all__ = ["MODELS", "CopiedWeights"]
