"""Weights stored as GGUF blocks: their values, and tiles made from the file's own bits."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from gguf_blocks import FORMATS, random_blocks, values

from ktgraph.cpu_kernels import reference_layouts
from ktgraph.ir.graph import Module
from ktgraph.ir.parser import parse_module
from ktgraph.ir.types import Encoding
from ktgraph.pass_api import PassContext
from ktgraph.passes.pack_weights import PackWeights
from ktgraph.weights.encodings import (
    EncodingError,
    from_float,
    pack_matrix,
    parse_encoding,
    shape_nbytes,
    to_float,
)
from ktgraph.weights.evaluate import WeightError, WeightEvaluator
from ktgraph.weights.sources import ModelSource, RandomSource

E, F, D, T = 3, 256, 512, 5
TEXT = """ktgraph.ir 1
module @m
dim D = 512, E = 3, F = 256, K = 2
sym T in 1..64
weight @gate : f32[E, F, D]<gguf.FMT> from "gate"
weight @up : f32[E, F, D]<gguf.FMT> from "up"
weight @w13 : f32[E, 2*F, D]<gguf.FMT> = concat(@gate, @up) {axis = 1}
weight @w2 : f32[E, D, F]<gguf.FMT> from "w2"
weight @q : f32[D, D]<gguf.FMT> from "q"
weight @flat : f32[E*F, D]<gguf.FMT> = reshape(@gate) {shape = [E*F, D]}
weight @router : f32[E, D] from "router"

func @main(%x: f32[T, D]) -> (f32[T, D]) {
  %q = nn.linear %x, @q : f32[T, D]
  %f = nn.linear %q, @flat : f32[T, E*F]
  %ids, %wts = moe.route %q, @router {top_k = K} : i32[T, K], f32[T, K]
  %y = moe.grouped_mlp %q, %ids, %wts, @w13, @w2 : f32[T, D]
  return %y
}
"""


class Blocks(RandomSource):
    """Random bytes under the names of TEXT; lists the sizes that are read."""

    def __init__(self, module: Module, format: str) -> None:
        super().__init__(module)
        self.format, self.reads = format, list[int]()
        rng = np.random.default_rng(0)
        shapes = {"gate": (E, F, D), "up": (E, F, D), "w2": (E, D, F), "q": (1, D, D)}
        self.stored = {
            name: np.stack([random_blocks(format, rows, cols, rng) for _ in range(count)])
            for name, (count, rows, cols) in shapes.items()
        }
        self.stored["q"] = self.stored["q"][0]

    def encoding(self, name: str) -> Encoding | None:
        return parse_encoding(f"gguf.{self.format}") if name in self.stored else None

    def rows(self, name: str, expert: int | None = None) -> torch.Tensor:
        found = self.stored[name] if expert is None else self.stored[name][expert]
        self.reads.append(found.nbytes)
        return torch.as_tensor(found)

    def get(self, name: str, expert: int | None = None, rows: slice | None = None) -> torch.Tensor:
        if name not in self.stored:
            return super().get(name, expert, rows)
        found = torch.as_tensor(values(self.format, self.stored[name]))
        return found if expert is None else found[expert]


def packed_module(format: str) -> tuple[Module, Blocks, WeightEvaluator]:
    module = parse_module(TEXT.replace("FMT", format))
    PackWeights().run(module, PassContext())
    source = Blocks(module, format)
    return module, source, WeightEvaluator(module, source)


def tiles(format: str, matrices: Sequence[np.ndarray], gate_up: bool = False) -> np.ndarray:
    each = [reference_layouts.from_blocks(format, m, gate_up) for m in matrices]
    return np.concatenate(each)


@pytest.mark.parametrize("format", FORMATS)
def test_tiles_hold_the_files_bits(format: str) -> None:
    module, source, weights = packed_module(format)
    stored, joined = source.stored, [np.concatenate(p) for p in zip(
        source.stored["gate"], source.stored["up"], strict=True)]  # fmt: skip
    for name, want in [
        ("q.p", tiles(format, [stored["q"]])),
        ("w2.p", tiles(format, list(stored["w2"]))),
        ("w13.p", tiles(format, joined, gate_up=True)),
        ("flat.p", tiles(format, [stored["gate"].reshape(E * F, -1)])),
    ]:
        ref = module.weights[name].ref()
        (got,) = weights.stored(ref)
        assert np.array_equal(got.numpy(), want), name
        encoding = module.weights[name].type.encoding
        assert encoding is not None
        assert encoding.name == f"tile.{format}"
        shape = weights.shape(ref)
        assert len(got) == shape_nbytes(shape, encoding)
        assert torch.equal(to_float((got,), shape, encoding), weights.tensor(ref))


@pytest.mark.parametrize("format", FORMATS)
def test_values_and_stored_bytes(format: str) -> None:
    module, source, weights = packed_module(format)
    q = module.weights["q"]
    assert q.type.encoding is not None
    (bytes_,) = stored = weights.stored(q.ref())
    assert np.array_equal(bytes_.numpy(), source.stored["q"])
    assert bytes_.nbytes == shape_nbytes([D, D], q.type.encoding)
    want = torch.as_tensor(values(format, source.stored["q"]))
    assert torch.equal(to_float(stored, [D, D], q.type.encoding), want)
    assert torch.equal(weights.tensor(q.ref()), want)


def test_experts_are_read_one_at_a_time() -> None:
    module, source, weights = packed_module("q4_k")
    weights.stored(module.weights["w13.p"].ref())
    assert source.reads == [source.stored["gate"][0].nbytes] * (2 * E)


def test_errors() -> None:
    module, source, _ = packed_module("q4_k")
    encoding, tile = parse_encoding("gguf.q4_k"), parse_encoding("tile.q4_k")
    with pytest.raises(EncodingError, match=r"gguf\.q4_k is read from a GGUF file"):
        from_float(torch.zeros(2, 256), encoding)
    with pytest.raises(EncodingError, match=r"from a GGUF file's blocks, got torch\.float32"):
        pack_matrix(torch.zeros(1), 0, torch.zeros(2, 256), [2, 256], tile)
    with pytest.raises(ValueError, match="q4_k needs columns in whole blocks of 256, got 128"):
        shape_nbytes([2, 128], encoding)
    values_only = WeightEvaluator(module, ModelSource(torch.nn.Linear(1, 1)))
    with pytest.raises(WeightError, match=r"ModelSource gives values, but rows of gguf\.q4_k"):
        values_only.stored(module.weights["q.p"].ref())
    source.stored["q"] = source.stored["q"][:, :-144]
    with pytest.raises(WeightError, match=r"= \[512, 288\], its source gives \[512, 144\]"):
        WeightEvaluator(module, source).stored(module.weights["q.p"].ref())
