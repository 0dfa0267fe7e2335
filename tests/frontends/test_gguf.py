"""GGUF files as models: config, names, orders and bits, against transformers on the same values."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_models import CASES, SIZES, write

import ktgraph as kt
from ktgraph.errors import UnsupportedInputError
from ktgraph.frontends.gguf_model import open_gguf
from ktgraph.frontends.hf import trace_hf_full
from ktgraph.frontends.safetensors_files import CheckpointError
from ktgraph.model_input import read_model, weight_source
from ktgraph.stages import Lowered, Traced
from ktgraph.weights.encodings import Tile, to_float
from ktgraph.weights.evaluate import WeightEvaluator
from ktgraph.weights.gguf_blocks import as_q8_0, block_size, dequantize
from ktgraph.weights.gguf_source import GgufSource


class Made:
    def __init__(self, path: Path, name: str) -> None:
        self.name, self.path = name, path
        self.model = write(path, name)
        module = trace_hf_full(path, torch.float32, witnesses=False).module
        self.traced = Traced(module, read_model(path), "f32")
        source = weight_source(self.traced.given)
        assert isinstance(source, GgufSource)
        self.source = source

    @cached_property
    def lowered(self) -> Lowered:
        return self.traced.lower("cpu", context=64)


@pytest.fixture(scope="module", params=CASES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("gguf") / "model.gguf", request.param)


def logits_of(made: Made, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return made.model(ids).logits


def test_logits_are_those_of_the_dequantized_model(made: Made, kit: Any) -> None:
    ids = torch.randint(0, SIZES["vocab_size"], (2, 11), generator=torch.Generator().manual_seed(0))
    got = kit.run(made.traced.ir, made.source, ids, [7, 4])
    assert kit.nmse(got, logits_of(made, ids)) < 1e-10


def test_compiled(made: Made, kit: Any) -> None:
    """Kernels of GGUF blocks round rows of x to 8 bits, which here and there changes an expert."""
    ids = torch.randint(0, SIZES["vocab_size"], (2, 17), generator=torch.Generator().manual_seed(1))
    assert not any(o.via == "torch.reference" for o in made.lowered.module.walk())
    got, want = made.lowered.compile()(ids), logits_of(made, ids)
    by_token = (got - want).square().sum(-1) / want.square().sum(-1)
    assert 1e-9 < by_token.median() < 5e-3


def test_tiles_hold_the_files_bits(made: Made) -> None:
    """Packed weights, against their values: every one whose file has integers."""
    module = made.lowered.module
    packed = WeightEvaluator(module, made.source)
    plain = WeightEvaluator(module, made.source, torch.float32)
    formats: set[str] = set()
    for weight in module.weights.values():
        tile = Tile.of(weight.type.encoding)
        if tile is None or weight.type.encoding is None:
            continue
        index = weight.lo if weight.is_family else None
        (found,) = packed.stored(weight.ref(), index)
        values = to_float((found,), packed.shape(weight.ref()), weight.type.encoding)
        assert torch.equal(values, plain.tensor(weight.ref(), index)), weight.name
        formats.add(tile.format)
    exact = {"q5_0": "q8_0", "iq4_nl": "q8_0", "q4_1": "f32", "q2_k": "f32"}
    wanted = {exact.get(t.format, t.format) for t in made.source.file.tensors.values()}
    assert formats - {"f32"} <= wanted
    assert len(formats) >= 2


def test_what_no_kernel_reads_is_said(made: Made) -> None:
    lowered = made.lowered
    (notes,) = (r.notes for r in lowered.passes.records if r.name == "dequantize")
    dense = [
        w for w in lowered.module.weights.values() if w.recipe and w.recipe.kind == "dequantize"
    ]
    text = " ".join(notes)
    assert bool(dense) == bool(text)
    embedding = made.source.encoding("token_embd.weight")
    assert ("@embed_tokens" in text) == (embedding is not None)
    if made.name == "llama":
        assert "computes from gguf.q4_1" in text


def test_layers_stored_alike_are_rolled(made: Made) -> None:
    """Where formats differ from layer to layer, layers stay apart."""
    repeats = [o for o in made.traced.ir.walk() if o.body is not None]
    assert len(repeats) == (0 if made.name == "deepseek2" else 1)


def test_one_format_holds_another() -> None:
    rng = np.random.default_rng(0)
    for format in ("q5_0", "iq4_nl"):
        blocks = rng.integers(0, 256, (3, 4, block_size(format)[1])).astype(np.uint8)
        blocks[..., :2] = rng.uniform(0.01, 0.1, (3, 4, 1)).astype(np.float16).view(np.uint8)
        each = torch.from_numpy(blocks.reshape(3, -1))
        assert torch.equal(dequantize(as_q8_0(each, format), "q8_0"), dequantize(each, format))


# -- what is refused -------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("good") / "model.gguf"
    write(path, "qwen2moe")
    return path.read_bytes()


def _file(path: Path, arch: str, **tensors: np.ndarray) -> None:
    writer = gguf.GGUFWriter(path, arch)
    for name, value in tensors.items():
        writer.add_tensor(name.replace("__", "."), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


BAD: list[tuple[Callable[[Path, bytes], object], str]] = [
    (lambda p, good: p.write_bytes(good[:-100]), "truncated, corrupt or no GGUF file"),
    (lambda p, good: p.write_bytes(good[:200]), "truncated, corrupt or no GGUF file"),
    (lambda p, good: p.write_bytes(b"no such thing" * 9), "GGUF magic invalid"),
    (lambda p, good: p.write_bytes(b""), "truncated, corrupt or no GGUF file"),
    (lambda p, good: _file(p, "mamba", x=np.ones((2, 2), np.float32)),
     "architecture 'mamba' is not read from GGUF .read are deepseek2, llama"),
    (lambda p, good: _file(p, "llama", token_embd__weight=np.ones((4, 8), np.float32)),
     "llama.attention.head_count is missing"),
    (lambda p, good: p.write_bytes(good.replace(b"blk.1.attn_q.weight", b"blk.1.attn_x.weight")),
     "no tensor 'blk.1.attn_q.weight', which parameter 'model.layers.1.self_attn.q_proj.weight'"),
    (lambda p, good: p.write_bytes(good.replace(b"blk.1.ffn_up_exps", b"blk.1.ffn_xx_exps")),
     "no tensor 'blk.1.ffn_up_exps.weight'"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "message"), BAD)
def test_one_clear_error(
    tmp_path: Path, good: bytes, damage: Callable[[Path, bytes], object], message: str
) -> None:
    path = tmp_path / "model.gguf"
    damage(path, good)
    with pytest.raises(UnsupportedInputError, match=message) as error:
        kt.trace(path)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


def test_files_that_are_not_there(tmp_path: Path, good: bytes) -> None:
    with pytest.raises(UnsupportedInputError, match="no such"):
        kt.trace(tmp_path / "model.gguf")
    part = tmp_path / "model-00001-of-00003.gguf"
    part.write_bytes(good)
    with pytest.raises(CheckpointError, match="2 of 3 parts are missing beside it: model-00002"):
        open_gguf(part)


def test_tensors_that_the_model_does_not_read(tmp_path: Path, good: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(good.replace(b"blk.1.attn_k.bias", b"blk.1.attn_k.xxxx"))
    with pytest.raises(CheckpointError, match=r"no tensor 'blk\.1\.attn_k\.bias'"):
        open_gguf(path)
