"""Quantized checkpoints that cannot be read: one clear error each, before anything is loaded."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quantized_checkpoints import CASES, Files, edit_config, edit_files, make

from ktgraph.errors import UnsupportedInputError
from ktgraph.frontends.safetensors_files import CheckpointError
from ktgraph.weights.safetensors_source import SafetensorsSource

FP8 = "model.layers.0.mlp.down_proj"
INT4 = "model.layers.1.mlp.experts.2.up_proj"
GPTQ = "model.layers.0.self_attn.q_proj"
MXFP4 = "model.layers.0.mlp.experts.down_proj"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("originals")
    for name in CASES:
        make(at, name)
    return at


def without(key: str) -> Callable[[Path], None]:
    def change(files: Files) -> None:
        del files[key]

    return lambda folder: edit_files(folder, change)


def cut(key: str, rows: int) -> Callable[[Path], None]:
    def change(files: Files) -> None:
        files[key] = files[key][:rows].contiguous()

    return lambda folder: edit_files(folder, change)


def put(key: str, value: torch.Tensor) -> Callable[[Path], None]:
    return lambda folder: edit_files(folder, lambda files: files.update({key: value}))


def settings(case: str, **changes: object) -> Callable[[Path], None]:
    changed = {**CASES[case].settings, **changes}
    return lambda folder: edit_config(folder, quantization_config=changed)


def group(**changes: object) -> Callable[[Path], None]:
    weights = CASES["compressed-tensors"].settings["config_groups"]["group_0"]["weights"]
    return settings(
        "compressed-tensors", config_groups={"group_0": {"weights": {**weights, **changes}}}
    )


def act_order(folder: Path) -> None:
    settings("gptq", desc_act=True)(folder)

    def change(files: Files) -> None:
        for key in [k for k in files if k.endswith("g_idx")]:
            files[key] = files[key].flip(0).contiguous()

    edit_files(folder, change)


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def dense(folder: Path) -> None:
    def change(files: Files) -> None:
        files.clear()
        files["x.weight"] = torch.ones(2, 2)

    edit_files(folder, change)


BAD: list[tuple[str, Callable[[Path], None], str]] = [
    ("fp8", settings("fp8", quant_method="aqlm"), "'aqlm', which ktgraph does not read .it reads"),
    ("fp8", settings("fp8", quant_method=None), "None, which ktgraph does not read"),
    ("fp8", settings("fp8", weight_block_size=[64, 64]), r"blocks of \[128, 128\] is read"),
    ("fp8", settings("fp8", weight_block_size=None), r"weight_block_size None"),
    ("fp8", settings("fp8", fmt="e5m2"), "fmt 'e5m2'"),
    ("fp8", without(f"{FP8}.weight_scale_inv"), f"'{FP8}.weight_scale_inv', which belongs to it"),
    ("fp8", cut(f"{FP8}.weight_scale_inv", 1), r"is \[1, 2\], expected \[2, 2\]: one scale per"),
    ("fp8", put(f"{FP8}.weight_scale_inv", torch.ones(2, 2).int()), "int32, expected float32"),
    ("fp8", dense, "no tensor in its files is"),
    ("fp8", truncate, "truncated or corrupt"),
    ("compressed-tensors", without(f"{INT4}.weight_scale"), f"'{INT4}.weight_scale', which"),
    ("compressed-tensors", without(f"{INT4}.weight_shape"), f"'{INT4}.weight_shape', which"),
    ("compressed-tensors", without(f"{INT4}.weight_packed"), "no tensor for parameter|is made of|"
     r"is \[6, 64, 64\]"),
    ("compressed-tensors", cut(f"{INT4}.weight_packed", 9), r"is \[9, 8\], expected \[32, 8\]"),
    ("compressed-tensors", cut(f"{INT4}.weight_scale", 9), r"is \[9, 2\], expected \[32, 2\]"),
    ("compressed-tensors", put(f"{INT4}.weight_shape", torch.tensor([0, 8])), r"expected \[out"),
    ("compressed-tensors", put(f"{INT4}.weight_scale", torch.ones(32, 2)),
     "float32, expected bfloat16 or float16"),
    ("compressed-tensors", put(f"{INT4}.weight_scale", torch.ones(32, 4).bfloat16()),
     "4 groups for 64 columns; groups of 32, 64 or"),
    ("compressed-tensors", put(f"{INT4}.weight_scale", torch.ones(32, 1).bfloat16()),
     "stored in several ways"),
    ("compressed-tensors", group(num_bits=2), "int weights of 2 bits"),
    ("compressed-tensors", group(type="float"), "float weights of 4 bits"),
    ("gptq", settings("gptq", bits=8), "gptq with 8 bits; 4 bits are read"),
    ("gptq", settings("gptq", checkpoint_format="marlin"), "checkpoint_format 'marlin'"),
    ("gptq", without(f"{GPTQ}.qzeros"), f"'{GPTQ}.qzeros', which belongs to it"),
    ("gptq", cut(f"{GPTQ}.qzeros", 1), r"qzeros' is \[1, 8\], expected \[2, 8\]"),
    ("gptq", act_order, r"act-order.*desc_act=false"),
    ("awq", settings("awq", version="gemv"), "AWQ version 'gemv'; gemm is read"),
    ("awq", cut(f"{GPTQ}.scales", 0), r"scales' is \[0|has 0 groups|expected \[0"),
    ("mxfp4", without(f"{MXFP4}_scales"), f"'{MXFP4}_scales', which belongs to it"),
    ("mxfp4", put(f"{MXFP4}_blocks", torch.zeros(5, 64, 2, 8).byte()), "16 bytes are 32 columns"),
    ("mxfp4", cut(f"{MXFP4}_scales", 4), r"is \[4, 64, 2\], expected \[5, 64, 2\]"),
    ("mxfp4", put(f"{MXFP4}_blocks", torch.zeros(5, 64, 2, 16)), "float32, expected uint8"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "damage", "message"), BAD)
def test_one_clear_error(
    originals: Path, tmp_path: Path, case: str, damage: Callable[[Path], None], message: str
) -> None:
    folder = tmp_path / case
    shutil.copytree(originals / case, folder)
    damage(folder)
    with pytest.raises(CheckpointError, match=message) as error:
        SafetensorsSource(folder)
    assert isinstance(error.value, UnsupportedInputError)
    assert "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)
