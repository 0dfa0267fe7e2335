"""Helpers for kernel tests: wrap tensors, pack weights, run one kernel, compare with float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gguf_blocks import FORMATS as GGUF
from gguf_blocks import blocks_for, values, whole

from ktgraph.cpu_kernels import load_native, reference_layouts

native = load_native()  # without the native part these tests must fail, not pass unseen

NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.int32: "i32"}
ISAS = native.isa_info()["levels"]  # every level this machine runs, the tile emulator included
_engines: dict[tuple[int, str], Any] = {}


def engine(threads: int, isa: str) -> Any:
    """Engines are kept: their threads start once for the whole run."""
    key = (threads, isa)
    if key not in _engines:
        _engines[key] = native.Engine(threads, isa=isa)
    return _engines[key]


class Batch:
    """Ragged sequences on shuffled pages."""

    def __init__(
        self,
        lens: list[tuple[int, int]],
        page_size: int,
        out_rows: list[int] | None = None,
        seed: int = 0,
    ):
        self.lens = lens  # (rows cached before, new tokens) per sequence
        self.page_size = page_size
        self.kv_len = [past + new for past, new in lens]
        blocks = [-(-n // page_size) for n in self.kv_len]
        self.pages = sum(blocks) + 3
        order = np.random.default_rng(seed).permutation(self.pages).tolist()
        self.table = np.full((len(lens), max(blocks)), -1, np.int32)
        for s, n in enumerate(blocks):
            self.table[s, :n] = [order.pop() for _ in range(n)]
        self.seq = [s for s, (_, new) in enumerate(lens) for _ in range(new)]
        self.pos = [past + i for past, new in lens for i in range(new)]
        self.start = np.cumsum([0, *(new for _, new in lens)]).tolist()
        self.tokens = len(self.seq)
        self.out_rows = out_rows or []
        self.native = native.Batch()
        i32 = lambda x: np.asarray(x, np.int32)  # noqa: E731
        self.native.set(
            i32(self.seq),
            i32(self.pos),
            i32(self.start),
            i32(self.kv_len),
            self.table,
            i32(self.out_rows),
        )

    def slot(self, seq: int, pos: int) -> tuple[int, int]:
        return int(self.table[seq, pos // self.page_size]), pos % self.page_size


class Cache:
    """A paged state; memory no sequence owns stays NaN, so reading it shows."""

    def __init__(self, dtype: torch.dtype, layers: int, batch: Batch, widths: list[int]):
        self.parts = [
            torch.full((layers, batch.pages, batch.page_size, w), float("nan"), dtype=dtype)
            for w in widths
        ]
        self.native = native.State(
            NAMES[dtype],
            layers,
            batch.pages,
            batch.page_size,
            widths,
            [p.data_ptr() for p in self.parts],
        )

    def fill(self, layer: int, batch: Batch, gen: torch.Generator, upto: str = "all") -> None:
        for s, (past, new) in enumerate(batch.lens):
            for pos in range(past + new if upto == "all" else past):
                page, row = batch.slot(s, pos)
                for p in self.parts:
                    p[layer, page, row] = torch.randn(p.shape[-1], generator=gen).to(p.dtype)

    def rows(self, part: int, layer: int, batch: Batch, seq: int, n: int) -> torch.Tensor:
        at = [batch.slot(seq, i) for i in range(n)]
        return torch.stack([self.parts[part][layer, p, r] for p, r in at]).double()


class Lab:
    def __init__(self, isa: str, dtype: torch.dtype, threads: int = 2):
        self.isa, self.dtype, self.threads = isa, dtype, threads
        self.gen = torch.Generator().manual_seed(1234)
        self.keep: list[Any] = []

    def randn(
        self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0
    ) -> torch.Tensor:
        return (torch.randn(*shape, generator=self.gen) * scale).to(dtype or self.dtype)

    def strided(self, *shape: int) -> torch.Tensor:
        """A view into a wider tensor: rows are not dense, and what lies between is NaN."""
        wide = torch.full((*shape[:-1], shape[-1] + 5), float("nan"), dtype=self.dtype)
        view = wide[..., 2 : 2 + shape[-1]]
        view.copy_(self.randn(*shape))
        return view

    def out(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        dtype = dtype or self.dtype
        if dtype == torch.int32:
            return torch.full(shape, -77, dtype=dtype)
        return torch.full(shape, float("nan"), dtype=dtype)

    def tensor(self, t: torch.Tensor, axis: int | None = None) -> Any:
        self.keep.append(t)
        shape = list(t.shape)
        if axis is not None:
            shape[0] = axis
        return native.Tensor(t.data_ptr(), NAMES[t.dtype], shape, list(t.stride()))

    def tok(self, t: torch.Tensor) -> Any:
        return self.tensor(t, -1)

    def weight(
        self,
        fmt: str,
        w: torch.Tensor,
        group: int = 0,
        gate_up: bool = False,
        activations: str = "",
        many_rows: int = 0,
    ) -> tuple[Any, torch.Tensor]:
        """Packed weight, and what its bytes mean in float64."""
        if fmt in GGUF:
            each = [blocks_for(fmt, m) for m in (w[None] if w.dim() == 2 else w)]
            packed, meaning = self.blocks(fmt, each, gate_up, activations, many_rows)
            return packed, meaning if w.dim() == 3 else meaning[0]
        stack = w[None] if w.dim() == 2 else w
        count, rows, cols = stack.shape
        nbytes = native.packed_nbytes(fmt, rows, cols, group, count, gate_up)
        data = native.empty_packed(nbytes)
        self.keep.append(data)
        for i in range(count):
            native.pack_into(
                data.ctypes.data, i, fmt, rows, cols, group, count, gate_up, stack[i].contiguous()
            )
        each = data.reshape(count, -1)
        dense = np.stack(
            [reference_layouts.to_float(fmt, d, rows, cols, group, gate_up) for d in each]
        )
        meaning = torch.from_numpy(dense).double()
        packed = native.Weight(
            fmt, rows, cols, count, group, gate_up, data.ctypes.data, nbytes, activations, many_rows
        )
        return packed, meaning if w.dim() == 3 else meaning[0]

    def blocks(
        self,
        fmt: str,
        each: list[np.ndarray],
        gate_up: bool = False,
        activations: str = "",
        many_rows: int = 0,
    ) -> tuple[Any, torch.Tensor]:
        """A stack packed from GGUF blocks, and what the gguf package says they mean: float64."""
        meaning = torch.from_numpy(np.stack([values(fmt, b) for b in each])).double()
        count, rows, cols = meaning.shape
        data = native.empty_packed(native.packed_nbytes(fmt, rows, cols, 0, count, gate_up))
        self.keep.append(data)
        for i, b in enumerate(each):
            native.repack_into(data.ctypes.data, i, fmt, rows, cols, 0, count, gate_up, b)
        at = data.ctypes.data
        packed = native.Weight(
            fmt, rows, cols, count, 0, gate_up, at, len(data), activations, many_rows
        )
        return packed, meaning

    def run(
        self,
        kernel: str,
        operands: list[Any],
        attrs: dict[str, Any] | None = None,
        T: int = 1,
        rows: int = 0,
        batch: Batch | None = None,
    ) -> None:
        plan = native.Plan(engine(self.threads, self.isa))
        plan.add(kernel, operands, attrs or {})
        plan.run(T, rows, batch.native if batch else None)

    def close(
        self, got: torch.Tensor, want: torch.Tensor, f32: float = 3e-6, bf16: float = 4e-3
    ) -> None:
        """Error relative to the signal's norm, and no output left unwritten."""
        got = got.double()
        assert torch.isfinite(got).all(), (
            f"{int((~torch.isfinite(got)).sum())} outputs are NaN or inf"
        )
        norm = want.double().norm()
        error = float((got - want.double()).norm() / norm) if norm else float(got.norm())
        assert error <= (f32 if self.dtype == torch.float32 else bf16), (
            f"relative error {error:.3g}"
        )


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def lab(request: pytest.FixtureRequest, isa: str) -> Lab:
    return Lab(isa, request.param)


@pytest.fixture
def tools() -> SimpleNamespace:
    """The classes above, for tests (test folders are not importable)."""

    return SimpleNamespace(
        Lab=Lab, Batch=Batch, Cache=Cache, native=native, engine=engine, ISAS=ISAS, whole=whole
    )
