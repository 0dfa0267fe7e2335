"""ggml's CPU backend (llama.cpp): the graph that llama.cpp builds for routed experts.

mul_mat_id for gate and up, swiglu, mul_mat_id for down, scaling, and a sum over the top-k.  Weights
go into ggml's repacked buffers where it offers them for the type, as llama.cpp does by itself.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ktgraph.bench.shapes import Shape
from ktgraph.bench.source import Batch, Source
from ktgraph.bench.subject import CannotRunError, Subject
from peers import ggml_library
from peers.ggml_library import TYPES, InitParams, ThreadpoolParams

FORMATS = ("bf16", "q8_0", "q4_0", "q4_K")
NODES = 64  # of a layer's graph, at most: 2 views and an add for each of top_k, and a dozen more


def subjects() -> list[Subject]:
    return [GgmlMoe(fmt) for fmt in FORMATS]


class GgmlMoe:
    """One GGUF type as a subject."""

    name = "ggml"

    def __init__(self, fmt: str) -> None:
        self.format = fmt

    def nbytes(self, shape: Shape) -> int:
        ggml_library.load()
        kind = TYPES[self.format]
        for columns in (shape.hidden, shape.width):
            if columns % kind.block:
                raise CannotRunError(
                    f"{self.format} takes rows of {kind.block} weights, not {columns}"
                )
        return kind.nbytes(shape.experts * shape.weights_of_expert)

    def build(self, shape: Shape, source: Source, layers: int, threads: int) -> GgmlStack:
        return GgmlStack(self.format, source, layers, threads)


class GgmlStack:
    """gate, up and down of every layer as 3-axis tensors in one buffer each layer."""

    expert = None  # gguf-py could read them back; parity is against float32

    def __init__(self, fmt: str, source: Source, layers: int, threads: int) -> None:
        self.library = ggml_library.load()
        self.shape, self._kind = source.shape, TYPES[fmt]
        self.bytes_of_expert = self._kind.nbytes(self.shape.weights_of_expert)
        self.backend: Any = self.library.backend_cpu_init()
        params = ThreadpoolParams()
        self.library.threadpool_params_init(ctypes.byref(params), threads)
        self._pool: Any = self.library.threadpool_new(ctypes.byref(params))
        self.library.backend_cpu_set_n_threads(self.backend, threads)
        self.library.backend_cpu_set_threadpool(self.backend, self._pool)
        self._contexts: list[Any] = []
        self._buffers: list[Any] = []
        place = self._repacked_type() or self.library.backend_cpu_buffer_type()
        self.layers = [self._tensors(place) for _ in range(layers)]
        self._load(fmt, source)

    def _tensors(self, place: Any) -> list[Any]:
        """gate, up, down of one layer in a buffer of the type `place`."""
        lib, s = self.library, self.shape
        context = lib.init(InitParams(8 * lib.tensor_overhead(), None, True))
        kind = self._kind.number
        found = [
            lib.new_tensor_3d(context, kind, columns, rows, s.experts)
            for rows, columns in ((s.width, s.hidden), (s.width, s.hidden), (s.hidden, s.width))
        ]
        buffer = lib.backend_alloc_ctx_tensors_from_buft(context, place)
        if not buffer:
            raise CannotRunError("ggml could not allocate a layer")
        self._contexts.append(context)
        self._buffers.append(buffer)
        return found

    def _load(self, fmt: str, source: Source) -> None:
        """The first layer through ggml, which repacks it; the others are copies of its bytes."""
        lib, which = self.library, torch.arange(self.shape.experts) % source.count
        for at, dense in enumerate((source.gate, source.up, source.down)):
            whole = lib.quantize(fmt, dense)[which]
            first = self.layers[0][at]
            lib.backend_tensor_set(first, whole.data_ptr(), 0, whole.numel())
            for layer in self.layers[1:]:
                ctypes.memmove(lib.get_data(layer[at]), lib.get_data(first), lib.nbytes(first))

    def _repacked_type(self) -> Any:
        """The buffer type of repacked weights, if the CPU backend multiplies experts from it."""
        lib = self.library
        device = lib.backend_get_device(self.backend)
        name = b"ggml_backend_dev_get_extra_bufts"
        address = lib.backend_reg_get_proc_address(lib.backend_dev_backend_reg(device), name)
        if not address:
            return None
        listed = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)(device)
        at = 0
        while listed and listed[at]:
            if self._takes(listed[at], device):
                return listed[at]
            at += 1
        return None

    def _takes(self, place: Any, device: Any) -> bool:
        """Whether mul_mat_id can run on weights that lie in `place`: tried on a small stack."""
        lib, kind = self.library, self._kind.number
        weights = lib.init(InitParams(8 * lib.tensor_overhead(), None, True))
        stack = lib.new_tensor_3d(weights, kind, 256, 256, 2)
        buffer = lib.backend_alloc_ctx_tensors_from_buft(weights, place)
        inputs = lib.init(InitParams(8 * lib.tensor_overhead(), None, True))
        x = lib.new_tensor_3d(inputs, TYPES["f32"].number, 256, 1, 1)
        ids = lib.new_tensor_2d(inputs, TYPES["i32"].number, 2, 1)
        taken = bool(buffer) and lib.backend_dev_supports_op(
            device, lib.mul_mat_id(inputs, stack, x, ids)
        )
        lib.free(inputs)
        if buffer:
            lib.backend_buffer_free(buffer)
        lib.free(weights)
        return taken

    def prepare(self, batch: Batch) -> GgmlRunner:
        return GgmlRunner(self, batch)

    def close(self) -> None:
        for buffer in self._buffers:
            self.library.backend_buffer_free(buffer)
        for context in self._contexts:
            self.library.free(context)
        self.library.backend_free(self.backend)
        self.library.threadpool_free(self._pool)
        self._buffers, self._contexts, self.layers = [], [], []


class GgmlRunner:
    """A graph of all layers, and one of each, built when first asked for."""

    def __init__(self, stack: GgmlStack, batch: Batch) -> None:
        self._stack, self._batch, self._lib = stack, batch, stack.library
        lib, tokens, s = self._lib, batch.tokens, stack.shape
        inputs = lib.init(InitParams((len(batch.ids) + 8) * lib.tensor_overhead(), None, True))
        f32, i32 = TYPES["f32"].number, TYPES["i32"].number
        self._x = lib.new_tensor_3d(inputs, f32, s.hidden, 1, tokens)
        self._weights = lib.new_tensor_3d(inputs, f32, 1, s.top_k, tokens)
        self._ids = [lib.new_tensor_2d(inputs, i32, s.top_k, tokens) for _ in batch.ids]
        place = lib.backend_cpu_buffer_type()
        self._buffer = lib.backend_alloc_ctx_tensors_from_buft(inputs, place)
        self._contexts: list[Any] = [inputs]
        self._allocators: dict[int, Any] = {}
        self._graphs: dict[tuple[int, ...], tuple[Any, Any]] = {}
        self._y: Any = None
        self._set(self._x, batch.x.float())
        self._set(self._weights, batch.weights)

    def __del__(self) -> None:
        for allocator in self._allocators.values():
            self._lib.gallocr_free(allocator)
        self._lib.backend_buffer_free(self._buffer)
        for context in self._contexts:
            self._lib.free(context)

    def _set(self, tensor: Any, values: Tensor) -> None:
        values = values.contiguous()
        self._lib.backend_tensor_set(tensor, values.data_ptr(), 0, values.nbytes)

    def load_ids(self) -> None:
        for tensor, ids in zip(self._ids, self._batch.ids, strict=True):
            self._set(tensor, ids)

    def run(self, layers: Sequence[int]) -> None:
        key = tuple(layers)
        if key not in self._graphs:
            self._graphs[key] = self._build(key)
        graph, self._y = self._graphs[key]
        if self._lib.backend_graph_compute(self._stack.backend, graph) != 0:
            raise CannotRunError("ggml failed to compute the graph")

    def output(self) -> Tensor:
        y = torch.empty(self._batch.tokens, self._stack.shape.hidden)
        ctypes.memmove(y.data_ptr(), self._lib.get_data(self._y), y.nbytes)
        return y

    def _build(self, layers: tuple[int, ...]) -> tuple[Any, Any]:
        """(graph, its last output). Graphs of as many layers share one buffer: one runs at once."""
        lib, nodes = self._lib, NODES * len(layers)
        size = nodes * lib.tensor_overhead() + lib.graph_overhead_custom(nodes, False)
        context = lib.init(InitParams(size, None, True))
        self._contexts.append(context)
        graph = lib.new_graph_custom(context, nodes, False)
        y = None
        for layer in layers:
            y = self._layer(context, layer)
            lib.set_output(y)
            lib.build_forward_expand(graph, y)
        if len(layers) not in self._allocators:
            self._allocators[len(layers)] = lib.gallocr_new(lib.backend_cpu_buffer_type())
        if not lib.gallocr_alloc_graph(self._allocators[len(layers)], graph):
            raise CannotRunError("ggml could not allocate the graph")
        return graph, y

    def _layer(self, context: Any, layer: int) -> Any:
        lib, s, tokens = self._lib, self._stack.shape, self._batch.tokens
        gate, up, down = self._stack.layers[layer]
        ids = self._ids[layer]
        inner = lib.swiglu_split(
            context,
            lib.mul_mat_id(context, gate, self._x, ids),
            lib.mul_mat_id(context, up, self._x, ids),
        )
        out = lib.mul(context, lib.mul_mat_id(context, down, inner, ids), self._weights)
        row = s.hidden * 4  # bytes
        parts = [
            lib.view_2d(context, out, s.hidden, tokens, row * s.top_k, k * row)
            for k in range(s.top_k)
        ]
        y = parts[0]
        for part in parts[1:]:
            y = lib.add(context, y, part)
        return y
