"""`WeightStore`: loaded weights that the plans of one module share."""

from __future__ import annotations

import torch
from torch import Tensor

from ktgraph.runtime.packed import LoadedWeights, load_weights
from ktgraph.runtime.plan import Plan
from ktgraph.weights.evaluate import WeightEvaluator
from ktgraph.weights.sources import WeightSource


class WeightStore:
    """Each form of a weight is made once."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, str], Tensor] = {}

    def load(
        self, plan: Plan, source: WeightSource, threads: int, gpu: torch.device
    ) -> LoadedWeights:
        """What the plan reads; what no earlier plan read is loaded now."""
        uses = plan.loaded()
        keys = {u.key: (u.key, str(u.type)) for u in uses}
        new = [u for u in uses if keys[u.key] not in self._held]
        evaluator = WeightEvaluator(plan.module, source, cache_nbytes=0)
        made = load_weights(new, evaluator, threads, gpu=gpu)
        self._held |= {keys[key]: tensor for key, tensor in made.tensors.items()}
        return LoadedWeights({key: self._held[pair] for key, pair in keys.items()})


__all__ = ["WeightStore"]
