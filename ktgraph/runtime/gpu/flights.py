"""Steps under way: each chooses tokens on the GPU, and the host reads those when it likes.

Two may be under way at once.  The second runs on the tokens that the first chose, which the GPU
has, so that it can be started before the host knows them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ktgraph.runtime.gpu.device import GpuDevice
from ktgraph.runtime.gpu.inputs import BLOCKS


@dataclass(eq=False)
class Flight:
    """A started step; `tokens` and `seconds` are known once it has landed.

    taken, rows: tokens that it takes, and that it chooses.  where: host memory for the latter.
    begin, end: marks of the device.  lost: a failure came first, there will be no tokens.
    """

    phase: str
    taken: int
    rows: int
    where: torch.Tensor
    begin: Any
    end: Any = None
    tokens: list[int] | None = None
    seconds: float = 0.0
    lost: bool = False


class Flights:
    """The steps under way, oldest first, and host memory for their tokens, used in turn."""

    def __init__(self, device: GpuDevice, most_rows: int) -> None:
        self.device = device
        self.under_way: list[Flight] = []
        self._where = [device.host(4 * most_rows).view(torch.int32) for _ in range(BLOCKS)]
        self._turn = 0

    def begin(self, phase: str, taken: int, rows: int) -> Flight:
        """A flight whose step is started now; at most one other is under way."""
        self._turn = (self._turn + 1) % BLOCKS
        where = self._where[self._turn][:rows]
        flight = Flight(phase, taken, rows, where, self.device.mark())
        self.under_way.append(flight)
        return flight

    def landed(self, flight: Flight) -> None:
        """The GPU has passed the flight's end."""
        flight.seconds = self.device.seconds(flight.begin, flight.end)
        flight.tokens = flight.where.tolist()  # pyright: ignore[reportUnknownMemberType]
        self.under_way.remove(flight)  # last: until then an interrupt counts it among the lost

    def lose_all(self) -> None:
        """After a failure: nothing that was started gives tokens any more."""
        for flight in self.under_way:
            flight.lost = True
        self.under_way.clear()


__all__ = ["Flight", "Flights"]
