"""A meta-device twin of a model to trace: from a loaded model, a config, or a checkpoint folder."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ktgraph.frontends.declared_forms import declared_forms
from ktgraph.frontends.errors import UnsupportedModelError
from ktgraph.frontends.file_forms import FileForms, Made
from ktgraph.frontends.gguf_model import open_gguf
from ktgraph.model_input import is_gguf

Source = PreTrainedModel | PreTrainedConfig | str | Path


@dataclass
class Twin:
    """A model without weights; `buffers` holds the few values that no checkpoint has."""

    model: PreTrainedModel
    buffers: dict[str, Tensor]
    stored: dict[str, torch.dtype]  # dtype of each parameter and buffer before any override
    files: FileForms = field(default_factory=FileForms)

    def stored_dtype(self, name: str) -> torch.dtype | None:
        """The dtype that a parameter is stored in: the files', else the model's own."""
        at = self.files.names.get(name, name)
        return self.files.dtypes.get(at, self.stored.get(name))

    @property
    def config(self) -> PreTrainedConfig:
        return self.model.config


def build_twin(source: Source, dtype: torch.dtype | None = None, *, forms: bool = True) -> Twin:
    """The twin of `source`, computing in `dtype` (default: the model's own).

    A loaded model is neither changed nor copied: its structure is, with parameters on meta.
    forms: whether to find out how files store the parameters.
    """
    if isinstance(source, PreTrainedModel):
        return _twin_of_model(source, dtype)
    if isinstance(source, PreTrainedConfig):
        twin = _twin_of_config(copy.deepcopy(source), dtype)
        settings = quantization_of(source) if forms else None
        if settings is not None:
            twin.files = declared_forms(twin.model, settings)
        return twin
    if is_gguf(source):
        return _twin_of_gguf(Path(source), dtype)
    twin = _twin_of_config(load_config(source), dtype)
    if quantization_of(twin.config) is not None:
        twin.files = _file_forms(Path(source), twin.model)
    return twin


def quantization_of(config: PreTrainedConfig) -> Mapping[str, Any] | None:
    """The quantization_config of a config; None for a plain model."""
    given: Any = getattr(config, "quantization_config", None)
    return given.to_dict() if hasattr(given, "to_dict") else given


def _twin_of_gguf(path: Path, dtype: torch.dtype | None) -> Twin:
    opened = open_gguf(path)
    twin = _twin_of_config(opened.config, dtype)
    twin.files = opened.forms
    twin.buffers = opened.buffers
    return twin


def _file_forms(folder: Path, model: PreTrainedModel) -> FileForms:
    """What the headers of a quantized checkpoint say."""
    from ktgraph.weights.safetensors_source import SafetensorsSource

    source = SafetensorsSource(folder, model.config)
    upright = {name: found for name in source.names() if (found := source.upright(name))}
    names = [*source.names(), *upright.values()]
    encodings = {name: found for name in names if (found := source.encoding(name))}
    plain = [n for n in source.names() if n not in encodings and n not in upright]
    made = {name: Made("transpose", (found,)) for name, found in upright.items()}
    return FileForms({}, made, encodings, {name: source.dtype(name) for name in plain})


def load_config(folder: str | Path) -> PreTrainedConfig:
    """The config of a checkpoint folder; errors say what is missing."""
    folder = Path(folder)
    if not folder.is_dir():
        kind = "a file" if folder.exists() else "nothing"
        raise UnsupportedModelError(
            f"{folder}: expected a checkpoint folder (config.json and *.safetensors), found {kind}"
        )
    if not (folder / "config.json").is_file():
        raise UnsupportedModelError(
            f"{folder}: no config.json in it; a checkpoint folder has one beside its weights"
        )
    try:
        return _read_config(folder)
    except Exception as error:
        raise UnsupportedModelError(_bad_config(folder, error)) from error


def _read_config(folder: Path) -> PreTrainedConfig:
    """By `model_type`, or where transformers has none of that name, by the class it names.

    Kimi-K2 calls itself ``kimi_k2`` and is a ``DeepseekV3ForCausalLM``, whose class is used.
    """
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    known = transformers.CONFIG_MAPPING.keys()
    names = values.get("architectures") or []
    cls = getattr(transformers, names[0], None) if len(names) == 1 else None
    if cls is None or not hasattr(cls, "config_class") or values.get("model_type") in known:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    other = {k: v for k, v in values.items() if k not in ("model_type", "auto_map")}
    return cls.config_class.from_dict(other)


def _bad_config(folder: Path, error: Exception) -> str:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return (
        f"{folder / 'config.json'}: transformers {transformers.__version__} cannot read it: "
        f"{reason[:300]}. Check `model_type`; a newer transformers may know it"
    )


def _twin_of_config(config: PreTrainedConfig, dtype: torch.dtype | None) -> Twin:
    _refuse_other_architectures(config)
    own = getattr(config, "dtype", None)
    own = own if isinstance(own, torch.dtype) else dtype or torch.float32
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=own)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise UnsupportedModelError(
            f"{type(config).__name__} (architectures: {config.architectures}): no causal language "
            f"model can be built from it: {type(error).__name__}: {reason[:300]}"
        ) from error
    cast_meta(model, own)
    return _finish(model, {}, dtype)


_GENERATORS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def _refuse_other_architectures(config: PreTrainedConfig) -> None:
    """An encoder such as BERT: transformers would build a decoder that its weights are not for."""
    names = config.architectures or []
    if not names or any(name.endswith(_GENERATORS) for name in names):
        return
    raise UnsupportedModelError(
        f"{type(config).__name__}: the checkpoint holds {', '.join(names)}, which is no causal "
        "language model (…ForCausalLM): it does not generate text, so ktgraph cannot run it"
    )


def _twin_of_model(model: PreTrainedModel, dtype: torch.dtype | None) -> Twin:
    memo: dict[int, Any] = {}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=False)
    buffers = {name: b for name, b in model.named_buffers() if not b.is_meta}
    for b in model.buffers():
        memo[id(b)] = torch.empty_like(b, device="meta")
    twin = copy.deepcopy(model, memo)
    return _finish(twin, buffers, dtype)


def twin_like(twin: Twin, config: PreTrainedConfig) -> Twin:
    """A twin of the same class and dtypes as `twin`, with another config."""
    with torch.device("meta"):
        model = type(twin.model)._from_config(config, dtype=twin.model.dtype)
    kinds = {_any_layer(name): t.dtype for name, t in _tensors(twin.model)}
    for name, t in _tensors(model):
        t.data = t.data.to(kinds.get(_any_layer(name), t.dtype))
    other = _finish(model, {}, None)
    other.files = twin.files
    stored = {_any_layer(name): dtype for name, dtype in twin.stored.items()}
    other.stored = {name: stored.get(_any_layer(name), d) for name, d in other.stored.items()}
    return other


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()  # `model.to(bfloat16)` casts the rope tables too


def _any_layer(name: str) -> str:
    return re.sub(r"\.\d+\.", ".N.", name)


def _finish(model: PreTrainedModel, known: dict[str, Tensor], dtype: torch.dtype | None) -> Twin:
    model.eval().requires_grad_(False)
    stored = {name: t.dtype for name, t in _tensors(model)}
    if dtype is not None:
        cast_meta(model, dtype)
    buffers = real_buffers(model, known)
    return Twin(model, buffers, stored)


def cast_meta(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Change the dtype of a meta model as `from_pretrained` would: some tensors stay float32."""
    keep = [*(getattr(model, "_keep_in_fp32_modules_strict", None) or [])]
    wide = torch.promote_types(dtype, torch.float32)
    for name, p in model.named_parameters():
        if p.is_floating_point():
            kept = any(re.search(rf"(^|\.){re.escape(k)}(\.|$)", name) for k in keep)
            p.data = p.data.to(wide if kept else dtype)


def real_buffers(model: nn.Module, known: dict[str, Tensor]) -> dict[str, Tensor]:
    """Values of the non-persistent buffers: those given, else of the module built again on CPU."""
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        names = [n for n in module._buffers if n in module._non_persistent_buffers_set]
        missing = [n for n in names if f"{path}.{n}" not in known]
        fresh = _rebuild(path, module)._buffers if missing else {}
        for name in names:
            value = known.get(f"{path}.{name}", fresh.get(name))
            if value is not None:
                found[f"{path}.{name}"] = value.detach().cpu()
    return found


def _rebuild(path: str, module: nn.Module) -> nn.Module:
    config = getattr(module, "config", None)
    try:
        with torch.device("cpu"):
            return type(module)(config)
    except Exception as error:
        raise UnsupportedModelError(
            f"{path} ({type(module).__name__}) holds buffers that are in no checkpoint and cannot "
            f"be built again from the config ({type(error).__name__}: {error}); give the loaded "
            "model itself instead of its folder"
        ) from error
