"""Compiled models, made once a session, beside the transformers models they come from."""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import ktgraph as kt

MLA = {
    "vocab_size": 131,
    "hidden_size": 72,
    "intermediate_size": 88,
    "moe_intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 36,
    "q_lora_rank": None,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 12,
    "v_head_dim": 28,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
GQA = {
    "vocab_size": 131,
    "hidden_size": 72,
    "intermediate_size": 88,
    "moe_intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
GROUPED = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
CONFIGS: dict[str, Callable[[], Any]] = {
    "deepseek": lambda: transformers.DeepseekV2Config(**MLA),
    "deepseek-q-lora-grouped": lambda: transformers.DeepseekV2Config(
        **{**MLA, "q_lora_rank": 44, **GROUPED}
    ),
    "deepseek-v3-grouped": lambda: transformers.DeepseekV3Config(
        **{**MLA, "q_lora_rank": 44, "n_group": 4, "topk_group": 2, "n_shared_experts": 1}
    ),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(**GQA),
}
TRAINED = ("tiny-deepseek-v2", "tiny-qwen3-moe")
ELSEWHERE = ("tiny-deepseek-v3",)  # not in the repository: tested where its folder was put


@dataclass(frozen=True)
class Pair:
    """A transformers model in float32, and ktgraph's compilation of it."""

    name: str
    model: Any
    folder: Path | None
    traced: kt.Traced
    exe: kt.Compiled

    @property
    def vocabulary(self) -> int:
        return self.model.config.vocab_size

    def wanted(self, prompt: list[int]) -> Tensor:
        """Transformers' logits of every token, f32[s, VOC]."""
        with torch.inference_mode():
            return self.model(torch.tensor([prompt])).logits[0]

    def prompts(self, *lengths: int) -> list[list[int]]:
        rng = torch.Generator().manual_seed(sum(lengths))
        return [torch.randint(self.vocabulary, (n,), generator=rng).tolist() for n in lengths]


def load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def random_model(name: str) -> Any:
    torch.manual_seed(7)
    config = CONFIGS[name]()
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():  # norms that do nothing would hide a missing one
        if parameter.dim() == 1:
            parameter.data.uniform_(0.5, 1.5)
    return model


@functools.cache
def compiled_pair(name: str, folder: Path | None) -> Pair:
    model = random_model(name) if folder is None else load(folder)
    traced = kt.trace(model if folder is None else folder)
    return Pair(name, model, folder, traced, traced.lower("cpu").compile())


@pytest.fixture(params=[*CONFIGS, *TRAINED])
def pair(request: pytest.FixtureRequest, tiny_deepseek: Path, tiny_qwen: Path) -> Pair:
    folders = {"tiny-deepseek-v2": tiny_deepseek, "tiny-qwen3-moe": tiny_qwen}
    return compiled_pair(request.param, folders.get(request.param))


@pytest.fixture(params=[*TRAINED, *ELSEWHERE])
def trained(request: pytest.FixtureRequest, tiny_deepseek: Path, tiny_qwen: Path) -> Pair:
    folders = {"tiny-deepseek-v2": tiny_deepseek, "tiny-qwen3-moe": tiny_qwen}
    folder = folders.get(request.param, tiny_qwen.parent / request.param)
    assert folder is not None
    if not folder.is_dir():
        pytest.skip(f"{folder} is not here: a trained model that is not in the repository")
    return compiled_pair(request.param, folder)


@pytest.fixture
def reference(trained: Pair) -> dict[str, Any]:
    """What transformers gave for the trained model (its README says how)."""
    assert trained.folder is not None
    return json.loads((trained.folder / "reference.json").read_text())
