"""torch: bf16 by a loop over experts and by `_grouped_mm`; int8 and int4 by its packed matmuls.

A loop sorts the pairs (token, k) by expert and multiplies expert by expert, as transformers does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ktgraph.bench.shapes import Shape
from ktgraph.bench.source import Batch, Source
from ktgraph.bench.subject import CannotRunError, Subject

GROUP = 64


@dataclass(frozen=True)
class Packing:
    """How one kind of weights is made and multiplied."""

    name: str
    format: str
    bits: float  # of a weight, scales included
    pack: Callable[[Tensor], tuple[Tensor, ...]]  # bf16[N, K] -> tensors of one expert
    multiply: Callable[[Tensor, Sequence[Tensor]], Tensor]  # (bf16[M, K], tensors) -> bf16[M, N]
    dense: Callable[[Tensor], Tensor]  # bf16[N, K] -> f32[N, K], what the packed weights mean
    needs: Callable[[], Any]  # fails where torch lacks it
    grouped: bool = False


def subjects() -> list[Subject]:
    return [TorchMoe(p) for p in PACKINGS]


class TorchMoe:
    """One packing as a subject."""

    def __init__(self, packing: Packing) -> None:
        self.name, self.format = packing.name, packing.format
        self._packing = packing

    def nbytes(self, shape: Shape) -> int:
        try:
            self._packing.needs()
        except (AttributeError, RuntimeError, NotImplementedError) as error:
            reason = str(error).splitlines()[0]
            raise CannotRunError(
                f"torch {torch.__version__} lacks it on this CPU ({reason})"
            ) from None
        return int(shape.experts * shape.weights_of_expert * self._packing.bits / 8)

    def build(self, shape: Shape, source: Source, layers: int, threads: int) -> TorchStack:
        return TorchStack(self._packing, source, layers)


class TorchStack:
    """Tensors [E, ...] of each layer: first those of w13, then those of w2."""

    def __init__(self, packing: Packing, source: Source, layers: int) -> None:
        self.packing, self.shape, self._source = packing, source.shape, source
        n = range(source.count)
        w13 = [packing.pack(torch.cat([source.gate[i], source.up[i]])) for i in n]
        w2 = [packing.pack(source.down[i].contiguous()) for i in n]
        which = torch.arange(source.shape.experts) % source.count
        self.layers = [(_stack(w13, which), _stack(w2, which)) for _ in range(layers)]
        one = [*self.layers[0][0], *self.layers[0][1]]
        self.bytes_of_expert = sum(t.nbytes for t in one) // source.shape.experts

    def expert(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        s, n, dense = self._source, index % self._source.count, self.packing.dense
        return dense(s.gate[n]), dense(s.up[n]), dense(s.down[n])

    def prepare(self, batch: Batch) -> TorchRunner:
        return TorchRunner(self, batch)

    def close(self) -> None:
        self.layers = []


def _stack(parts: list[tuple[Tensor, ...]], which: Tensor) -> list[Tensor]:
    """Physical copies [E, ...] of the tensors of the different experts."""
    return [torch.stack(list(ts))[which] for ts in zip(*parts, strict=True)]


class TorchRunner:
    """Sort by expert, gate and up, silu, down, weighted sum."""

    def __init__(self, stack: TorchStack, batch: Batch) -> None:
        self._stack, self._batch = stack, batch
        self._y = torch.full_like(batch.x, float("nan"))

    def load_ids(self) -> None:
        """The batch's ids are read as they are."""

    @torch.inference_mode()
    def run(self, layers: Sequence[int]) -> None:
        for layer in layers:
            self._y = self._layer(layer)

    def output(self) -> Tensor:
        return self._y

    def _layer(self, layer: int) -> Tensor:
        batch, stack = self._batch, self._stack
        w13, w2 = stack.layers[layer]
        pair_experts, order = batch.ids[layer].flatten().sort(stable=True)
        token = order // stack.shape.top_k
        counts = torch.bincount(pair_experts, minlength=stack.shape.experts)
        step = self._grouped if stack.packing.grouped else self._loop
        out = step(batch.x[token], counts, w13, w2)
        scaled = out * batch.weights.flatten()[order, None]
        return torch.zeros_like(batch.x, dtype=torch.float32).index_add_(0, token, scaled)

    def _loop(self, x: Tensor, counts: Tensor, w13: list[Tensor], w2: list[Tensor]) -> Tensor:
        out, at, multiply = torch.empty_like(x), 0, self._stack.packing.multiply
        for expert, count in enumerate(counts.tolist()):
            if count == 0:
                continue
            rows = slice(at, at + count)
            inner = _gated(multiply(x[rows], [t[expert] for t in w13]))
            out[rows] = multiply(inner, [t[expert] for t in w2])
            at += count
        return out

    def _grouped(self, x: Tensor, counts: Tensor, w13: list[Tensor], w2: list[Tensor]) -> Tensor:
        ends = counts.cumsum(0).int()
        inner = _gated(torch._grouped_mm(x, w13[0].transpose(1, 2), ends))
        return torch._grouped_mm(inner, w2[0].transpose(1, 2), ends)


def _gated(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up


# ---- packings


def _dense_multiply(x: Tensor, weight: Sequence[Tensor]) -> Tensor:
    return torch.nn.functional.linear(x, weight[0])


def _pack_int8(w: Tensor) -> tuple[Tensor, ...]:
    wide = w.float()
    scale = (wide.abs().amax(1) / 127).bfloat16()
    return (wide / scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8), scale


def _multiply_int8(x: Tensor, weight: Sequence[Tensor]) -> Tensor:
    return torch._weight_int8pack_mm(x, weight[0], weight[1])


def _quantize_int4(w: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric groups: q i32[N, K / group, group] in -8..7, scales bf16[N, K / group]."""
    rows, cols = w.shape
    if cols % GROUP or rows % 16:
        raise CannotRunError(f"torch packs multiples of {GROUP} columns and 16 rows, not {w.shape}")
    groups = w.float().reshape(rows, cols // GROUP, GROUP)
    scale = (groups.abs().amax(2) / 7.5).bfloat16()
    return (groups / scale.float()[..., None]).round().clamp(-8, 7).int(), scale


def _pack_int4(w: Tensor) -> tuple[Tensor, ...]:
    """Values as q + 8, scales with a zero of 0 each."""
    q, scale = _quantize_int4(w)
    both = torch.stack([scale, torch.zeros_like(scale)], 2).transpose(0, 1).contiguous()
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu((q + 8).reshape(w.shape), 1)
    return packed, both


def _multiply_int4(x: Tensor, weight: Sequence[Tensor]) -> Tensor:
    return torch.ops.aten._weight_int4pack_mm_for_cpu(x, weight[0], GROUP, weight[1])


def _dense_int8(w: Tensor) -> Tensor:
    q, scale = _pack_int8(w)
    return q.float() * scale.float()[:, None]


def _dense_int4(w: Tensor) -> Tensor:
    q, scale = _quantize_int4(w)
    return (q * scale.float()[..., None]).reshape(w.shape)


PACKINGS = (
    Packing("torch loop", "bf16", 16, lambda w: (w,), _dense_multiply,
            Tensor.float, lambda: None),
    Packing("torch _grouped_mm", "bf16", 16, lambda w: (w,), _dense_multiply,
            Tensor.float, lambda: torch._grouped_mm, grouped=True),
    Packing("torch loop", "int8:row", 8, _pack_int8, _multiply_int8,
            _dense_int8, lambda: torch._weight_int8pack_mm),
    Packing("torch loop", f"int4:{GROUP}", 4.5, _pack_int4, _multiply_int4,
            _dense_int4, lambda: torch.ops.aten._weight_int4pack_mm_for_cpu),
)  # fmt: skip
