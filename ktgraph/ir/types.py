"""Types of IR values: tensors, linear cache states, and the opaque `batch`.

``TensorType.dtype`` is what an op computes with; ``encoding`` says how the bytes of a weight lie
(None = dense, row-major, in `dtype`).  A device is None before placement and on the home device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ktgraph.ir.dims import Dim

# name -> bytes per element
DTYPES: dict[str, int] = {
    "f64": 8,
    "f32": 4,
    "bf16": 2,
    "f16": 2,
    "i64": 8,
    "i32": 4,
    "i8": 1,
    "u8": 1,
    "bool": 1,
}
FLOATS = frozenset({"f64", "f32", "bf16", "f16"})


@dataclass(frozen=True)
class Encoding:
    """How bytes lie: a name of the encodings table and its parameters, e.g. ``int4(group=64)``."""

    name: str
    params: tuple[tuple[str, int | str], ...] = ()

    def get(self, key: str, default: int = 0) -> int:
        value = dict(self.params).get(key, default)
        if not isinstance(value, int):
            raise TypeError(f"encoding {self}: {key} is not an integer")
        return value

    def __str__(self) -> str:
        if not self.params:
            return self.name
        return f"{self.name}({', '.join(f'{k}={v}' for k, v in self.params)})"


@dataclass(frozen=True)
class TensorType:
    """``f32[T, D]<enc>@dev``"""

    dtype: str
    dims: tuple[Dim, ...]
    encoding: Encoding | None = None
    device: str | None = None

    @staticmethod
    def of(dtype: str, *dims: int | str | Dim) -> TensorType:
        return TensorType(dtype, tuple(Dim.of(d) for d in dims))

    @property
    def rank(self) -> int:
        return len(self.dims)

    def with_dims(self, *dims: int | str | Dim) -> TensorType:
        return replace(self, dims=tuple(Dim.of(d) for d in dims))

    def on(self, device: str | None) -> TensorType:
        return replace(self, device=device)

    def encoded(self, encoding: Encoding | None) -> TensorType:
        return replace(self, encoding=encoding)

    def subst(self, bindings: Mapping[str, Dim | int | str]) -> TensorType:
        return replace(self, dims=tuple(d.subst(bindings) for d in self.dims))

    def __str__(self) -> str:
        enc = f"<{self.encoding}>" if self.encoding else ""
        dev = f"@{self.device}" if self.device else ""
        return f"{self.dtype}[{', '.join(map(str, self.dims))}]{enc}{dev}"


@dataclass(frozen=True)
class StateType:
    """A linear cache, ``kv(L x f32[C, R+P])``: one `TensorType` per part, `layers` of each.

    With a `window` only the last rows of a sequence are kept, as many as one token looks back to
    (itself included); the cache then has pages of its own and is addressed by a `batch` of the
    same window.
    """

    layers: Dim
    parts: tuple[TensorType, ...]
    device: str | None = None
    window: Dim | None = None

    def on(self, device: str | None) -> StateType:
        return replace(self, device=device)

    def subst(self, bindings: Mapping[str, Dim | int | str]) -> StateType:
        parts = tuple(p.subst(bindings) for p in self.parts)
        window = None if self.window is None else self.window.subst(bindings)
        return replace(self, layers=self.layers.subst(bindings), parts=parts, window=window)

    def __str__(self) -> str:
        dev = f"@{self.device}" if self.device else ""
        items = [f"{self.layers} x {p}" for p in self.parts]
        items += [] if self.window is None else [f"window = {self.window}"]
        return f"kv({', '.join(items)}){dev}"


@dataclass(frozen=True)
class BatchType:
    """Which token belongs to which sequence, its position and its cache rows; opaque to passes.

    ``batch(window = W)`` has the rows of the caches of that window; all else is the same.
    """

    device: str | None = field(default=None)
    window: Dim | None = None

    def on(self, device: str | None) -> BatchType:
        return self  # the batch is present on every device

    def subst(self, bindings: Mapping[str, Dim | int | str]) -> BatchType:
        return self if self.window is None else replace(self, window=self.window.subst(bindings))

    def __str__(self) -> str:
        return "batch" if self.window is None else f"batch(window = {self.window})"


Type = TensorType | StateType | BatchType
BATCH = BatchType()
