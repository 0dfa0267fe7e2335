"""What a user may give as a model, and what generation needs to know besides the graph."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from torch import nn

from ktgraph.errors import UnsupportedInputError, path_of
from ktgraph.packed_folder import plan_in
from ktgraph.tokenizer import Tokenizer, is_unicode
from ktgraph.weights.sources import ModelSource, WeightSource

if TYPE_CHECKING:
    # slow: a start from packed weights does without
    from transformers import PreTrainedConfig, PreTrainedModel

Model: TypeAlias = "nn.Module | PreTrainedConfig | str | Path"

SUPPORTED = (
    "give a checkpoint folder (config.json and *.safetensors), a .gguf file, or a causal language "
    "model loaded by transformers"
)
_LATER = {".onnx": "ONNX files"}


@dataclass(frozen=True)
class ModelCard:
    """What generation needs besides the graph.

    max_context: positions the model was made for.  sampling: fields of `Sampling` that its makers
    advise (generation_config.json); chats begin with them.
    """

    name: str
    max_context: int | None
    eos: tuple[int, ...]
    bos: int | None
    tokenizer: Tokenizer | None
    sampling: Mapping[str, float] = field(default_factory=dict[str, float])

    def need_tokenizer(self, wanted: str) -> Tokenizer:
        """The tokenizer; without one an error says that token ids work."""
        if self.tokenizer is not None:
            return self.tokenizer
        raise UnsupportedInputError(
            f"{wanted} needs a tokenizer, and {self.name} has no tokenizer.json. Give token ids, "
            "or compile with tokenizer=<folder that holds a tokenizer.json>"
        )

    def to_json(self) -> dict[str, Any]:
        """Everything, the tokenizer's files included, for a saved plan."""
        tokenizer = self.tokenizer
        return {
            "name": self.name,
            "max_context": self.max_context,
            "eos": list(self.eos),
            "bos": self.bos,
            "sampling": dict(self.sampling),
            "tokenizer": None if tokenizer is None else tokenizer.to_json(),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> ModelCard:
        """Reads back what `to_json` gave."""
        files = data["tokenizer"]
        return ModelCard(
            name=data["name"],
            max_context=data["max_context"],
            eos=tuple(data["eos"]),
            bos=data["bos"],
            sampling=data.get("sampling", {}),
            tokenizer=None if files is None else Tokenizer.from_json(files),
        )


@dataclass(frozen=True)
class ModelInput:
    """A model that can be traced: a loaded one, a checkpoint folder, a GGUF file, or a config."""

    model: PreTrainedModel | PreTrainedConfig | Path
    card: ModelCard


def is_gguf(path: str | Path) -> bool:
    """Whether a path names a GGUF file."""
    return Path(path).suffix.lower() == ".gguf"


def read_model(model: Model, tokenizer: str | Path | None = None) -> ModelInput:
    """Recognise what was given; a config, or the path of its file, can be traced but not run.

    `tokenizer` is a folder with a tokenizer.json; without it the model's own folder is searched.
    Raises UnsupportedInputError saying what is supported.
    """
    if tokenizer is not None:
        tokenizer = path_of("tokenizer", tokenizer)
    if not isinstance(model, (str, Path)):
        return _of_object(model, tokenizer)
    if Path(model).suffix == ".json" and not Path(model).is_dir():
        path = Path(model)
        name = path.resolve().parent.name if path.name == "config.json" else path.stem
        config = _read_config(path)
        return ModelInput(config, _card_of_config(name, config))
    if is_gguf(model) and Path(model).exists():
        return ModelInput(Path(model), _card_of_gguf(Path(model), tokenizer))
    folder = _checkpoint_folder(Path(model))
    return ModelInput(folder, _card_of_folder(folder, tokenizer))


def _of_object(model: nn.Module | PreTrainedConfig, tokenizer: str | Path | None) -> ModelInput:
    from transformers import PreTrainedConfig, PreTrainedModel

    from ktgraph.patching import is_patched

    if isinstance(model, PreTrainedModel):
        if is_patched(model):
            raise UnsupportedInputError(
                f"{type(model).__name__} is patched: its MoE blocks are compiled already. "
                "ktgraph.unpatch(model) first, or load the model again"
            )
        return ModelInput(model, _card_of_model(model, tokenizer))
    if isinstance(model, PreTrainedConfig):
        name = Path(model.name_or_path or "").name or str(model.model_type)
        return ModelInput(model, _card_of_config(name, model))
    if isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UnsupportedInputError(
            f"{type(model).__name__}: a torch module that is no transformers model is traced from "
            f"the arguments of one call, as in kt.compile(module, example_inputs=(x,)); {SUPPORTED}"
        )
    raise UnsupportedInputError(f"a model of type {type(model).__name__}; {SUPPORTED}")


def _checkpoint_folder(path: Path) -> Path:
    later = _LATER.get(path.suffix.lower())
    if later is not None:
        raise UnsupportedInputError(f"{path}: {later} are not supported yet; {SUPPORTED}")
    if not path.exists():
        kind = "file" if is_gguf(path) else "folder"
        raise UnsupportedInputError(
            f"{path}: no such {kind}, and ktgraph downloads nothing; {SUPPORTED}"
        )
    if plan_in(path) is not None:
        raise UnsupportedInputError(
            f"{path} holds packed weights: kt.load, `ktgraph run` and `ktgraph chat` start from "
            "it; this needs the checkpoint that it was made from"
        )
    if not path.is_dir():
        raise UnsupportedInputError(f"{path}: not a checkpoint folder; {SUPPORTED}")
    if not is_unicode(str(path)):
        raise UnsupportedInputError(
            f"{str(path)!r}: the name is not UTF-8, and safetensors opens no such path; give the "
            "folder another name, or a link to it that has one"
        )
    if not (path / "config.json").is_file():
        gguf = ", ".join(f.name for f in sorted(path.iterdir()) if is_gguf(f))
        found = f", but {gguf}: give the file's own path" if gguf else ""
        raise UnsupportedInputError(f"{path}: no config.json in this folder{found}; {SUPPORTED}")
    return path


def _read_config(path: Path) -> PreTrainedConfig:
    """The config of a file; raises UnsupportedInputError when transformers reads none there."""
    import transformers

    if not path.is_file():
        raise UnsupportedInputError(f"{path}: no such file; {SUPPORTED}")
    _read_json(path)
    try:
        auto = cast("Any", transformers.AutoConfig)
        return cast("PreTrainedConfig", auto.from_pretrained(str(path), local_files_only=True))
    except Exception as error:
        lines = str(error).strip().splitlines()
        reason = lines[0][:300] if lines else type(error).__name__
        raise UnsupportedInputError(
            f"{path}: transformers {transformers.__version__} cannot read it as a config: "
            f"{reason}. Check `model_type`; a newer transformers may know it"
        ) from error


def _card_of_config(name: str, config: PreTrainedConfig) -> ModelCard:
    return ModelCard(name, getattr(config, "max_position_embeddings", None), (), None, None)


def _card_of_folder(folder: Path, tokenizer: str | Path | None) -> ModelCard:
    config = _read_json(folder / "config.json")
    generation = _read_json(folder / "generation_config.json")
    asked = tokenizer is not None
    return _card(folder.resolve().name, config, generation, tokenizer or folder, asked)


def _card_of_gguf(path: Path, tokenizer: str | Path | None) -> ModelCard:
    """From the metadata; the tokenizer from a tokenizer.json beside the file."""
    from ktgraph.frontends.gguf_file import GgufFile

    file = GgufFile(path)
    config = {
        "max_position_embeddings": file.of_model("context_length"),
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.get("tokenizer.ggml.eos_token_id"),
    }
    folder = tokenizer or path.resolve().parent
    return _card(path.stem, config, {}, folder, tokenizer is not None)


def _card_of_model(model: PreTrainedModel, tokenizer: str | Path | None) -> ModelCard:
    config = model.config.to_dict()
    settings = getattr(model, "generation_config", None)  # encoders have none
    generation: dict[str, Any] = settings.to_dict() if settings is not None else {}
    folder = Path(model.name_or_path or "-")
    name = folder.name if folder.is_dir() else type(model).__name__
    return _card(name, config, generation, tokenizer or folder, tokenizer is not None)


def _card(
    name: str,
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    folder: str | Path,
    asked: bool,
) -> ModelCard:
    found = Tokenizer.from_folder(folder)
    if asked and found is None:
        raise UnsupportedInputError(f"tokenizer={folder}: no tokenizer.json in this folder")
    bos = _first(generation.get("bos_token_id"), config.get("bos_token_id"))
    eos = _first(generation.get("eos_token_id"), config.get("eos_token_id"))
    return ModelCard(
        name=name,
        max_context=config.get("max_position_embeddings"),
        eos=_ids(eos),
        bos=bos if bos is not None or found is None else found.bos_id,
        tokenizer=found,
        sampling=_sampling(generation),
    )


_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def _sampling(generation: Mapping[str, Any]) -> dict[str, float]:
    if not generation.get("do_sample"):
        return {}
    given = {"temperature": 1.0, **generation}  # sampling without a temperature is at 1
    return {name: given[name] for name in _SAMPLING if given.get(name) is not None}


def _first(*values: Any) -> Any:
    return next((v for v in values if v is not None), None)


def _ids(value: Any) -> tuple[int, ...]:
    if isinstance(value, Sequence):
        return tuple(int(v) for v in cast("Sequence[Any]", value))
    return () if value is None else (int(value),)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnsupportedInputError(
            f"{path}: not valid JSON: {error}. Correct it, or download this file again"
        ) from None
    if isinstance(found, dict):
        return cast("dict[str, Any]", found)
    raise UnsupportedInputError(f"{path}: expected a JSON object, found {type(found).__name__}")


def weight_source(given: ModelInput) -> WeightSource | None:
    """Where the model's weights are read from; a config has none."""
    if isinstance(given.model, Path) and is_gguf(given.model):
        from ktgraph.frontends.gguf_model import open_gguf

        return open_gguf(given.model).source
    if isinstance(given.model, Path):
        from ktgraph.weights.safetensors_source import SafetensorsSource

        return SafetensorsSource(given.model)
    return ModelSource(given.model) if isinstance(given.model, nn.Module) else None
