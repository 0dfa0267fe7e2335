"""The compiled engine (bindings.cpp). What each kernel takes: ``kernels()``."""

from typing import Any

from numpy import uint8
from numpy.typing import NDArray

class Tensor:
    """A strided view of f32, bf16 or i32 memory, rank 1 to 3, last stride 1.

    The first size may be -1 (tokens) or -2 (output rows); each run sets it.
    """

    def __init__(
        self, ptr: int, dtype: str, shape: list[int], strides: list[int] | None = None
    ) -> None: ...

class Weight:
    """A packed matrix, or a stack of `count`; the caller keeps the memory alive."""

    def __init__(
        self,
        format: str,
        rows: int,
        cols: int,
        count: int,
        group: int,
        gate_up: bool,
        data: int,
        nbytes: int,
    ) -> None: ...

class State:
    """A paged cache; each part is [layer][page][page_size][row]."""

    def __init__(
        self,
        dtype: str,
        layers: int,
        pages: int,
        page_size: int,
        part_rows: list[int],
        parts: list[int],
    ) -> None: ...

class Batch:
    """Which token belongs to which sequence; all arrays are i32 and are copied."""

    def __init__(self) -> None: ...
    def set(
        self,
        tok_seq: Any,
        tok_pos: Any,
        seq_start: Any,
        kv_len: Any,
        block_table: Any,
        out_rows: Any,
    ) -> None: ...

class BatchMarker: ...

BATCH: BatchMarker

class Engine:
    """Persistent threads; the caller is one of them. threads=0: one per allowed CPU."""

    def __init__(self, threads: int = 0, cpus: list[int] | None = None, isa: str = "") -> None: ...
    @property
    def threads(self) -> int: ...
    @property
    def cpus(self) -> list[int]: ...
    @property
    def isa(self) -> str: ...

class Plan:
    """Instructions run as one region: every thread does its share, with barriers between."""

    def __init__(self, engine: Engine, max_tokens: int = 0, max_rows: int = 0) -> None: ...
    def add(
        self,
        kernel: str,
        operands: list[Tensor | Weight | State | BatchMarker | None],
        attrs: dict[str, int | float | str | bool] = ...,
    ) -> int: ...
    def run(self, T: int, O: int = 0, batch: Batch | None = None) -> None: ...
    def run_timed(self, T: int, O: int = 0, batch: Batch | None = None) -> list[float]: ...
    def scratch(
        self, T: int, O: int, sequences: int, max_new: int, max_kv: int, threads: int
    ) -> tuple[int, int]: ...
    def kernel(self, i: int) -> str: ...
    def __len__(self) -> int: ...

def packed_nbytes(
    format: str, rows: int, cols: int, group: int = 0, count: int = 1, gate_up: bool = False
) -> int: ...
def pack_into(
    dst: int,
    index: int,
    format: str,
    rows: int,
    cols: int,
    group: int,
    count: int,
    gate_up: bool,
    src: Any,
    isa: str = "",
) -> None: ...
def quantize(format: str, group: int, src: Any) -> tuple[NDArray[Any], NDArray[Any]]: ...
def unpack(
    src: int,
    index: int,
    format: str,
    rows: int,
    cols: int,
    group: int = 0,
    count: int = 1,
    gate_up: bool = False,
) -> NDArray[Any]: ...
def empty_packed(nbytes: int) -> NDArray[uint8]: ...
def isa_info() -> dict[str, Any]: ...
def default_cpus() -> list[int]: ...
def kernels() -> dict[str, str]: ...

# limits.cpp
def touch(data: int, nbytes: int, threads: int) -> None: ...
def read_bandwidth(data: int, nbytes: int, threads: int, passes: int = 5) -> list[float]: ...
def arithmetic_units() -> list[str]: ...
def arithmetic_peak(unit: str, threads: int, seconds: float = 0.1) -> float: ...
