"""Counting which experts the routers of a plan choose, where their ids are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch

from ktgraph.placement.popularity import Popularity, router_name
from ktgraph.runtime.flat import FlatOp
from ktgraph.runtime.operands import Instruction
from ktgraph.runtime.plan import PhasePlan, Plan

_ROUTE = "moe.route"


def is_route(phase: PhasePlan, item: Instruction) -> bool:
    """Whether an instruction makes the ids of chosen experts."""
    return phase.step(item).op.name == _ROUTE


class RouterCounts:
    """i64[experts] for every router of a plan, on the device where ids are made.

    Only steps of the device write them: what was counted before is taken off on the host.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.plan = plan
        self.counts: dict[str, torch.Tensor] = {}
        self._top_k = 1
        most = 0
        for phase in plan.phases:
            for step in (s for s in phase.flat.ops if s.op.name == _ROUTE):
                experts = plan.module.weight_of(step.op.weight(1)).type.dims[0]
                made = torch.zeros(experts.at(plan.module.dims), dtype=torch.int64)
                self.counts.setdefault(self._name(step), made.to(device))
                self._top_k = self._choices(step)
                most = max(most, phase.arena.sizes.tokens * self._top_k)
        self._ones = torch.ones(most, dtype=torch.int64).to(device)
        self._before = {name: [0] * len(c) for name, c in self.counts.items()}

    def _name(self, step: FlatOp) -> str:
        return router_name(self.plan.module, step.op, step.bindings)

    @staticmethod
    def _choices(step: FlatOp) -> int:
        return step.op.results[0].tensor.dims[-1].at(step.bindings)

    def adder(self, step: FlatOp, ids: torch.Tensor) -> Callable[[], object]:
        """A call that counts what then lies in i32[T, K] `ids`; only launches, on a GPU."""
        into, ones = self.counts[self._name(step)], self._ones[: ids.numel()]

        def add() -> None:
            into.scatter_add_(0, ids.reshape(-1).long(), ones)

        return add

    def clear(self) -> None:
        """Begin anew, between two calls."""
        self._before = self._now()

    def _now(self) -> dict[str, list[int]]:
        return {
            name: cast("list[int]", c.cpu().tolist())  # pyright: ignore[reportUnknownMemberType]
            for name, c in self.counts.items()
        }

    def popularity(self, model: str) -> Popularity:
        """What was counted since it was made, or cleared."""
        found = {
            name: [a - b for a, b in zip(now, self._before[name], strict=True)]
            for name, now in self._now().items()
        }
        tokens = max((sum(c) for c in found.values()), default=0) // self._top_k
        return Popularity(model, tokens, found)


__all__ = ["RouterCounts", "is_route"]
