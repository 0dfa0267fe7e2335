"""Quantized tensors of safetensors checkpoints: one file per format, and the table of them.

A format looks at the names and shapes of a checkpoint's file tensors and says which of them make up
one quantized tensor, under the name that an unquantized checkpoint would give it.  Nothing is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ktgraph.frontends.safetensors_files import CheckpointError, Shards
from ktgraph.weights.checkpoints.compressed_tensors import find_compressed_tensors
from ktgraph.weights.checkpoints.fp8 import find_fp8
from ktgraph.weights.checkpoints.gptq_awq import find_awq, find_gptq
from ktgraph.weights.checkpoints.mxfp4 import find_mxfp4
from ktgraph.weights.checkpoints.quantized import QuantizedTensor

Finder = Callable[[Shards, Mapping[str, Any]], list[QuantizedTensor]]

# quant_method of config.json -> what finds its tensors
_FINDERS: dict[str, Finder] = {
    "awq": find_awq,
    "compressed-tensors": find_compressed_tensors,
    "fp8": find_fp8,
    "gptq": find_gptq,
    "mxfp4": find_mxfp4,
}


def find_quantized(shards: Shards, settings: Mapping[str, Any]) -> list[QuantizedTensor]:
    """The quantized tensors of a checkpoint; `settings` is config.json's quantization_config.

    Raises CheckpointError for a method that is not read, for parts that are missing or do not fit.
    """
    method = settings.get("quant_method")
    finder = _FINDERS.get(str(method))
    if finder is None:
        raise CheckpointError(
            f"{shards.folder}: config.json says the weights are quantized by {method!r}, which "
            f"ktgraph does not read (it reads {', '.join(_FINDERS)}). Use the bf16 checkpoint with "
            "quantize=, or a .gguf file"
        )
    found = finder(shards, settings)
    if not found:
        raise CheckpointError(
            f"{shards.folder}: config.json says the weights are quantized by {method!r}, but no "
            "tensor in its files is. The files belong to another checkpoint: if they are plain, "
            "remove quantization_config from config.json"
        )
    return found


__all__ = ["QuantizedTensor", "find_quantized"]
