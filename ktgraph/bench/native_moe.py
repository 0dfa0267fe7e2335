"""ktgraph's own kernel, `cpu.grouped_mlp`, as a subject of the bench."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ktgraph.bench.shapes import Shape, WeightFormat
from ktgraph.bench.source import Batch, Source
from ktgraph.bench.subject import CannotRunError
from ktgraph.cpu_kernels import load_native
from ktgraph.target import host_target
from ktgraph.target.many_rows import format_key


@dataclass(frozen=True)
class _Spec:
    """A stack of matrices [rows, cols] in a format."""

    format: WeightFormat
    rows: int
    cols: int
    count: int
    gate_up: bool

    def nbytes(self) -> int:
        f = self.format
        native = load_native()
        try:
            return native.packed_nbytes(
                f.name, self.rows, self.cols, f.group, self.count, self.gate_up
            )
        except ValueError as error:
            raise CannotRunError(f"format {f}: {error}") from None


def _specs(shape: Shape, fmt: WeightFormat) -> tuple[_Spec, _Spec]:
    up = _Spec(fmt, 2 * shape.width, shape.hidden, shape.experts, True)
    return up, _Spec(fmt, shape.hidden, shape.width, shape.experts, False)


class NativeMoe:
    """`cpu.grouped_mlp` with weights in one format."""

    def __init__(self, fmt: WeightFormat, isa: str = "") -> None:
        self.name = f"ktgraph {isa}".strip()  # a forced ISA is another subject
        self.format = str(fmt)
        self._format = fmt
        self._isa = isa

    def nbytes(self, shape: Shape) -> int:
        return sum(s.nbytes() for s in _specs(shape, self._format))

    def build(self, shape: Shape, source: Source, layers: int, threads: int) -> NativeStack:
        engine = load_native().Engine(threads, None, self._isa)
        return NativeStack(_specs(shape, self._format), source, layers, engine)


class NativeStack:
    """Layers of packed weights: the first is packed, the rest are copies."""

    def __init__(
        self, specs: tuple[_Spec, _Spec], source: Source, layers: int, engine: Any
    ) -> None:
        self.engine = engine
        self._specs = specs
        self._many_rows = _many_rows(engine.isa, specs[0].format)
        first = [_pack(specs[0], source), _pack(specs[1], source)]
        self._data = [first] + [[_copy(d, s) for d, s in zip(first, specs, strict=True)]
                                for _ in range(layers - 1)]  # fmt: skip
        self.bytes_of_expert = sum(s.nbytes() // s.count for s in specs)
        self.shape = source.shape

    def weights(self, layer: int) -> list[Any]:
        """The two native weights of a layer."""
        native = load_native()
        return [
            native.Weight(s.format.name, s.rows, s.cols, s.count, s.format.group, s.gate_up,
                          d.ctypes.data, d.size, _rows(s.format), self._many_rows)
            for s, d in zip(self._specs, self._data[layer], strict=True)
        ]  # fmt: skip

    def expert(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """What the packed bytes of layer 0 mean."""
        native, tensor_of = load_native(), cast("Any", torch).from_numpy
        dense = [
            tensor_of(native.unpack(d.ctypes.data, index, s.format.name, s.rows, s.cols,
                                           s.format.group, s.count, s.gate_up))
            for s, d in zip(self._specs, self._data[0], strict=True)
        ]  # fmt: skip
        half = self.shape.width
        return dense[0][:half], dense[0][half:], dense[1]

    def prepare(self, batch: Batch) -> NativeRunner:
        return NativeRunner(self, batch)

    def close(self) -> None:
        self._data = []


class NativeRunner:
    """Plans: one for all layers in one go, and one for each layer."""

    def __init__(self, stack: NativeStack, batch: Batch) -> None:
        native = load_native()
        self._y = torch.full_like(batch.x, float("nan"))  # what is not written shows
        everything = native.Plan(stack.engine, batch.tokens)
        single = [native.Plan(stack.engine, batch.tokens) for _ in batch.ids]
        x, weights, y = (_view(t) for t in (batch.x, batch.weights, self._y))
        for layer, ids in enumerate(batch.ids):
            w13, w2 = stack.weights(layer)
            operands = [x, _view(ids), weights, w13, w2, None, None, y]
            everything.add("cpu.grouped_mlp", operands, {"act": "silu"})
            single[layer].add("cpu.grouped_mlp", operands, {"act": "silu"})
        self._everything, self._single = everything, single
        self._batch = batch

    def load_ids(self) -> None:
        """The plans read the batch's own ids."""

    def run(self, layers: Sequence[int]) -> None:
        plan = self._single[layers[0]] if len(layers) == 1 else self._everything
        plan.run(self._batch.tokens)

    def output(self) -> Tensor:
        return self._y


def _many_rows(level: str, fmt: WeightFormat) -> int:
    """The measured row count that a compiled model would have too; 0: the level's constant."""
    return host_target().cpu.many_rows_at(level).get(format_key(fmt.name, fmt.group), 0)


def _rows(format: WeightFormat) -> str:
    """What rows of x are rounded to, as whole models have it: docs/layouts.md, Activations."""
    return {"f32": "f32", "bf16": "bf16", "f16": "f32"}.get(format.name, "int8")


_DTYPES = {torch.bfloat16: "bf16", torch.float32: "f32", torch.int32: "i32"}


def _view(t: Tensor) -> Any:
    return load_native().Tensor(t.data_ptr(), _DTYPES[t.dtype], [-1, t.shape[1]])


def _pack(spec: _Spec, source: Source) -> Any:
    """Packs the different experts side by side, then copies them through the stack."""
    native = load_native()
    data = native.empty_packed(spec.nbytes())

    def pack(index: int) -> None:
        dense = source.down[index]
        if spec.gate_up:
            dense = torch.cat([source.gate[index], source.up[index]])
        f = spec.format
        native.pack_into(data.ctypes.data, index, f.name, spec.rows, spec.cols, f.group, spec.count,
                         spec.gate_up, dense)  # fmt: skip

    with ThreadPoolExecutor(source.count) as pool:
        list(pool.map(pack, range(source.count)))
    _fill(data.reshape(spec.count, -1), source.count)
    return data


def _copy(first: Any, spec: _Spec) -> Any:
    data = load_native().empty_packed(first.size)
    whole, rows = first.reshape(spec.count, -1), data.reshape(spec.count, -1)

    def copy(index: int) -> None:
        rows[index] = whole[index]

    with ThreadPoolExecutor(_copiers()) as pool:
        list(pool.map(copy, range(spec.count)))
    return data


def _fill(rows: Any, sources: int) -> None:
    def copy(index: int) -> None:
        rows[index] = rows[index % sources]

    with ThreadPoolExecutor(_copiers()) as pool:
        list(pool.map(copy, range(sources, len(rows))))


def _copiers() -> int:
    return len(load_native().default_cpus())
