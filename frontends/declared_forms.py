"""How a quantized checkpoint stores its parameters, by config.json alone: for planning.

Files say it better, and are asked where they are there (`hf_build`).  Taken to be quantized is what
each method quantizes where nobody says otherwise: every linear of a layer and every stack of
experts, but for what the config leaves out.  `ktgraph/weights/checkpoints` has the formats.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ktgraph.frontends.errors import UnsupportedModelError
from ktgraph.frontends.file_forms import FileForms, Made
from ktgraph.ir.types import Encoding

UPRIGHT = "_blocks"  # behind the name of a parameter: its rows, where the file has it transposed
_STACKS = ("gate_up_proj", "down_proj")
_PROJECTIONS = {"gate_up_proj": "gate_proj", "down_proj": "down_proj"}
Settings = Mapping[str, Any]


def declared_forms(model: nn.Module, settings: Settings) -> FileForms:
    """The forms of the model's parameters; `settings` is config.json's quantization_config.

    Raises UnsupportedModelError for a method, or a variant of it, that is not read.
    """
    method = str(settings.get("quant_method"))
    if method not in _METHODS:
        raise UnsupportedModelError(
            f"config.json says the weights are quantized by {method!r}, which ktgraph does not "
            f"read (it reads {', '.join(_METHODS)}). Remove quantization_config to plan it "
            "unquantized"
        )
    encoding, left_out = _METHODS[method](settings)
    found = {
        name: encoding
        for name, tensor in _candidates(model, method)
        if _fits(encoding, tensor) and not _is_left_out(name, left_out)
    }
    if method != "mxfp4":
        return FileForms(encodings=found)
    made = {name: Made("transpose", (f"{name}{UPRIGHT}",)) for name in found}
    return FileForms(made=made, encodings={f"{n}{UPRIGHT}": e for n, e in found.items()})


# -- what may be quantized -------------------------------------------------------------------------
def _candidates(model: nn.Module, method: str) -> Iterator[tuple[str, Tensor]]:
    """Stacks of experts and, but for mxfp4, linears inside layers."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and method != "mxfp4" and ".layers." in f".{path}":
            yield f"{path}.weight", module.weight
        for name in _STACKS:
            tensor = module._parameters.get(name)
            if tensor is not None and tensor.dim() == 3:
                yield f"{path}.{name}", tensor


def _fits(encoding: Encoding, tensor: Tensor) -> bool:
    """4-bit integers come in whole words and whole groups; fp8 blocks may be cut."""
    if encoding.name not in ("int4", "int4z"):
        return True
    *_, rows, cols = tensor.shape
    return rows % 8 == 0 and cols % encoding.get("group") == 0


def _is_left_out(name: str, left_out: Sequence[str]) -> bool:
    """Whether a pattern names the parameter: a part of its path, with * or "re:" a regex.

    A stack of experts is also known by its first expert's projections, as checkpoints name them.
    """
    stem = name.removesuffix(".weight")
    head, _, last = stem.rpartition(".")
    names = [stem, f"{head}.0.{_PROJECTIONS[last]}"] if last in _STACKS else [stem]
    return any(_matches(pattern, n) for pattern in left_out for n in names)


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), name) is not None
    if "*" in pattern:
        return re.search(re.escape(pattern).replace(r"\*", "[^.]*"), name) is not None
    return f".{pattern}." in f".{name}."


# -- the methods -----------------------------------------------------------------------------------
def _fp8(settings: Settings) -> tuple[Encoding, Sequence[str]]:
    block, format = settings.get("weight_block_size"), settings.get("fmt", "e4m3")
    if block is None or list(block) != [128, 128] or format != "e4m3":
        raise _unread("fp8", f"fmt {format!r} and weight_block_size {block}", "e4m3, [128, 128]")
    return Encoding("fp8", (("group", 128),)), _not_converted(settings)


def _mxfp4(settings: Settings) -> tuple[Encoding, Sequence[str]]:
    return Encoding("mxfp4", (("group", 32),)), _not_converted(settings)


def _compressed(settings: Settings) -> tuple[Encoding, Sequence[str]]:
    groups = list((settings.get("config_groups") or {}).values())
    if len(groups) != 1:
        raise _unread("compressed-tensors", f"{len(groups)} config_groups", "one")
    weights: Settings = groups[0].get("weights") or {}
    format = groups[0].get("format") or settings.get("format")
    kind, bits = weights.get("type", "int"), weights.get("num_bits")
    ignore = tuple(settings.get("ignore") or ())
    if kind == "int" and (format, bits) == ("pack-quantized", 4):
        name = "int4" if weights.get("symmetric", True) else "int4z"
        return _grouped(name, weights.get("group_size"), "compressed-tensors"), ignore
    if kind == "int" and (format, bits) == ("int-quantized", 8):
        if weights.get("strategy") != "group":
            return Encoding("int8"), ignore
        return _grouped("int8", weights.get("group_size"), "compressed-tensors"), ignore
    raise _unread(
        "compressed-tensors",
        f"{kind} weights of {bits} bits in format {format!r}",
        "pack-quantized with 4 bits, int-quantized with 8",
    )


def _gptq(settings: Settings) -> tuple[Encoding, Sequence[str]]:
    return _four_bits("gptq", settings), _not_converted(settings)


def _awq(settings: Settings) -> tuple[Encoding, Sequence[str]]:
    return _four_bits("awq", settings), _not_converted(settings)


def _four_bits(method: str, settings: Settings) -> Encoding:
    bits = settings.get("bits", settings.get("w_bit"))
    if bits != 4:
        raise _unread(method, f"{bits} bits", "4 bits")
    return _grouped("int4z", settings.get("group_size", settings.get("q_group_size")), method)


def _grouped(name: str, size: object, method: str) -> Encoding:
    """Groups of 256, 384, … columns are several of 128."""
    if size in (32, 64):
        return Encoding(name, (("group", size),))
    if isinstance(size, int) and size > 0 and size % 128 == 0:
        return Encoding(name, (("group", 128),))
    raise _unread(method, f"groups of {size} columns", "32, 64 or multiples of 128")


def _not_converted(settings: Settings) -> Sequence[str]:
    return tuple(settings.get("modules_to_not_convert") or ())


def _unread(method: str, what: str, read: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"config.json, quantization_config of {method}: {what} (read: {read})"
    )


_METHODS: Mapping[str, Callable[[Settings], tuple[Encoding, Sequence[str]]]] = {
    "awq": _awq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}


__all__ = ["UPRIGHT", "declared_forms"]
