"""Learning residency: after so many tokens, the experts chosen most lately take over slots.

Counts halve at every look, so older choices fade.  An expert takes a slot only from one that was
chosen clearly less often, and few move at a time, of one layer a call: copies run behind the next
call.  The same calls in the same order move the same experts; results differ by round-off from
those of fixed ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ktgraph.runtime.gpu.executor import GpuExecutor
from ktgraph.runtime.router_counts import RouterCounts

MOST_MOVES = 4  # experts of a layer that move at one look
_CLEARLY = 1.25  # how many times as often a new expert must have been chosen
_AT_LEAST = 2  # and how many times more


class Adaptation:
    """Moves hot experts of an executor, which counts router choices from now on."""

    def __init__(self, executor: GpuExecutor, every: int) -> None:
        self.executor = executor
        self.every = every
        counts = executor.count_experts(True)
        assert counts is not None
        self.counts: RouterCounts = counts
        self._tokens = 0  # since the last look
        self._waiting: deque[tuple[int, list[int]]] = deque()  # layers and experts
        self._lately: dict[str, list[int]] = {}  # counts by router, older ones halved

    def after(self, tokens: int) -> None:
        """Note that a call of so many tokens has ended; look when it is time."""
        self._tokens += tokens
        if self._tokens >= self.every:
            self._tokens = 0
            self._look()
        if self._waiting:
            self.executor.set_residency(*self._waiting.popleft())

    def _look(self) -> None:
        self._waiting.clear()
        resident = self.executor.residency.resident()
        for router, new in self.counts.popularity("").counts.items():
            old = self._lately.get(router, [0] * len(new))
            self._lately[router] = [n + o // 2 for n, o in zip(new, old, strict=True)]
        self.counts.clear()
        for number, layer in self.executor.residency.layers.items():
            hot = resident[number]
            wanted = exchanged(hot, len(layer.experts), self._lately[layer.router])
            if wanted != hot:
                self._waiting.append((number, wanted))

    def end(self) -> None:
        """Count no longer; experts stay where they are."""
        self.executor.count_experts(False)


def exchanged(hot: Sequence[int], slots: int, counts: Sequence[int]) -> list[int]:
    """The hot experts after the best few exchanges, those that stay first.

    Free slots are filled with experts that were chosen at all.
    """
    kept = sorted(hot, key=lambda e: (-counts[e], e))
    cold = sorted((e for e in range(len(counts)) if e not in hot), key=lambda e: (-counts[e], e))
    for expert in cold[:MOST_MOVES]:
        if len(kept) < slots and counts[expert] > 0:
            kept.append(expert)
            continue
        least = min(kept, key=lambda e: (counts[e], -e), default=None)
        enough = 0 if least is None else max(counts[least] * _CLEARLY, counts[least] + _AT_LEAST)
        if least is None or counts[expert] <= enough:
            break
        kept[kept.index(least)] = expert
    stayed = [e for e in hot if e in kept]
    return [*stayed, *(e for e in kept if e not in stayed)]


__all__ = ["MOST_MOVES", "Adaptation", "exchanged"]
