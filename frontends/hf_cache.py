"""A transformers cache whose `update` emits an op, so that the cache is a value in the graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ktgraph.frontends import leaf_ops as leaf_ops  # registers torch.ops.ktg


class TraceCache(Cache):
    """``state', k, v = kv_append(state, k, v)`` at every update; `state` is threaded through.

    `state` is ``[b, t]``: a token whose second axis is the total length, which makes ``t`` a size
    that torch.export knows.
    """

    def __init__(self, state: Tensor, new_tokens: int) -> None:
        self.layers = []
        self.state = state
        self.new_tokens = new_tokens

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.state, k, v = torch.ops.ktg.kv_append(
            self.state, key_states, value_states, int(layer_idx)
        )
        return k, v

    def get_seq_length(self, layer_idx: int = 0, *args: Any, **kwargs: Any) -> int:
        return self.state.shape[1] - self.new_tokens

    @property
    def is_sliding(self) -> list[bool]:
        return []
