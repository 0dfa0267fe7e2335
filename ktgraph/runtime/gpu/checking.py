"""Devices that compare every kernel they run with its op's reference, on the operands it met.

`CheckingCuda` runs kernels on the GPU, `Interpreted` in Triton's interpreter on this CPU, where
TRITON_INTERPRET=1 was set before kernels were imported.  Nothing may be captured: each step waits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, cast

import torch

from ktgraph.ops.signature import TensorPattern
from ktgraph.runtime.cache import InPlaceState
from ktgraph.runtime.gpu.cuda import CudaDevice, packed_weight
from ktgraph.runtime.gpu.device import GpuDevice, KernelCall, Step
from ktgraph.runtime.gpu.simulated import SimulatedDevice, host_batch
from ktgraph.runtime.operands import WeightUse
from ktgraph.triton_kernels.batch import DeviceBatch
from ktgraph.triton_kernels.packed import PackedWeight
from ktgraph.weights.encodings import Tile, to_float

# a launch, and pairs of what came out and what the reference makes
Observe = Callable[[KernelCall, Sequence[tuple[Any, Any]]], None]


def checking_device(observe: Observe) -> GpuDevice | None:
    """A device for the kernels of a GPU; None where none of them can run."""
    if torch.cuda.is_available():
        return CheckingCuda(observe)
    if os.environ.get("TRITON_INTERPRET") == "1":
        return Interpreted(observe)
    return None


class CheckingCuda(CudaDevice):
    """A real GPU."""

    def __init__(self, observe: Observe) -> None:
        super().__init__()
        self.observe = observe

    def kernel(self, call: KernelCall) -> Step:
        return _checked(call, super().kernel(call), self.observe)


class Interpreted(SimulatedDevice):
    """The simulated GPU, whose kernels are Triton's in place of references."""

    def __init__(self, observe: Observe) -> None:
        super().__init__()
        self.observe = observe

    def weight(self, packed: torch.Tensor, use: WeightUse) -> PackedWeight:
        return packed_weight(packed, use)

    def kernel(self, call: KernelCall) -> Step:
        launch = call.kernel.into
        assert launch is not None
        return _checked(
            call, lambda: launch(*call.operands, out=call.out, **call.attrs), self.observe
        )


def _checked(call: KernelCall, launch: Step, observe: Observe) -> Step:
    patterns = [p.pattern for p in call.definition.signature.params]
    variadic = len(call.operands) - len(patterns)
    ranks = [len(p.dims) if isinstance(p, TensorPattern) else 0 for p in patterns]
    ranks += [0] * max(variadic, 0)

    def step() -> None:
        given = [_on_host(o, r) for o, r in zip(call.operands, ranks, strict=False)]
        launch()
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        found = call.definition.reference(*given, **call.attrs)
        results = cast("tuple[Any, ...]", found if isinstance(found, tuple) else (found,))
        made = zip(call.out, results, strict=True)
        pairs = [(got.cpu(), want) for got, want in made if got is not None]
        for before, now in zip(given, call.operands, strict=False):
            if isinstance(now, InPlaceState):  # both wrote to theirs
                pairs += [(g.cpu(), w) for g, w in zip(now.parts, before.parts, strict=True)]
        observe(call, pairs)

    return step


def _on_host(given: Any, rank: int) -> Any:
    """A copy of an operand as references take it, in host memory."""
    if isinstance(given, torch.Tensor):
        return given.cpu().clone()
    if isinstance(given, InPlaceState):
        return replace(given, parts=tuple(p.cpu().clone() for p in given.parts))
    if isinstance(given, PackedWeight):
        return _values(given, rank)
    if isinstance(given, DeviceBatch):
        held = {f.name: getattr(given, f.name) for f in fields(given)}
        return host_batch(
            DeviceBatch(**{n: v.cpu() if hasattr(v, "cpu") else v for n, v in held.items()})
        )
    return given


def _values(weight: PackedWeight, rank: int) -> torch.Tensor:
    shape = [weight.count, weight.rows, weight.cols]
    encoding = Tile(weight.format, weight.group, weight.gate_up).encoding
    return to_float((weight.data.cpu(),), shape[-rank:], encoding)


__all__ = ["CheckingCuda", "Interpreted", "checking_device"]
