"""GPU kernels alone against their floors: one file per kernel, each with `cases()`.

    python -m bench.gpu_kernels [NAME ...]     on a machine with a CUDA device

A case is checked first and timed only when it is right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Case:
    """One measured call.

    kernel: its name; label: the shape in words.
    run(i): launches the kernel once on input set i % sets; `sets` input sets together exceed L2.
    error(): NMSE against an f32 or f64 reference on fresh inputs; must not exceed `bound`.
    nbytes: bytes the call must move at least; flops: operations it must do; 0 where not counted.
    peers: torch's own ops on the same inputs, by name.
    wanted: share of the binding limit that the issue asks for; 0: none stated.
    """

    kernel: str
    label: str
    run: Callable[[int], object]
    error: Callable[[], float]
    bound: float
    nbytes: float
    flops: float = 0.0
    sets: int = 1
    peers: dict[str, Callable[[int], object]] = field(default_factory=dict)
    wanted: float = 0.0


__all__ = ["Case"]
