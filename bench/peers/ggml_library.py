"""ggml by ctypes: from llama-cpp-python, or from the folder that KTG_GGML names.

Only what the peers need: quantizing rows, tensors, graphs and the CPU backend.  Calls take
addresses; sizes and structs follow ggml.h of llama.cpp as of late 2026.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from ctypes import c_bool, c_char, c_int, c_int64, c_size_t, c_uint32, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ktgraph.bench.subject import CannotRunError

FOLDER = "KTG_GGML"


@dataclass(frozen=True)
class GgmlType:
    """A ggml_type: `block` weights take `size` bytes."""

    number: int
    block: int
    size: int

    def nbytes(self, weights: int) -> int:
        return weights // self.block * self.size


TYPES = {
    "f32": GgmlType(0, 1, 4),
    "bf16": GgmlType(30, 1, 2),
    "q8_0": GgmlType(8, 32, 34),
    "q4_0": GgmlType(2, 32, 18),
    "q4_K": GgmlType(12, 256, 144),
    "i32": GgmlType(26, 1, 4),
}


class InitParams(ctypes.Structure):
    """ggml_init_params."""

    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


class ThreadpoolParams(ctypes.Structure):
    """ggml_threadpool_params."""

    _fields_ = [
        ("cpumask", c_char * 512),
        ("n_threads", c_int),
        ("prio", c_int),
        ("poll", c_uint32),
        ("strict_cpu", c_bool),
        ("paused", c_bool),
    ]


_P, _L, _Z = c_void_p, c_int64, c_size_t
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "ggml_init": (_P, [InitParams]),
    "ggml_free": (None, [_P]),
    "ggml_tensor_overhead": (_Z, []),
    "ggml_graph_overhead_custom": (_Z, [_Z, c_bool]),
    "ggml_new_tensor_1d": (_P, [_P, c_int, _L]),
    "ggml_new_tensor_2d": (_P, [_P, c_int, _L, _L]),
    "ggml_new_tensor_3d": (_P, [_P, c_int, _L, _L, _L]),
    "ggml_reshape_3d": (_P, [_P, _P, _L, _L, _L]),
    "ggml_view_2d": (_P, [_P, _P, _L, _L, _Z, _Z]),
    "ggml_mul_mat_id": (_P, [_P, _P, _P, _P]),
    "ggml_swiglu_split": (_P, [_P, _P, _P]),
    "ggml_mul": (_P, [_P, _P, _P]),
    "ggml_add": (_P, [_P, _P, _P]),
    "ggml_cont": (_P, [_P, _P]),
    "ggml_set_output": (None, [_P]),
    "ggml_get_data": (_P, [_P]),
    "ggml_nbytes": (_Z, [_P]),
    "ggml_new_graph_custom": (_P, [_P, _Z, c_bool]),
    "ggml_build_forward_expand": (None, [_P, _P]),
    "ggml_quantize_chunk": (_Z, [c_int, _P, _P, _L, _L, _L, _P]),
    "ggml_quantize_init": (None, [c_int]),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_P, [_P, _P]),
    "ggml_backend_buffer_free": (None, [_P]),
    "ggml_backend_tensor_set": (None, [_P, _P, _Z, _Z]),
    "ggml_backend_graph_compute": (c_int, [_P, _P]),
    "ggml_backend_free": (None, [_P]),
    "ggml_backend_get_device": (_P, [_P]),
    "ggml_backend_dev_backend_reg": (_P, [_P]),
    "ggml_backend_dev_supports_op": (c_bool, [_P, _P]),
    "ggml_backend_reg_get_proc_address": (_P, [_P, ctypes.c_char_p]),
    "ggml_gallocr_new": (_P, [_P]),
    "ggml_gallocr_alloc_graph": (c_bool, [_P, _P]),
    "ggml_gallocr_free": (None, [_P]),
    "ggml_backend_cpu_init": (_P, []),
    "ggml_backend_cpu_buffer_type": (_P, []),
    "ggml_backend_cpu_set_n_threads": (None, [_P, c_int]),
    "ggml_backend_cpu_set_threadpool": (None, [_P, _P]),
    "ggml_threadpool_params_init": (None, [ctypes.POINTER(ThreadpoolParams), c_int]),
    "ggml_threadpool_new": (_P, [ctypes.POINTER(ThreadpoolParams)]),
    "ggml_threadpool_free": (None, [_P]),
}


class Library:
    """The functions above, found in ggml's libraries, as attributes without the `ggml_`."""

    def __init__(self, folder: Path) -> None:
        names = ("libggml-base.so", "libggml-cpu.so", "libggml.so")
        found = [next(iter(sorted(folder.glob(f"{name}*"))), None) for name in names]
        if None in found:
            raise CannotRunError(f"{folder} lacks {names[found.index(None)]}")
        parts = [ctypes.CDLL(str(path)) for path in found]
        for name, (result, arguments) in _SIGNATURES.items():
            function = next((getattr(p, name) for p in parts if hasattr(p, name)), None)
            if function is None:
                raise CannotRunError(f"ggml in {folder} has no {name}: another version?")
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("ggml_"), function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"ggml function {name} is not declared in ggml_library.py")

    def quantize(self, name: str, stack: Tensor) -> Tensor:
        """Experts [n, N, K] as bytes u8[n, N * bytes of a row], as in a GGUF file."""
        kind, (_, rows, cols) = TYPES[name], stack.shape
        if name == "bf16":
            return stack.contiguous().view(torch.uint8).reshape(len(stack), -1)
        if cols % kind.block:
            raise CannotRunError(f"{name} takes rows of {kind.block} weights, not {cols}")
        self.quantize_init(kind.number)
        out = torch.empty(len(stack), kind.nbytes(rows * cols), dtype=torch.uint8)
        share = max(1, rows // (4 * torch.get_num_threads()))

        def rows_of(job: tuple[int, int]) -> None:
            expert, first = job
            part = stack[expert, first : first + share].float()
            at = out[expert].data_ptr() + first * kind.nbytes(cols)
            self.quantize_chunk(kind.number, part.data_ptr(), at, 0, len(part), cols, None)

        jobs = [(e, r) for e in range(len(stack)) for r in range(0, rows, share)]
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(rows_of, jobs))
        return out


@cache
def load() -> Library:
    """ggml's functions. Raises CannotRunError."""
    named = os.environ.get(FOLDER, "")
    if named:
        return Library(Path(named))
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise CannotRunError(
            f"ggml is not installed; pip install llama-cpp-python, or set {FOLDER} to the folder "
            "of libggml-base.so, libggml-cpu.so and libggml.so"
        )
    return Library(Path(spec.origin).parent / "lib")


@contextmanager
def silent_output() -> Generator[None]:
    """Without what compiled code prints to stdout; what it prints as an error stays."""
    kept, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(null)
