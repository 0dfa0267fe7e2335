"""A GGUF file as a model: the config that it describes, and where each parameter lies."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedConfig

from ktgraph.frontends.file_forms import FileForms
from ktgraph.frontends.gguf_config import gguf_config
from ktgraph.frontends.gguf_file import GgufFile
from ktgraph.frontends.gguf_names import gguf_forms

if TYPE_CHECKING:
    from ktgraph.weights.gguf_source import GgufSource

_FACTORS = "rope_freqs.weight"  # what rope frequencies are divided by (Llama 3)


@dataclass(frozen=True)
class OpenedGguf:
    """`buffers`: rope frequencies, by parameter; `source` serves them and the file's tensors."""

    config: PreTrainedConfig
    forms: FileForms
    buffers: dict[str, torch.Tensor]
    source: GgufSource


def open_gguf(path: str | Path) -> OpenedGguf:
    """Everything but the graph, from the file's header.

    Raises CheckpointError for a damaged file, UnsupportedModelError for other architectures.
    """
    from ktgraph.frontends.hf_build import build_twin
    from ktgraph.weights.gguf_source import GgufSource

    file = GgufFile(path)
    config = gguf_config(file)
    twin = build_twin(config)
    buffers = _scaled(file, twin.buffers)
    source = GgufSource(file, buffers)
    names, made = gguf_forms(twin.model, file)
    used = [*names.values(), *(s for m in made.values() for s in m.sources)]
    encodings = {name: found for name in used if (found := source.encoding(name))}
    plain = {name: source.dtype(name) for name in used if name not in encodings}
    _warn_unused(file, used)
    return OpenedGguf(config, FileForms(names, made, encodings, plain), buffers, source)


def _scaled(file: GgufFile, buffers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if _FACTORS not in file.tensors:
        return buffers
    factors = torch.from_numpy(file.tensors[_FACTORS].data.copy()).float()
    return {k: v / factors if k.endswith("inv_freq") else v for k, v in buffers.items()}


def _warn_unused(file: GgufFile, used: list[str]) -> None:
    """Tensors that the model does not read: a variant with more than we build would be wrong."""
    left = sorted(set(file.tensors) - set(used) - {_FACTORS})
    left = [name for name in left if ".nextn." not in name]
    if left:
        warnings.warn(
            f"{file.path}: {len(left)} tensors are not used, e.g. {', '.join(left[:3])}: the file "
            f"may be of a variant of {file.architecture} that computes something else",
            stacklevel=2,
        )


__all__ = ["OpenedGguf", "open_gguf"]
