"""kt-kernel 0.7.2 (KTransformers' CPU experts): every backend that this CPU and shape allow.

Its `CPUInfer` spins one thread more than it is told to use, so it gets the cores minus one: with
all of them a layer takes many times as long.  The extension's classes are called as its own Python
wrappers do, without their files: it packs from dense tensors.  Q4_K goes through its llamafile
backend; the weights are quantized by ggml (ggml_peer.py), since kt-kernel reads them from a file.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ktgraph.bench.shapes import Shape
from ktgraph.bench.source import Batch, Source
from ktgraph.bench.subject import CannotRunError, Subject
from peers import ggml_library
from peers.aliased import AliasedStack

LONGEST = 2048  # tokens a layer is set up for
GROUP = 32
Q4_K = "q4_K"


@dataclass(frozen=True)
class Backend:
    """A class of the extension, and how its weights are handed over."""

    cls: str
    format: str
    bits: float  # of a weight, scales included
    give: Callable[[Any, Source, list[Any]], Any]  # fills a MOEConfig; keeps memory in the list


def subjects() -> list[Subject]:
    return [KtMoe(b) for b in BACKENDS]


def _extension() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import kt_kernel
    except ImportError as error:
        raise CannotRunError(
            f"kt-kernel is not installed ({error}); pip install --no-deps kt-kernel==0.7.2"
        ) from None
    return kt_kernel.kt_kernel_ext


class KtMoe:
    """One backend as a subject."""

    def __init__(self, backend: Backend) -> None:
        self.name = f"kt-kernel {backend.cls.removesuffix('_MOE')}"
        self.format = backend.format
        self._backend = backend

    def nbytes(self, shape: Shape) -> int:
        if not hasattr(_extension().moe, self._backend.cls):
            raise CannotRunError(f"this build of kt-kernel has no {self._backend.cls}")
        if self.format == Q4_K and shape.width % 256:
            raise CannotRunError(f"its Q4_K takes multiples of 256, not a width of {shape.width}")
        return int(shape.experts * shape.weights_of_expert * self._backend.bits / 8)

    def build(self, shape: Shape, source: Source, layers: int, threads: int) -> KtStack:
        return KtStack(_extension(), self._backend, source, layers, max(1, threads - 1))


class KtStack:
    """Layers packed by kt-kernel, each into memory of its own."""

    expert = None  # its packed bytes cannot be read back

    def __init__(
        self, extension: Any, backend: Backend, source: Source, layers: int, threads: int
    ) -> None:
        shape = source.shape
        self.top_k = shape.top_k
        self.bytes_of_expert = int(shape.weights_of_expert * backend.bits / 8)
        if backend.format.endswith(":row"):
            self.bytes_of_expert += 4 * (2 * shape.width + shape.hidden)
        self._affinity = os.sched_getaffinity(0)
        with ggml_library.silent_output():
            self.cpu: Any = _cpu_infer(extension, threads)
        self._keep: list[Any] = []
        self.layers: list[Any] = []
        given: list[Any] = []
        for layer in range(layers):
            self.layers.append(self._layer(extension, backend, source, layer, given))
        for memory in given:
            if isinstance(memory, AliasedStack):
                memory.close()
        os.sched_setaffinity(0, self._affinity)

    def _layer(
        self, extension: Any, backend: Backend, source: Source, layer: int, given: list[Any]
    ) -> Any:
        shape = source.shape
        on_gpu = torch.zeros(shape.experts, dtype=torch.bool)
        order = torch.arange(shape.experts)  # physical to logical
        self._keep += [on_gpu, order]
        config = extension.moe.MOEConfig(
            shape.experts, shape.top_k, shape.hidden, shape.width, on_gpu.data_ptr()
        )
        config.layer_idx, config.pool, config.max_len = layer, self.cpu.backend_, LONGEST
        config.save = config.load = False
        with ggml_library.silent_output():
            self._keep.append(backend.give(config, source, given))
            made = getattr(extension.moe, backend.cls)(config)
            self.cpu.submit(made.load_weights_task(order.data_ptr()))
            self.cpu.sync()
        return made

    def prepare(self, batch: Batch) -> KtRunner:
        return KtRunner(self, batch)

    def close(self) -> None:
        with ggml_library.silent_output():
            self.layers, self._keep, self.cpu = [], [], None
        os.sched_setaffinity(0, self._affinity)


def _cpu_infer(extension: Any, threads: int) -> Any:
    config = extension.WorkerPoolConfig()
    config.subpool_count = 1
    config.subpool_numa_map = [0]
    config.subpool_thread_count = [threads]
    return extension.CPUInfer(config)


class KtRunner:
    """Submits a layer and waits for it, one after the other."""

    def __init__(self, stack: KtStack, batch: Batch) -> None:
        self._stack, self._batch = stack, batch
        self._count = torch.tensor([batch.tokens], dtype=torch.int32)
        self._ids = [ids.long() for ids in batch.ids]
        self._y = torch.full_like(batch.x, float("nan"))

    def load_ids(self) -> None:
        for ours, ids in zip(self._ids, self._batch.ids, strict=True):
            ours.copy_(ids)

    def run(self, layers: Sequence[int]) -> None:
        batch, cpu = self._batch, self._stack.cpu
        x, weights, y = batch.x.data_ptr(), batch.weights.data_ptr(), self._y.data_ptr()
        count = self._count.data_ptr()
        for layer in layers:
            ids = self._ids[layer].data_ptr()
            task = self._stack.layers[layer].forward_task(
                count, self._stack.top_k, ids, weights, x, y, False
            )
            cpu.submit(task)
            cpu.sync()

    def output(self) -> Tensor:
        return self._y


# ---- how each backend takes its weights


def _give_dense(config: Any, source: Source, given: list[Any]) -> None:
    """One dense bf16 stack [E, N, K] for each of gate, up and down; it quantizes rows itself."""
    if not given:
        experts = source.shape.experts
        given += [AliasedStack(t, experts) for t in (source.gate, source.up, source.down)]
    config.gate_proj, config.up_proj, config.down_proj = (stack.data for stack in given)


def _give_pointers(config: Any, source: Source, given: list[Any]) -> None:
    """A pointer to bf16 [N, K] for each expert."""
    given[:] = [source.gate, source.up, source.down]
    places = [_pointers(t, source) for t in given]
    config.gate_projs, config.up_projs, config.down_projs = places
    none = [[0] * source.shape.experts]
    config.gate_scales, config.up_scales, config.down_scales = none, none, none


def _give_groups(config: Any, source: Source, given: list[Any]) -> None:
    """int4 groups as compressed-tensors stores them: i32 [N, K / 8], bf16 scales [N, K / group]."""
    if not given:
        for stack in (source.gate, source.up, source.down):
            packed = [_compress(w) for w in stack]
            given += [torch.stack([q for q, _ in packed]), torch.stack([s for _, s in packed])]
    values, scales = given[0::2], given[1::2]
    config.gate_projs, config.up_projs, config.down_projs = (_pointers(t, source) for t in values)
    config.gate_scales, config.up_scales, config.down_scales = (
        _pointers(t, source) for t in scales
    )
    config.quant_config.bits = 4
    config.quant_config.group_size = GROUP
    config.quant_config.zero_point = False


def _give_gguf(config: Any, source: Source, given: list[Any]) -> list[Tensor]:
    """Q4_K stacks as in a GGUF file: kt-kernel reads them in place, so each layer has its own."""
    if not given:
        library = ggml_library.load()
        for stack in (source.gate, source.up, source.down):
            given.append(library.quantize(Q4_K, stack))
    own = [few[torch.arange(source.shape.experts) % source.count] for few in given]
    config.gate_proj, config.up_proj, config.down_proj = (t.data_ptr() for t in own)
    config.gate_type = config.up_type = config.down_type = ggml_library.TYPES[Q4_K].number
    config.hidden_type = ggml_library.TYPES["bf16"].number
    config.m_block, config.group_min_len, config.group_max_len = 32, 10, LONGEST
    return own


def _pointers(stack: Tensor, source: Source) -> list[list[int]]:
    """[[address of expert e]]: one NUMA node."""
    places = [t.data_ptr() for t in stack]
    return [[places[e % source.count] for e in range(source.shape.experts)]]


def _compress(w: Tensor) -> tuple[Tensor, Tensor]:
    rows, cols = w.shape
    groups = w.float().reshape(rows, cols // GROUP, GROUP)
    scale = (groups.abs().amax(2) / 7.5).bfloat16()
    q = (groups / scale.float()[..., None]).round().clamp(-8, 7).long() + 8
    nibbles = q.reshape(rows, cols // 8, 8) << torch.arange(0, 32, 4)
    return nibbles.sum(2).to(torch.int32), scale


BACKENDS = (
    Backend("AMXBF16_MOE", "bf16", 16, _give_pointers),
    Backend("AMXInt8_MOE", "int8:row", 8, _give_dense),
    Backend("AMXInt4_MOE", "int4:row", 4, _give_dense),
    Backend("AMXInt4_KGroup_MOE", f"int4:{GROUP}", 4.5, _give_groups),
    Backend("MOE", Q4_K, 4.5, _give_gguf),
)
